"""The state of a model, for transfer between trainers: `ModelCopy`."""

# mypy: allow-untyped-calls

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from torch_ucx_rpc._arguments import check_type


class ModelCopy:
    """This trainer's copy of a model: parameters, buffers, and the optimizer's state if it has the optimizer."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None:
            check_type("optimizer", torch.optim.Optimizer, "this trainer's torch.optim.Optimizer", optimizer)
        # The model may refer to the owner of this object, so this refers to the model weakly.
        self._module = weakref.ref(module)
        self._optimizer = optimizer

    def state(self) -> dict[str, Any] | None:
        """Return the state for another trainer; None if the model is gone."""
        module = self._module()
        if module is None:
            return None
        return {
            "module": _copied(dict(module.state_dict())),
            "optimizer": None if self._optimizer is None else _copied(self._optimizer.state_dict()),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load the state of another trainer. Raises ValueError if that trainer has another model."""
        module = self._module()
        assert module is not None
        own, theirs = module.state_dict(), state["module"]
        if _shapes(own) != _shapes(theirs):
            raise ValueError("the trainers of a server must have the same model; this trainer's has other parameters")
        # During a backward the graph holds these tensors, so their versions must not change.
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
