"""``pipe(x)`` in autograd: a call is one node of the graph, whose backward runs on the stages.

The node takes and returns the tensors of micro-batches. Autograd itself divides the batch, and joins the outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_ucx_rpc.pipeline._batches import Batches
from torch_ucx_rpc.pipeline._errors import PipelineError
from torch_ucx_rpc.pipeline._partition import INPUT, StageSpec
from torch_ucx_rpc.pipeline._values import flatten, merge

__all__ = ["call_with_autograd"]


class _Call:
    """A forward whose graph the workers keep until its backward, or until no reference to its output is left."""

    def __init__(self, batches: Batches, args: Any, kwargs: Any) -> None:
        self.batches = batches
        self.number, self.inputs, packets = batches.forward(args, kwargs, grad=True)
        self.crew = batches.model.crews
        self.forget = weakref.finalize(self, batches.model.crew.forget, self.number)
        self.forget.atexit = False
        self.outputs = [flatten(value) for value, _ in packets]
        # The positions of the leaves that want a gradient, by micro-batch.
        self.wanting = [(0,) if positions is None else positions for _, positions in packets]


def call_with_autograd(batches: Batches, args: Any, kwargs: Any) -> Any:
    """Return the output of a batch. Its backward makes the stages run their backwards."""
    call = _Call(batches, args, kwargs)
    outputs, call.outputs = call.outputs, []
    inputs, call.inputs = call.inputs, []
    found = [leaves[place] for (leaves, _), places in zip(outputs, call.wanting, strict=True) for place in places]
    if found:
        sources = [leaf for one in inputs for leaf in flatten(one)[0] if _wants(leaf)]
        # Autograd makes a node only if an argument wants a gradient. The parameters do, but on other workers.
        anchor = torch.empty(0, requires_grad=True)
        used = _used(batches.model.specs, inputs[0])
        made = iter(_Node.apply(call, used, len(sources), anchor, *sources, *found))  # type: ignore[no-untyped-call]
        for (leaves, _), places in zip(outputs, call.wanting, strict=True):
            for place in places:
                leaves[place] = next(made)
    else:
        call.forget()
    return merge([pytree.tree_unflatten(leaves, spec) for leaves, spec in outputs])


def _wants(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _used(specs: Sequence[StageSpec], one: tuple[Any, Any]) -> dict[int, list[int]]:
    """Return, by stage, which tensors the stage takes, as positions among a micro-batch's tensors that want a
    gradient."""
    leaves, _ = flatten(one)
    wanting = [place for place, leaf in enumerate(leaves) if _wants(leaf)]
    used = {}
    for spec in specs:
        for edge in spec.edges_in:
            if edge.source == INPUT:
                items = range(len(leaves)) if edge.items is None else edge.items
                used[spec.index] = [wanting.index(item) for item in items if item in wanting]
    return used


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, used: dict[int, list[int]], count: int, anchor: torch.Tensor, *rest: torch.Tensor
    ) -> Any:
        ctx.call = call
        ctx.used = used
        ctx.count = count
        ctx.set_materialize_grads(False)
        return tuple(one.view_as(one) for one in rest[count:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        with torch.no_grad():
            of_inputs = _gradients_of_inputs(ctx, gradients)
        if torch.is_grad_enabled() and of_inputs:
            # With create_graph the results get a node that raises. torch's once_differentiable leaves the node out if
            # no incoming gradient wants one, as after sum().
            twice = torch._C._functions.DelayedError(
                b"trying to differentiate twice a call of a pipeline, whose stages keep no graph of their backward",
                len(of_inputs),
            )
            aliases: list[Any] = [one if one is None else one.detach().requires_grad_() for one in of_inputs]
            of_inputs = twice(*aliases)
        return (None, None, None, None, *of_inputs, *[None] * len(gradients))


def _gradients_of_inputs(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    call: _Call = ctx.call
    if not call.forget.alive:
        raise PipelineError(
            "the backward of this output has run already, and the stages have freed its graph: call the pipeline "
            "again for a second backward"
        )
    left = iter(gradients)
    parts = [[next(left) for _ in places] for places in call.wanting]
    try:
        found = call.batches.backward(call.crew, call.number, parts, ctx.count > 0)
    except BaseException:
        call.forget()
        raise
    call.forget.detach()
    of_inputs: list[Any] = [None] * ctx.count
    # Last stage first, as autograd sums in one process.
    for stage, by_number in sorted(found.items(), reverse=True):
        for number, some in by_number.items():
            for place, gradient in zip(ctx.used[stage], some, strict=True):
                place += number * (ctx.count // len(parts))
                if gradient is not None:
                    earlier = of_inputs[place]
                    of_inputs[place] = gradient if earlier is None else earlier + gradient
    return of_inputs
