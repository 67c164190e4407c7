"""The state of a model, which goes from one trainer to another: `ModelCopy`."""

# mypy: allow-untyped-calls

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from torch_ucx_rpc._arguments import check_type


class ModelCopy:
    """This trainer's copy of a model: parameters, buffers, and the optimizer's state if that is known."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None:
            check_type("optimizer", torch.optim.Optimizer, "this trainer's torch.optim.Optimizer", optimizer)
        # What knows this object may be known by the model.
        self._module = weakref.ref(module)
        self._optimizer = optimizer

    def state(self) -> dict[str, Any] | None:
        """What others take over; None if the model is gone."""
        module = self._module()
        if module is None:
            return None
        return {
            "module": _copied(dict(module.state_dict())),
            "optimizer": None if self._optimizer is None else _copied(self._optimizer.state_dict()),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over the state of another trainer. ValueError if that has another model."""
        module = self._module()
        assert module is not None
        own, theirs = module.state_dict(), state["module"]
        if _shapes(own) != _shapes(theirs):
            raise ValueError("the trainers of a server must have the same model; this one's has other parameters")
        # In a backward, the graph has these tensors: their versions must not change.
        with torch.no_grad():
            for name, value in own.items():
                if isinstance(value, Tensor):
                    value.data.copy_(theirs[name])
        if self._optimizer is not None and state["optimizer"] is not None:
            self._optimizer.load_state_dict(state["optimizer"])


def _shapes(state: dict[str, Any]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items() if isinstance(value, Tensor)}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
