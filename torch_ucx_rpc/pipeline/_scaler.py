"""Scaling the loss for half precision, when gradients live on many workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_ucx_rpc._arguments import check_count, check_number, check_type, wrong_type, wrong_value

__all__ = ["GradScaler"]


class GradScaler:
    """Scale losses so that float16 gradients do not become zero, like ``torch.amp.GradScaler``, with its defaults.

        >>> scaler = pipeline.GradScaler()
        >>> with torch.autocast("cuda", torch.float16):
        ...     loss = pipe.step(x, target=y, scaler=scaler)
        >>> scaler.unscale_(optimizer)        # only if gradients are clipped, or looked at, before the step
        >>> pipe.clip_grad_norm_(1.0)
        >>> optimizer.step(scaler=scaler)     # skipped if a gradient is not finite; sets the next scale

    Each of several optimizers divides the gradients of its own parameters, and steps if these are finite. The next
    scale is set once for all of them, and grows only if all have stepped.

    Args:
        init_scale (float): the first scale (default: 65536).
        growth_factor (float): the scale grows by this factor after ``growth_interval`` steps in a row with finite
            gradients; above 1 (default: 2).
        backoff_factor (float): the scale shrinks by this factor after a step with a gradient that is not finite;
            between 0 and 1 (default: 0.5).
        growth_interval (int): the number of steps in a row with finite gradients after which the scale grows (default:
            2000).

    Raises ValueError for other numbers.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        for name, value in (
            ("init_scale", init_scale),
            ("growth_factor", growth_factor),
            ("backoff_factor", backoff_factor),
        ):
            check_number(name, value)
        check_count("growth_interval", 1, "a number of steps", growth_interval)
        if init_scale <= 0.0:
            raise wrong_value("init_scale", "above 0", init_scale)
        if growth_factor <= 1.0:
            raise wrong_value("growth_factor", "above 1", growth_factor)
        if not 0.0 < backoff_factor < 1.0:
            raise wrong_value("backoff_factor", "between 0 and 1", backoff_factor)
        self._scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._good_steps = 0
        self._begin()

    def _begin(self) -> None:
        """Begin a batch: its gradients have the present scale."""
        self._before = self._scale, self._good_steps
        # Optimizers whose gradients have been divided, and whether all of these are finite; optimizers that have
        # stepped.
        self._finite: dict[int, bool] = {}
        self._stepped: set[int] = set()

    def get_scale(self) -> float:
        """Return the factor of the next step's loss."""
        return self._scale

    def scale_of_step(self) -> float:
        """The factor of a loss; called by ``pipe.step(scaler=...)``."""
        if self._stepped:
            self._begin()
        return self._scale

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients of an optimizer's parameters by the scale now. Its next step does not divide them again.

        Waits for the workers. Raises RuntimeError for a second call since the optimizer's last step, and TypeError for
        anything but a `PipelineOptimizer`.
        """
        if not hasattr(optimizer, "divide_gradients"):
            raise wrong_type("optimizer", "a PipelineOptimizer, of DistributedPipeline.optimizer()", optimizer)
        if id(optimizer) in self._stepped:
            self._begin()
        if id(optimizer) in self._finite:
            raise RuntimeError("unscale_() has been called for this optimizer already since its last step")
        self._finite[id(optimizer)] = optimizer.divide_gradients(self._before[0])

    def before_step(self, optimizer: Any) -> bool:
        """Set the next scale. Returns whether an optimizer is to step. ``optimizer.step(scaler=...)`` calls this."""
        if id(optimizer) in self._stepped or id(optimizer) not in self._finite:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        # The new scale follows from the batch's first one, so it changes once for any number of optimizers.
        self._scale, self._good_steps = self._before
        if not all(self._finite[one] for one in self._stepped):
            self._scale, self._good_steps = self._scale * self._backoff_factor, 0
        elif self._good_steps + 1 < self._growth_interval:
            self._good_steps += 1
        else:
            self._scale, self._good_steps = self._scale * self._growth_factor, 0
        return self._finite[id(optimizer)]

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the number of steps since it changed, for a checkpoint."""
        return {"scale": self._scale, "good_steps": self._good_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the result of `state_dict`. Raises ValueError for a dict without its keys."""
        expected = "a dict that state_dict() returned"
        check_type("state_dict", Mapping, expected, state_dict)
        if not {"scale", "good_steps"} <= state_dict.keys():
            raise wrong_value("state_dict", expected, state_dict)
        self._scale = state_dict["scale"]
        self._good_steps = state_dict["good_steps"]
        self._begin()
