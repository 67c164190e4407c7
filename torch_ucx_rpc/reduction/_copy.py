"""The state of a model, for transfer between trainers: `ModelCopy`."""

# mypy: allow-untyped-calls

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_ucx_rpc._arguments import check_type


class ModelCopy:
    """This trainer's copy of a model: parameters, buffers, and the optimizer's state if it has the optimizer."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None, *, trained: Sequence[str] | None = None
    ) -> None:
        """``trained`` are the names of the parameters whose gradients travel, if the trainers may differ in them."""
        if optimizer is not None:
            check_type("optimizer", torch.optim.Optimizer, "this trainer's torch.optim.Optimizer", optimizer)
        # The model may refer to the owner of this object, so this refers to the model weakly.
        self._module = weakref.ref(module)
        self._optimizer = optimizer
        self._trained = None if trained is None else list(trained)

    def state(self) -> dict[str, Any] | None:
        """Return the state for another trainer; None if the model is gone."""
        module = self._module()
        if module is None:
            return None
        return {
            "module": _copied(_tensors(module)),
            "optimizer": None if self._optimizer is None else _copied(self._optimizer.state_dict()),
            "trained": self._trained,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load the state of another trainer. Raises ValueError if that trainer has another model."""
        module = self._module()
        assert module is not None
        own, theirs = _tensors(module), state["module"]
        # A cache, such as a mask, may grow with the inputs that a trainer has seen.
        caches = _caches(module)
        if _shapes(own, caches) != _shapes(theirs, caches):
            raise ValueError("the trainers of a server must have the same model; this trainer's has other parameters")
        if self._trained != state["trained"]:
            raise ValueError(_other_names(self._trained or [], state["trained"] or []))
        # During a backward the graph holds these tensors, so their versions must not change.
        with torch.no_grad():
            for name, value in own.items():
                if name not in theirs or theirs[name].shape != value.shape:
                    continue
                if name in caches and any(step == 0 for step in value.stride()):
                    continue  # an expanded tensor, into which nothing can be copied
                value.data.copy_(theirs[name])
        if self._optimizer is not None and state["optimizer"] is not None:
            self._optimizer.load_state_dict(state["optimizer"])


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    # Not the state dict: it lacks some buffers, and a hook may have put copies into it.
    return dict(itertools.chain(module.named_parameters(), module.named_buffers()))


def _caches(module: nn.Module) -> set[str]:
    """Return the names of the buffers that a state dict leaves out."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, one in module.named_modules()
        for name in one._non_persistent_buffers_set
    }


def _shapes(tensors: dict[str, Tensor], caches: set[str]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in tensors.items() if name not in caches}


def _other_names(own: list[str], theirs: list[str]) -> str:
    if sorted(own) == sorted(theirs):
        return "the trainers of a server must have the same model; this trainer's parameters have another order"
    found = []
    for trainer, names, others in (("this", own, theirs), ("another", theirs, own)):
        if alone := next((name for name in names if name not in others), None):
            found.append(f"only {trainer} trainer trains {alone!r}")
    return (
        f"the trainers of a server must train the same parameters; {' and '.join(found)}: set requires_grad alike on "
        f"all trainers"
    )


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
