"""Batches through the stages: `Batches` divides each, runs it by one order, and puts its results together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_ucx_rpc.pipeline._errors import PipelineError
from torch_ucx_rpc.pipeline._partition import INPUT, StageSpec
from torch_ucx_rpc.pipeline._recovery import Recovery
from torch_ucx_rpc.pipeline._stage import Autocast, Request
from torch_ucx_rpc.pipeline._values import Packet, batch_size, merge, pack, split

__all__ = ["Batches", "Done"]


class Done(NamedTuple):
    """The results of a step or an evaluation."""

    loss: torch.Tensor
    losses: list[Any]
    """The loss function's result for each micro-batch, without gradient."""
    output: Any
    """The model's output, if it was wanted."""
    events: list[Any]
    """For each row its actions with their times, if they were recorded."""


class Batches:
    """Runs batches on a model, and runs a batch again if a spare replaces a lost worker.

    It belongs to the driver's thread.
    """

    def __init__(self, recovery: Recovery, chunks: int) -> None:
        self.model = recovery.model
        self.chunks = chunks
        self._crew = recovery.model.crew
        self._recovery = recovery
        self._numbers = itertools.count()
        # Whether the loss returns (sum, count), once that is known.
        self._has_counts: bool | None = None

    def step(
        self,
        args: Any,
        kwargs: Any,
        target: Any,
        *,
        grad: bool = True,
        scale: float | None = None,
        shows_output: bool = False,
        record: bool = False,
    ) -> Done:
        """Run forward and backward of a batch; without ``grad`` only forward. ``target`` and ``scale`` may be None."""
        count, inputs, targets = self._divided(args, kwargs, () if target is None else (target,))
        if grad:
            # This raises ScheduleError for a text with more micro-batches.
            self.model.schedules.rows("step", count)
        # The loss of the first step shows whether losses have counts.
        is_apart = grad and self._has_counts is not False
        request = Request(
            "step" if grad else "forward",
            next(self._numbers),
            count,
            targets=targets,
            grad=grad,
            scale=scale,
            shows_output=shows_output,
            record=record,
            is_apart=is_apart,
        )
        results = self._run(self._requests(request, inputs), changes=grad or self.model.training)
        last = results[self._crew.worker_of[-1]]
        self._has_counts = self._has_counts or "factor" in last
        output = merge([value for value, _ in last["outputs"]]) if shows_output else None
        return Done(last["loss"], last["losses"], output, [result.get("events") for result in results])

    def forward(self, args: Any, kwargs: Any, *, grad: bool) -> tuple[int, list[Any], list[Packet]]:
        """Run a forward. Returns its number, and the arguments and outputs of each micro-batch. With ``grad`` the
        workers keep its graph for a backward."""
        count, inputs, _ = self._divided(args, kwargs, ())
        request = Request("forward", next(self._numbers), count, grad=grad, to_driver=True)
        requests = self._requests(request, inputs)
        changes = self.model.training
        results = self._run(requests, changes=changes and not grad)
        if changes and grad:
            # A repetition is for random numbers and statistics only, so it needs no backward.
            self._recovery.record(self._crew.each, "run", [(one._replace(grad=False),) for one in requests])
        return request.call, inputs, results[self._crew.worker_of[-1]]["outputs"]

    def backward(self, crew: int, number: int, gradients: list[Any], input_gradients: bool) -> dict[int, Any]:
        """Run the backward of a call, with the gradients of its outputs by micro-batch. Returns the gradients of its
        inputs, by stage.

        If a worker is lost during the backward, no spare can repeat it: the lost worker had a part of the graph.
        """
        if crew != self.model.crews:
            raise PipelineError(
                "a worker was lost, or replaced, since this output was computed, and its part of the graph is gone: "
                "call the pipeline again"
            )
        request = Request(
            "backward", number, len(gradients), output_gradients=gradients, input_gradients=input_gradients
        )
        found: dict[int, Any] = {}
        for result in self._crew.each("run", [(one,) for one in self._requests(request, None)]):
            found.update(result.get("input_gradients", {}))
        # The journal does not have these gradients; the caller is responsible for them.
        self._recovery.record_unrepeatable()
        return found

    def _divided(self, args: Any, kwargs: Any, target: tuple[Any, ...]) -> tuple[int, list[Any], list[Any]]:
        """Return the number of micro-batches, their arguments, and the targets."""
        args, kwargs = self.model.partition.arguments(args, kwargs)
        size = batch_size((args, kwargs, target))
        if size == 0:
            raise ValueError("the batch is empty: a step needs at least one sample")
        count = self.chunks if size is None else min(self.chunks, size)
        return count, split((args, kwargs), count), split(target, count)

    def _requests(self, request: Request, batch: list[Any] | None) -> list[Request]:
        """Return the call as each worker needs it. ``batch`` is None for a backward, which uses the batch of its
        forward."""
        inputs: Mapping[int, list[Packet]] = {}
        if batch is not None:
            request = request._replace(autocast=_autocast_here())
            if (changed := self.model.changed_requires_grad()) is not None:
                self._recovery.do(self._crew.later, "requires_grad", changed)
            inputs = _packets(self.model.specs, batch, grad=request.to_driver and request.grad)
        requests = []
        for row, stages in enumerate(self._crew.stages_of):
            mine = request._replace(inputs={stage: inputs[stage] for stage in stages if stage in inputs})
            if row != self._crew.worker_of[-1]:
                # Only the last stage has a loss and an output.
                mine = mine._replace(targets=None if mine.targets is None else [], output_gradients=None)
            requests.append(mine)
        return requests

    def _run(self, requests: list[Request], *, changes: bool) -> list[dict[str, Any]]:
        """Have all workers carry out a call. Returns each worker's answer. ``changes`` tells whether a recovery must
        repeat the call, since it changes gradients, or in training mode random numbers and statistics."""
        guard = self._recovery.do if changes else self._recovery.ask
        self._crew.carried_out = None
        try:
            return guard(self._run_and_weigh, requests)
        except BaseException:
            # Ctrl-C may come when the workers are done, and the journal or the factor is still missing.
            self._crew.undo_last()
            raise

    def _run_and_weigh(self, requests: list[Request]) -> list[dict[str, Any]]:
        results = self._crew.each("run", [(one,) for one in requests])
        if requests[0].is_apart:
            self._crew.later("weigh", results[self._crew.worker_of[-1]].get("factor", 1.0))
        return results


def _autocast_here() -> Autocast:
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )


def _packets(specs: Sequence[StageSpec], inputs: list[Any], *, grad: bool) -> dict[int, list[Packet]]:
    """Return the values of the batch that each stage needs. Only ``pipe(x)`` wants gradients of these values, since
    only its caller can use them."""
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
