"""Scaling the loss for half precision, when gradients live on many workers."""

from __future__ import annotations

from typing import Any

__all__ = ["GradScaler"]


class GradScaler:
    """What ``torch.amp.GradScaler`` does for one process, with its defaults: float16 gradients do not become zero.

        >>> scaler = pipeline.GradScaler()
        >>> with torch.autocast("cuda", torch.float16):
        ...     loss = pipe.step(x, target=y, scaler=scaler)
        >>> optimizer.step(scaler=scaler)     # left out where a gradient is not finite; sets the next scale

    Args:
        init_scale: the first scale.
        growth_factor: the scale grows by this factor after ``growth_interval`` steps with finite gradients.
        backoff_factor: the scale shrinks by this factor after a step with other gradients.
        growth_interval: the number of steps with finite gradients after which the scale grows.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if growth_factor <= 1.0 or not 0.0 < backoff_factor < 1.0 or growth_interval < 1 or init_scale <= 0.0:
            raise ValueError(
                "a scaler needs init_scale > 0, growth_factor > 1, 0 < backoff_factor < 1, growth_interval >= 1"
            )
        self._scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._good_steps = 0

    def get_scale(self) -> float:
        """The factor of the next step's loss."""
        return self._scale

    def update(self, finite: bool) -> None:
        """Set the next scale; called by ``optimizer.step(scaler=...)``."""
        if not finite:
            self._scale *= self._backoff_factor
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self._scale *= self._growth_factor
            self._good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The scale, and the number of steps since it changed, for a checkpoint."""
        return {"scale": self._scale, "good_steps": self._good_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._scale = state_dict["scale"]
        self._good_steps = state_dict["good_steps"]
