"""The values between stages: any nesting of tuples, lists, dicts and dataclasses, with tensors, None and anything else
that can be pickled.

A *packet* carries such a value from one stage to the next. It has the value with its tensors detached. So they have
lost ``requires_grad``, and the packet also has the positions of the tensors that want a gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = [
    "Packet",
    "batch_size",
    "equal",
    "flatten",
    "map_tensors",
    "merge",
    "pack",
    "split",
    "tensors_of",
    "to_device",
    "unpack",
]

# The value, and the positions among its leaves of those that want a gradient. None stands for (0,) with the value
# itself as the only leaf, the usual case, which needs no walk through a tree.
Packet = tuple[Any, "tuple[int, ...] | None"]

_registering = threading.Lock()

# Types without tensors inside.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


def pack(value: Any) -> tuple[Packet, list[torch.Tensor]]:
    """Return a packet of ``value``, and the tensors in it whose gradient will come back, in the packet's order."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            return (value.detach(), None), [value]
        return (value, ()), []
    if not any(one.requires_grad for one in tensors_of(value)):
        return (value, ()), []
    leaves, spec = flatten(value)
    wanting = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    tensors = [leaves[place] for place in wanting]
    for place in wanting:
        leaves[place] = leaves[place].detach()
    return (pytree.tree_unflatten(leaves, spec), tuple(wanting)), tensors


def unpack(packet: Packet, device: torch.device, grad: bool) -> tuple[Any, list[torch.Tensor]]:
    """Return the value on ``device``, and its leaves that collect a gradient; without ``grad``, no leaves."""
    value, wanting = packet
    if wanting is None:
        # Only this packet refers to its tensor, even if a stage on this host has handed it over.
        leaf = _on(value, device)
        return (leaf.requires_grad_(), [leaf]) if grad else (leaf, [])
    if not wanting or not grad:
        return to_device(value, device), []
    leaves, spec = flatten(value)
    collected = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            moved = _on(leaf, device)
            if place in wanting:
                collected.append(moved.requires_grad_())
            leaves[place] = moved
    return pytree.tree_unflatten(leaves, spec), collected


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # A copy to the CPU must be complete: no later work on the CPU would wait for the device.
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


def to_device(value: Any, device: torch.device) -> Any:
    """Return ``value`` with all its tensors on ``device``."""
    return map_tensors(lambda tensor: _on(tensor, device), value)


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Flatten as pytree does, dataclasses included: to pytree they are leaves until they are registered."""
    while True:
        leaves, spec = pytree.tree_flatten(value)
        # Register all dataclasses, even without tensors: positions count leaves, so a value must have the same leaves
        # on all workers.
        unknown = {type(leaf) for leaf in leaves if _is_plain_dataclass(type(leaf))}
        if not unknown:
            return leaves, spec
        with _registering:
            for kind in unknown - pytree.SUPPORTED_NODES.keys():
                pytree.register_pytree_node(kind, _attributes_of, functools.partial(_with_attributes, kind))


def _is_plain_dataclass(kind: type) -> bool:
    # A dataclass that is also a container has more than attributes.
    return dataclasses.is_dataclass(kind) and not issubclass(kind, (dict, list, tuple, torch.Tensor, torch.nn.Module))


def _attributes_of(one: Any) -> tuple[list[Any], tuple[str, ...]]:
    names = dict.fromkeys([*(field.name for field in dataclasses.fields(one)), *getattr(one, "__dict__", ())])
    found = tuple(name for name in names if hasattr(one, name))
    return [getattr(one, name) for name in found], found


def _with_attributes(kind: type, values: Iterable[Any], names: tuple[str, ...]) -> Any:
    # Avoid __init__, which may take other arguments, and the class's __setattr__, which may be frozen.
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return ``value`` with ``function(tensor)`` in place of each tensor."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return function(value)
    # Map usual containers without pytree, in a tenth of its time: each micro-batch has such containers.
    if kind is tuple or kind is list:
        return kind([map_tensors(function, one) for one in value])
    if kind is dict:
        return {key: map_tensors(function, one) for key, one in value.items()}
    if kind in _PLAIN:
        return value
    leaves, spec = flatten(value)
    return pytree.tree_unflatten([function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return all tensors in ``value``, in pytree's order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found


def equal(one: Any, other: Any) -> bool:
    """Tell whether two values other than tensors are equal; False if the comparison has no clear result."""
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:
        # For example, arrays compare element by element.
        return False


# ------------------------------------------------------------------------------------------------------ micro-batches


def batch_size(values: Any) -> int | None:
    """Return the common size of dimension 0 of all tensors that have one, or None.

    Raises ValueError if sizes differ.
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
    """Divide ``values`` into ``count`` micro-batches: divide tensors along dimension 0, and repeat everything else.

    If the size is not a multiple of ``count``, the first ones are larger by one, as with `torch.tensor_split`.
    """
    kind = type(values)
    if isinstance(values, torch.Tensor) and values.dim() > 0:
        # Unlike torch.tensor_split, this is one node for autograd.
        size, larger = divmod(len(values), count)
        return list(torch.split(values, [size + 1] * larger + [size] * (count - larger)))
    if kind is tuple or kind is list:
        if not values:
            return [kind()] * count
        return [kind(parts) for parts in zip(*(split(one, count) for one in values), strict=True)]
    if kind is dict:
        columns = {key: split(one, count) for key, one in values.items()}
        return [{key: column[number] for key, column in columns.items()} for number in range(count)]
    leaves, spec = flatten(values)
    parts = [split(one, count) if isinstance(one, torch.Tensor) and one.dim() > 0 else [one] * count for one in leaves]
    return [pytree.tree_unflatten([part[number] for part in parts], spec) for number in range(count)]


def merge(parts: Sequence[Any]) -> Any:
    """Join the outputs of micro-batches: concatenate tensors along dimension 0, and stack scalars.

    Other leaves become a list: tensors whose sizes do not fit, and values that are not equal. Outputs of different
    structures become a list too.
    """
    flattened = [flatten(part) for part in parts]
    spec = flattened[0][1]
    if any(other != spec for _, other in flattened):
        return list(parts)
    columns = zip(*(leaves for leaves, _ in flattened), strict=True)
    return pytree.tree_unflatten([_merge_column(column) for column in columns], spec)


def _merge_column(column: Sequence[Any]) -> Any:
    first = column[0]
    if all(isinstance(one, torch.Tensor) for one in column):
        if any(one.dim() != first.dim() or one.shape[1:] != first.shape[1:] for one in column):
            return list(column)
        return torch.cat(list(column)) if first.dim() > 0 else torch.stack(list(column))
    return first if all(equal(one, first) for one in column) else list(column)
