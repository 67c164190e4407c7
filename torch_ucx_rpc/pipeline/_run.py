"""One call on one worker: its row of the schedule, action by action (`Run`)."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torch_ucx_rpc.pipeline._exchange import AbortedError, Exchange, LostPeerError, Slot
from torch_ucx_rpc.pipeline._partition import DRIVER, INPUT
from torch_ucx_rpc.pipeline._schedule import Action, Row
from torch_ucx_rpc.pipeline._stage import Loss, Request, Stage
from torch_ucx_rpc.pipeline._values import Packet, to_device

__all__ = ["Failure", "Run", "failure_of"]

_CPU = torch.device("cpu")

_DOING = {
    "F": "the forward",
    "B": "the backward",
    "I": "the backward to the inputs",
    "W": "the backward to the weights",
}


class ActionError(Exception):
    """The code of a stage raised an exception. The argument is the action, and the cause is the stage's exception."""


class Failure(NamedTuple):
    """A message that a host could not carry out, for the driver."""

    error: str
    """Type and text of the exception."""
    traceback: str = ""
    """The frames of the stage's own code."""
    action: Action | None = None
    doing: str = ""
    """The action, such as "the forward"."""
    is_lost: bool = False
    """Whether another worker could not be reached. ``error`` then names that worker."""
    epoch: int = 0
    number: int = 0
    """Number of the message."""


def failure_of(error: BaseException) -> Failure:
    """Describe an exception that an order has raised."""
    if isinstance(error, LostPeerError):
        return Failure(str(error), is_lost=True)
    action = None
    if isinstance(error, ActionError) and error.__cause__ is not None:
        action, error = error.args[0], error.__cause__
    # Keep the frames from the stage's own code on: the frames above belong to this package.
    frames = traceback.extract_tb(error.__traceback__)
    ours = [place for place, frame in enumerate(frames) if __package__.replace(".", "/") in frame.filename]
    kept = frames[ours[-1] + 1 :] if ours and ours[-1] + 1 < len(frames) else frames
    text = "Traceback of the stage (most recent call last):\n" + "".join(traceback.format_list(kept))
    text += "".join(traceback.format_exception_only(error))
    return Failure(f"{type(error).__name__}: {error}", text, action, "" if action is None else _DOING[action.kind])


