"""Templates for the state of an optimizer, made from the checkpoint. DCP reads into existing tensors, and an optimizer
has none before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed.checkpoint._traverse import set_element, traverse_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

__all__ = ["Scripted", "check_groups", "load_state", "of_torch", "room_for", "room_in"]

Path = tuple[Any, ...]


def room_in(optimizer: torch.optim.Optimizer, saved: Mapping[Path, Any]) -> dict[str, Any]:
    """Make room for the saved state of a torch optimizer. Raises ValueError for another number of groups."""
    check_groups(len(optimizer.param_groups), saved)
    return room_for(saved, optimizer.state_dict())


def load_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give a torch optimizer the state that was read into the result of `room_in`."""
    # DCP turns all keys into strings, even the numbers of parameters.
    keys = {str(key): key for group in state["param_groups"] for key in group["params"]}
    states = {keys.get(key, key): value for key, value in state.get("state", {}).items()}
    optimizer.load_state_dict({**state, "state": states})


def of_torch(value: Any) -> Any:
    """Return the optimizer in a DistributedOptimizer's part on a worker. Return other values as they are."""
    if not hasattr(value, "_local_params"):
        return value
    return value.optim if isinstance(value.optim, torch.optim.Optimizer) else Scripted(value)


class Scripted:
    """State of an optimizer in TorchScript, by the place of each parameter.

    Its options are constants of the script, and are not in a checkpoint. Its dict of states is a copy in Python, so
    `load_state_dict` writes values into its tensors.

    Args:
        local: torch's ``_ScriptLocalOptimizer``.
    """

    def __init__(self, local: Any) -> None:
        self._local = local
        self._parameters = local._local_params

    def state_dict(self) -> dict[str, Any]:
        found = self._local.optim.state
        by_place = {str(place): found.get(one) for place, one in enumerate(self._parameters)}
        # Some optimizers have no state, but a checkpoint has no empty parts.
        return {
            "parameters": len(self._parameters),
            "state": {
                place: {name: value for name, value in state.items() if value is not None}
                for place, state in by_place.items()
                if state
            },
        }

    def room(self, saved: Mapping[Path, Any]) -> dict[str, Any]:
        """Make room for the saved state. Raises ValueError if it is of other parameters."""
        if not self.state_dict()["state"]:
            self._begin()
        own = self.state_dict()
        wanted = {path[1] for path in saved if path[0] == "state"}
        if not wanted <= own["state"].keys():
            raise ValueError(
                f"it has {len(wanted)} parameters with state, and this optimizer has {len(self._parameters)} on this "
                f"worker. Make the optimizer with the parameters that were saved, in their order."
            )
        return room_for(saved, own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state that was read into the room."""
        for place, own in self.state_dict()["state"].items():
            for name, value in own.items():
                read = state.get("state", {}).get(place, {}).get(name)
                value.zero_() if read is None else value.copy_(read)

    def _begin(self) -> None:
        """Let the script make its state, as it does in the first step. The parameters stay as they are."""
        values = [one.detach().clone() for one in self._parameters]
        with dist_autograd.context() as context:
            nothing = torch.stack([(one * 0).sum() for one in self._parameters]).sum()
            dist_autograd.backward(context, [nothing])  # type: ignore[attr-defined]
            self._local.step(context)
        with torch.no_grad():
            for one, value in zip(self._parameters, values, strict=True):
                one.copy_(value)


def room_for(saved: Mapping[Path, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Make a tensor for each saved one, and None for other values. This reuses tensors of ``own``, the present
    state."""
    there: dict[Path, Any] = {}
    traverse_state_dict(dict(own), there.__setitem__)
    room: dict[str, Any] = {}
    for path, kind in saved.items():
        place = None
        if isinstance(kind, TensorStorageMetadata):
            place = there.get(path)
            if not isinstance(place, torch.Tensor):
                place = torch.empty(kind.size, dtype=kind.properties.dtype)
        set_element(room, path, place)
    return room


def check_groups(count: int, saved: Mapping[Path, Any]) -> None:
    """Raise ValueError for a checkpoint with another number of parameter groups than ``count``."""
    theirs = len({path[1] for path in saved if path[0] == "param_groups" and len(path) > 1})
    # A checkpoint of torch before 2.4 has all groups as one value.
    if theirs not in {0, count}:
        raise ValueError(
            f"it has {theirs} parameter group{'s' if theirs > 1 else ''}, and this optimizer has {count}. Make the "
            f"optimizer with the groups that were saved."
        )
