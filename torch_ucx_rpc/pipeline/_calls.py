"""One batch as the workers get it: divided into micro-batches, with the settings that it depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_ucx_rpc.pipeline._partition import Partition
from torch_ucx_rpc.pipeline._stage import Autocast
from torch_ucx_rpc.pipeline._values import Packet, batch_size, pack, split
from torch_ucx_rpc.pipeline._wiring import INPUT, StageSpec

__all__ = ["Circumstances", "circumstances", "divided", "packets"]


class Circumstances(NamedTuple):
    """Settings that a call depends on beside its arguments. A repetition uses the settings of the first time."""

    autocast: Autocast
    trained: tuple[bool, ...]
    """Whether each parameter of the model wants a gradient."""


def circumstances(parameters: Mapping[str, torch.nn.Parameter]) -> Circumstances:
    """Return the settings of a call that this thread makes now."""
    autocast = tuple(
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )
    return Circumstances(autocast, tuple(one.requires_grad for one in parameters.values()))


def divided(
    partition: Partition, chunks: int, args: Any, kwargs: Any, target: tuple[Any, ...]
) -> tuple[int, list[Any], list[Any]]:
    """Return the number of micro-batches, their arguments, and the targets. Raises ValueError if the batch cannot be
    divided."""
    args, kwargs = partition.arguments(args, kwargs)
    size = batch_size((args, kwargs, target))
    if size == 0:
        raise ValueError("the batch is empty: a step needs one sample at least")
    count = chunks if size is None else min(chunks, size)
    return count, split((args, kwargs), count), split(target, count)


def packets(specs: Sequence[StageSpec], inputs: list[Any], *, grad: bool) -> dict[int, list[Packet]]:
    """Return the values of the batch that each stage needs. Only calls want gradients of them, since only a caller can
    use them."""
    found: dict[int, list[Packet]] = {}
    for spec in specs:
        if any(edge.source == INPUT for edge in spec.edges_in):
            packed = [pack(_input_of(spec, one))[0] for one in inputs]
            found[spec.index] = packed if grad else [(value, ()) for value, _ in packed]
    return found


def _input_of(spec: StageSpec, one: tuple[Any, Any]) -> Any:
    if spec.arguments is None:
        return one
    items = next(edge.items for edge in spec.edges_in if edge.source == INPUT)
    assert items is not None
    return tuple(one[0][item] for item in items)