class Run:
    """A call on the stages of one worker."""

    def __init__(self, stages: Mapping[int, Stage], exchange: Exchange, request: Request) -> None:
        self._stages = stages
        self._exchange = exchange
        self._request = request
        # By micro-batch, in the order of the schedule.
        self._losses: dict[int, Loss] = {}
        self._outputs: dict[int, Packet] = {}
        # Results for the driver: "loss", "losses", "factor", "outputs", "input_gradients", "events", as far as they
        # exist.
        self._result: dict[str, Any] = {}
        self._events: list[tuple[Action, float, float]] = []

    def carry_out(self, row: Row) -> dict[str, Any]:
        """Run all actions in turn. Raises ActionError, AbortedError and LostPeerError, and ValueError for losses whose
        counts do not fit together."""
        actions = [action for action in map(self._whole, row) if action is not None]
        self._exchange.expect(slot for action in actions for slot in self._needs(action))
        for action, following in zip(actions, (*actions[1:], None), strict=True):
            try:
                if action.kind == "F":
                    self._forward(self._stages[action.stage], action, following)
                else:
                    self._backward(self._stages[action.stage], action)
            except (AbortedError, LostPeerError):
                raise
            except BaseException as error:
                raise ActionError(action) from error
        if self._losses:
            self._close_losses()
        if self._outputs:
            self._result["outputs"] = [packet for _, packet in sorted(self._outputs.items())]
        if self._request.record:
            self._result["events"] = self._events
        return self._result

    def _close_losses(self) -> None:
        """Put the losses of the micro-batches together. "factor" is the factor that the gradients still lack, if losses
        have counts."""
        values = [loss.value for loss in self._losses.values()]
        total = sum(values[1:], values[0])
        counts = [loss.counted for loss in self._losses.values() if loss.counted is not None]
        is_known = self._request.is_apart or not self._request.grad
        if counts and not (len(counts) == len(values) and is_known):
            raise ValueError("the loss must return (sum, count) always or never")
        if counts and not sum(counts):
            raise ValueError("the counts that the loss returned with its sums are 0 for all micro-batches")
        self._stages[self._exchange.last_stage].check_differentiable(list(self._losses.values()))
        if counts:
            self._result["factor"] = len(counts) / sum(counts)
        self._result["loss"] = (total / (sum(counts) or len(values))).cpu()
        self._result["losses"] = [loss.given for _, loss in sorted(self._losses.items())]

    def _whole(self, action: Action) -> Action | None:
        """Let a stage that does not divide its backward do all of it in the first half."""
        if action.kind in "IW" and not self._stages[action.stage].has_halves:
            return Action(action.stage, "B", action.micro_batch) if action.kind == "I" else None
        return action

    def _needs(self, action: Action) -> Iterator[Slot]:
        """Return the slots of the values that an action takes from other stages."""
        stage, number = self._stages[action.stage], action.micro_batch
        if action.kind == "F":
            for edge in stage.spec.edges_in:
                if edge.source != INPUT:
                    yield "F", stage.index, number, edge.source, 0
            return
        if action.kind != "W":
            for target in stage.targets:
                yield "B", stage.index, number, target, 0
        if action.kind != "I":
            for tie, _ in stage.ties:
                if tie.owner == stage.index:
                    for user in tie.users:
                        yield "T", stage.index, number, user, tie.number

    def _forward(self, stage: Stage, action: Action, following: Action | None) -> None:
        request, number = self._request, action.micro_batch
        # In 1F1B the last stage always goes back next. Computing its activations again would cost a forward, and save
        # no memory.
        goes_back_next = following is not None and (following.stage, following.micro_batch) == (stage.index, number)
        packets: dict[int, Packet] = {slot[3]: self._exchange.take(slot) for slot in self._needs(action)}
        if stage.index in request.inputs:
            packets[INPUT] = request.inputs[stage.index][number]
            # Free it after use: the backward needs only the parts that autograd has saved.
            request.inputs[stage.index][number] = None  # type: ignore[call-overload]
        is_last = stage.index == self._exchange.last_stage
        begin = time.time()
        sent, loss = stage.forward(request, number, packets, is_last=is_last, goes_back_next=goes_back_next)
        self._events.append((action, begin, time.time()))
        for target, packet in sent.items():
            if target != DRIVER:
                self._exchange.send(("F", target, number, stage.index, 0), packet)
            else:
                self._outputs[number] = to_device(packet, _CPU)
        if loss is not None:
            self._losses[number] = loss

    def _backward(self, stage: Stage, action: Action) -> None:
        request, number = self._request, action.micro_batch
        gradients: dict[int, Any] = {}
        tied: dict[int, list[torch.Tensor | None]] = {}
        for slot in self._needs(action):
            if slot[0] == "B":
                gradients[slot[3]] = self._exchange.take(slot)
            else:
                tied.setdefault(slot[4], []).append(self._exchange.take(slot))
        if action.kind != "W" and request.output_gradients is not None and stage.index == self._exchange.last_stage:
            gradients[DRIVER] = request.output_gradients[number]
        begin = time.time()
        found, owed = stage.backward((request.call, number), action.kind, gradients, tied)
        self._events.append((action, begin, time.time()))
        for source, some in found.items():
            if source != INPUT:
                self._exchange.send(("B", source, number, stage.index, 0), some)
            elif request.input_gradients:
                by_stage = self._result.setdefault("input_gradients", {})
                by_stage.setdefault(stage.index, {})[number] = to_device(some, _CPU)
        for tie, _ in stage.ties:
            if tie.number in owed:
                self._exchange.send(("T", tie.owner, number, stage.index, tie.number), owed[tie.number])
