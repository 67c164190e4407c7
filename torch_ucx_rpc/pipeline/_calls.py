"""One batch as the workers get it: divided into micro-batches, and a request for each worker (`Call`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_ucx_rpc.pipeline._messages import Request
from torch_ucx_rpc.pipeline._partition import Partition
from torch_ucx_rpc.pipeline._schedule import Row
from torch_ucx_rpc.pipeline._stage import Autocast
from torch_ucx_rpc.pipeline._values import Packet, batch_size, pack, split
from torch_ucx_rpc.pipeline._wiring import INPUT, StageSpec

__all__ = ["Call", "Circumstances", "circumstances", "divided", "packets"]


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


@dataclasses.dataclass
class Call:
    """One batch through the stages, before it is divided among the workers. See `Request`."""

    key: tuple[str, int]
    rows: Sequence[Row]
    micro_batches: int
    inputs: list[Any] | None = None
    targets: list[Any] | None = None
    number: int | None = None
    """None: a new call gets the next number."""
    grad: bool = True
    to_driver: bool = False
    output_gradients: list[Any] | None = None
    input_gradients: bool = False
    autocast: Autocast = ()
    scale: float | None = None
    record: bool = False
    shows_output: bool = False
    apart: bool = False

    def request(
        self,
        row: int,
        stages: Sequence[int],
        inputs: Mapping[int, list[Packet]],
        *,
        is_last: bool,
        is_known: bool,
    ) -> Request:
        """Return the request for the worker of this row; ``inputs`` are by stage."""
        assert self.number is not None
        return Request(
            row_key=self.key,
            row=None if is_known else self.rows[row],
            call=self.number,
            micro_batches=self.micro_batches,
            inputs={stage: inputs[stage] for stage in stages if stage in inputs},
            targets=self.targets if is_last or self.targets is None else [],
            grad=self.grad,
            to_driver=self.to_driver,
            output_gradients=self.output_gradients if is_last else None,
            input_gradients=self.input_gradients,
            autocast=self.autocast,
            scale=self.scale,
            record=self.record,
            shows_output=self.shows_output,
            apart=self.apart,
        )


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
