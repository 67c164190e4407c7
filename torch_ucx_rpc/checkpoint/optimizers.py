"""Room for the state of an optimizer. DCP reads into present state, and an optimizer has none before its first step. So
the room follows from the checkpoint instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element, traverse_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

__all__ = ["check_groups", "load_state", "room_for", "room_in"]

Path = tuple[Any, ...]


def room_in(optimizer: torch.optim.Optimizer, saved: Mapping[Path, Any]) -> dict[str, Any]:
    """Make room for the saved state of a torch optimizer. Raises ValueError for another number of groups."""
    check_groups(len(optimizer.param_groups), saved)
    return room_for(saved, optimizer.state_dict())


def load_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give a torch optimizer the state that was read into that room."""
    # DCP turns all keys into strings, even the numbers of parameters.
    keys = {str(key): key for group in state["param_groups"] for key in group["params"]}
    states = {keys.get(key, key): value for key, value in state.get("state", {}).items()}
    optimizer.load_state_dict({**state, "state": states})


def room_for(saved: Mapping[Path, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Make a tensor for each saved one, and None for other values. Tensors of ``own``, the present state, are
    reused."""
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
