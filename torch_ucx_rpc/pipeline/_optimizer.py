"""One optimizer for a model on many workers. Schedulers and the training loop see an optimizer of torch, and each
worker has one for its parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from torch_ucx_rpc._arguments import wrong_type
from torch_ucx_rpc.pipeline._recovery import Recovery
from torch_ucx_rpc.pipeline._scaler import GradScaler

__all__ = ["PipelineOptimizer"]


class PipelineOptimizer(torch.optim.Optimizer):
    """An optimizer made by `DistributedPipeline.optimizer`. The values of its ``param_groups`` travel with each `step`.

    ``step`` and ``zero_grad`` return at once; the workers carry them out before the next order. The next call that
    waits raises their error; so does ``pipe.synchronize()``. A ``step`` with a scaler waits until the gradients have
    been divided.
    """

    def __init__(
        self, recovery: Recovery, cls: type[torch.optim.Optimizer], params: Any, options: dict[str, Any]
    ) -> None:
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise wrong_type("cls", "an optimizer's class, such as torch.optim.AdamW", cls)
        if issubclass(cls, torch.optim.LBFGS):
            raise TypeError("LBFGS evaluates the loss again and again while it steps, and a pipeline cannot do that")
        # An optimizer on parameters without values does torch's own checks, and fills in defaults.
        local = cls(params, **options)
        self._recovery = recovery
        self._model = model = recovery.model
        self._crew = model.crew
        self._class = cls
        self._options = options
        self._number = len(model.optimizers)
        self._frozen = False
        super().__init__(local.param_groups, local.defaults)
        self._frozen = True
        names = {id(one): name for name, one in model.parameters.items()}
        try:
            self.names = [[names[id(one)] for one in group["params"]] for group in self.param_groups]
        except KeyError:
            raise ValueError(
                "the optimizer was given a parameter that is not the pipeline's: take them from pipe.parameters() or "
                "pipe.named_parameters()"
            ) from None
        recovery.do(self._crew.do, "optimizer", *self.description())
        model.optimizers.append(self)

    def description(self) -> tuple[Any, ...]:
        """Return number, class, options and groups, from which a worker makes its part."""
        return self._number, self._class, self._options, self.groups_by_name()

    def _values(self) -> list[dict[str, Any]]:
        # Entries that a scheduler has added travel too and do no harm. A learning rate may be a tensor, which a
        # scheduler could change in place while the values travel.
        return [
            {
                key: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key not in {"params", "param_names"}
            }
            for group in self.param_groups
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError: the groups are fixed by `DistributedPipeline.optimizer`."""
        if self._frozen:
            raise RuntimeError(
                "parameter groups of a pipeline's optimizer are fixed: give them all to pipe.optimizer()"
            )
        super().add_param_group(param_group)

    def step(self, closure: Any = None, *, scaler: GradScaler | None = None) -> None:  # type: ignore[override]
        """Let every worker's optimizer take a step.

        With a ``scaler`` the workers first divide the gradients of this optimizer's parameters by the scale, unless
        ``scaler.unscale_`` has done so. If a gradient is not finite on any worker, no worker takes the step. Raises
        TypeError for a ``closure``.
        """
        if closure is not None:
            raise TypeError("a pipeline's optimizer takes no closure: call pipe.step() before optimizer.step()")
        if scaler is None or scaler.before_step(self):
            self._recovery.do(self._crew.send, "optimizer_step", self._number, self._values())

    def divide_gradients(self, scale: float) -> bool:
        """Divide the gradients of this optimizer's parameters, for `GradScaler`. Returns whether all are finite."""
        factor = torch.tensor(1.0 / scale)
        return all(self._recovery.do(self._crew.do, "divide_gradients", self._number, factor))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters of the pipeline."""
        self._recovery.do(self._crew.later, "zero_grad", set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups by the names of the undivided model, as ``torch.distributed.checkpoint.state_dict``
        has them."""
        answers = self._recovery.ask(self._crew.do, "state", "optimizer", self._number)
        state = {name: one for answer in answers for name, one in answer["state"].items()}
        return {"state": state, "param_groups": self.groups_by_name()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, which need not have a "state". Raises ValueError for another number of
        parameter groups, or if it names no parameter of the pipeline."""
        self._check_names(state_dict.get("state", {}))
        self.load_groups(state_dict["param_groups"])
        self._recovery.do(self._crew.do, "set_state", state_dict, "optimizer", self._number)

    def _check_names(self, found: Collection[Any]) -> None:
        """Raise ValueError for a state that has nothing for any parameter."""
        if found and self._model.parameters.keys().isdisjoint(found):
            some = ", ".join(map(repr, sorted(found, key=str)[:3]))
            raise ValueError(
                f"it has the state of parameters {some}, and the pipeline has no parameters of these names. The state "
                f"of an optimizer in one process gets its names by "
                f"torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)."
            )

    def groups_by_name(self) -> list[dict[str, Any]]:
        """Return the parameter groups for a checkpoint, with names in place of parameters."""
        return [{**values, "params": list(names)} for values, names in zip(self._values(), self.names, strict=True)]

    def checkpoint_parts(self) -> list[Any]:
        """Return the parts that each worker writes, for `torch_ucx_rpc.checkpoint`."""
        # This import is here because it also imports torch.distributed.checkpoint, which takes long.
        from torch_ucx_rpc.checkpoint import Part
        from torch_ucx_rpc.checkpoint.optimizers import check_groups, room_for

        def groups_room(saved: Mapping[Any, Any]) -> dict[str, Any]:
            check_groups(len(self.param_groups), saved)
            self._check_names({path[1] for path in saved if path[0] == "state" and len(path) > 1})
            return room_for({path: kind for path, kind in saved.items() if path[0] == "param_groups"}, {})

        def set_groups(state: dict[str, Any]) -> None:
            if "param_groups" in state:
                self.load_groups(state["param_groups"])

        self._recovery.synchronize()
        groups = Part(None, lambda: {"param_groups": self.groups_by_name()}, groups_room, set_groups)
        return [groups, *self._model.parts("optimizer", self._number)]

    def load_groups(self, groups: list[dict[str, Any]]) -> None:
        """Take over the options that `groups_by_name` returned. Raises ValueError for another number of groups."""
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(groups)} parameter groups, and this optimizer has {len(self.param_groups)}"
            )
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key not in {"params", "param_names"}})
