"""``pipe(x)`` in autograd: a call is one node of the graph, whose backward runs on the stages."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_ucx_rpc.pipeline._batches import Batches
from torch_ucx_rpc.pipeline._crew import Crew
from torch_ucx_rpc.pipeline._errors import PipelineError
from torch_ucx_rpc.pipeline._partition import INPUT, StageSpec
from torch_ucx_rpc.pipeline._values import Packet, flatten, merge, merge_leaves, tensors_of

__all__ = ["call_with_autograd"]


class _Call:
    """A forward whose graph the workers keep until its backward, or until no reference to its output is left."""

    def __init__(self, batches: Batches, args: Any, kwargs: Any) -> None:
        self.batches = batches
        self.crew, self.number, inputs, self.outputs = batches.forward(args, kwargs)
        self.count = len(self.outputs)
        self.forget = weakref.finalize(self, _forget, weakref.ref(batches.model.crew), self.number)
        self.forget.atexit = False
        # By stage, the batch's tensors that want a gradient and that it has used, in the order in which it answers.
        self.used = _used(batches.model.specs, inputs[0])


def _forget(reference: weakref.ref[Crew], number: int) -> None:
    if (crew := reference()) is not None:
        crew.forget(number)


def call_with_autograd(batches: Batches, args: Any, kwargs: Any) -> Any:
    """Return the output of a batch, in whose backward the stages run theirs."""
    call = _Call(batches, args, kwargs)
    packets = call.outputs
    outputs = [packet[0] for packet in packets]
    if all(positions == () for _, positions in packets):
        call.forget()
        return merge(outputs)
    leaves, spec, wanting = _merged(outputs, packets)
    # The stages may count keyword arguments in another order.
    sources = [one for one in tensors_of(batches.model.partition.arguments(args, kwargs)) if one.requires_grad]
    # Autograd makes a node only if an argument wants a gradient. The parameters do, but on other workers.
    anchor = torch.empty(0, requires_grad=True)
    made = _Node.apply(  # type: ignore[no-untyped-call]
        call, wanting, len(sources), anchor, *sources, *[leaves[place] for place in wanting]
    )
    for place, leaf in zip(wanting, made, strict=True):
        leaves[place] = leaf
    return pytree.tree_unflatten(leaves, spec)


def _merged(outputs: list[Any], packets: list[Packet]) -> tuple[list[Any], Any, list[int]]:
    """Return leaves and structure of the whole output, and the positions of the leaves that want a gradient."""
    merged = merge_leaves(outputs)
    wanting = {(0,) if positions is None else positions for _, positions in packets}
    if merged is not None and len(wanting) == 1:
        (places,) = wanting
        if all(isinstance(merged[0][place], torch.Tensor) for place in places):
            return *merged, list(places)
    raise PipelineError(
        "micro-batches of one batch returned values of different structures or sizes, or of which other ones want a "
        "gradient: their outputs cannot be put together. Use chunks=1, call the pipeline under torch.no_grad(), or let "
        "the model return the same structure always."
    )


def _used(specs: Sequence[StageSpec], one: tuple[Any, Any]) -> dict[int, list[int]]:
    leaves, _ = flatten(one)
    numbers: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            numbers[place] = len(numbers)
    used = {}
    for spec in specs:
        for edge in spec.edges_in:
            if edge.source == INPUT:
                items = range(len(leaves)) if edge.items is None else edge.items
                used[spec.index] = [numbers[item] for item in items if item in numbers]
    return used


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, wanting: list[int], count: int, anchor: torch.Tensor, *rest: torch.Tensor
    ) -> Any:
        ctx.call = call
        ctx.wanting = wanting
        ctx.sizes = [[_sizes(packet, place) for packet in call.outputs] for place in wanting]
        call.outputs = []
        ctx.shapes = [one.shape for one in rest[:count]]
        ctx.set_materialize_grads(False)
        return tuple(one.view_as(one) for one in rest[count:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call: _Call = ctx.call
        if not call.forget.alive:
            raise PipelineError(
                "this output has been on its way back already, and what the stages kept for it is gone: call the "
                "pipeline again for a second backward"
            )
        parts = [[] for _ in range(call.count)]  # type: ignore[var-annotated]
        for gradient, sizes in zip(gradients, ctx.sizes, strict=True):
            pieces: Any = [None] * call.count
            if gradient is not None:
                pieces = gradient.unbind() if sizes[0] is None else torch.split(gradient, sizes)
            for part, piece in zip(parts, pieces, strict=True):
                part.append(piece)
        try:
            found = call.batches.backward(call.crew, call.number, parts, bool(ctx.shapes))
        except BaseException:
            call.forget()
            raise
        call.forget.detach()
        return (None, None, None, None, *_of_inputs(found, call, len(ctx.shapes)), *[None] * len(gradients))


def _sizes(packet: Packet, place: int) -> int | None:
    leaf = flatten(packet[0])[0][place]
    return leaf.shape[0] if leaf.dim() else None


def _of_inputs(found: dict[int, dict[int, list[Any]]], call: _Call, count: int) -> list[Any]:
    """Sum the gradients of the arguments that want one over the stages that used the batch, last stage first."""
    total: list[Any] = [None] * count
    for stage, by_number in sorted(found.items(), reverse=True):
        for answer, place in enumerate(call.used[stage]):
            pieces = [by_number[number][answer] for number in range(call.count)]
            if all(piece is not None for piece in pieces):
                joined = torch.cat(pieces) if pieces[0].dim() else sum(pieces[1:], pieces[0])
                total[place] = joined if total[place] is None else total[place] + joined
    return total
