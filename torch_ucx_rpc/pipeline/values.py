"""The values between stages: any nesting of tuples, lists and dicts, with tensors, None and anything picklable in it.

A *packet* is how such a value crosses from one stage to the next: the value with its tensors detached, and the
positions of the tensors that want a gradient. The wire does not carry ``requires_grad``, so the packet does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["Packet", "batch_size", "map_tensors", "merge", "pack", "split", "tensors_of", "to_device", "unpack"]

# The value, and the positions among its leaves of those that want a gradient. None stands for (0,) with the value
# itself the only leaf, which is nearly always so and needs no walk through a tree.
Packet = tuple[Any, "tuple[int, ...] | None"]

# Types without tensors inside.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


def pack(value: Any) -> tuple[Packet, list[torch.Tensor]]:
    """A packet of ``value``, and the tensors in it whose gradient will come back, in the packet's order."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            return (value.detach(), None), [value]
        return (value, ()), []
    if not any(one.requires_grad for one in tensors_of(value)):
        return (value, ()), []
    leaves, spec = pytree.tree_flatten(value)
    wanting = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    tensors = [leaves[place] for place in wanting]
    for place in wanting:
        leaves[place] = leaves[place].detach()
    return (pytree.tree_unflatten(leaves, spec), tuple(wanting)), tensors


def unpack(packet: Packet, device: torch.device, grad: bool) -> tuple[Any, list[torch.Tensor]]:
    """The value on ``device``, and the leaves of it that collect a gradient; none do without ``grad``."""
    value, wanting = packet
    if wanting is None:
        # Nobody else has the packet's tensor, even where a stage on this host has handed it over.
        leaf = _on(value, device)
        return (leaf.requires_grad_(), [leaf]) if grad else (leaf, [])
    if not wanting or not grad:
        return to_device(value, device), []
    leaves, spec = pytree.tree_flatten(value)
    collected = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            moved = _on(leaf, device)
            if place in wanting:
                collected.append(moved.requires_grad_())
            leaves[place] = moved
    return pytree.tree_unflatten(leaves, spec), collected


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # To the CPU it is waited for: there nothing else would wait for the device.
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with all its tensors on ``device``."""
    return map_tensors(lambda tensor: _on(tensor, device), value)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with ``function(tensor)`` in the place of each tensor."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return function(value)
    # The usual containers by hand: that takes a tenth of pytree's time, and there are some for each micro-batch.
    if kind is tuple or kind is list:
        return kind([map_tensors(function, one) for one in value])
    if kind is dict:
        return {key: map_tensors(function, one) for key, one in value.items()}
    return value if kind in _PLAIN else pytree.tree_map_only(torch.Tensor, function, value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in ``value``, in pytree's order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found


# ------------------------------------------------------------------------------------------------------ micro-batches


def batch_size(values: Any) -> int | None:
    """The common size of dimension 0 of all tensors that have one; None when there is none.

    Raises ValueError when they disagree.
    """
    sizes = {tensor.shape[0] for tensor in tensors_of(values) if tensor.dim() > 0}
    if len(sizes) > 1:
        raise ValueError(
            f"the tensors of a batch must agree in their first dimension, by which they are divided into "
            f"micro-batches, but have sizes {sorted(sizes)} there. Give a tensor that all micro-batches share as an "
            f"attribute (a buffer) of the stage that uses it, or expand it to the batch."
        )
    return sizes.pop() if sizes else None


def split(values: Any, count: int) -> list[Any]:
    """``count`` micro-batches of ``values``: tensors are divided along dimension 0, everything else is repeated.

    As `torch.tensor_split` does: where the size does not divide, the first ones are larger by one.
    """
    kind = type(values)
    if isinstance(values, torch.Tensor) and values.dim() > 0:
        return list(torch.tensor_split(values, count))
    if kind is tuple or kind is list:
        if not values:
            return [kind()] * count
        return [kind(parts) for parts in zip(*(split(one, count) for one in values), strict=True)]
    if kind is dict:
        columns = {key: split(one, count) for key, one in values.items()}
        return [{key: column[number] for key, column in columns.items()} for number in range(count)]
    leaves, spec = pytree.tree_flatten(values)
    parts = [
        torch.tensor_split(leaf, count) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 else [leaf] * count
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([part[number] for part in parts], spec) for number in range(count)]


def merge(parts: Sequence[Any]) -> Any:
    """The outputs of micro-batches as one value: tensors are concatenated along dimension 0, scalars stacked.

    Other leaves must be equal in all of them; they become a list where they are not.
    """
    if isinstance(parts[0], torch.Tensor):
        return _merge_leaves(parts)
    flattened = [pytree.tree_flatten(part) for part in parts]
    spec = flattened[0][1]
    if any(other != spec for _, other in flattened):
        return list(parts)
    leaves = [_merge_leaves(column) for column in zip(*(leaves for leaves, _ in flattened), strict=True)]
    return pytree.tree_unflatten(leaves, spec)


def _merge_leaves(column: Sequence[Any]) -> Any:
    first = column[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(column)) if first.dim() > 0 else torch.stack(list(column))
    return first if all(other == first for other in column) else list(column)
