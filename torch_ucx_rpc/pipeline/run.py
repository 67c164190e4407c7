"""One call on one worker: its row of the schedule, action by action (`Run`).

It runs as a generator. It yields what it waits for, and None before it computes, so that its host can take in what has
come, have another thread go on, and end it by raising AbortedError in it.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Generator, Mapping
from typing import Any

import torch

from torch_ucx_rpc.pipeline.exchange import Exchange, LostPeerError, Waiting
from torch_ucx_rpc.pipeline.messages import Failure, Request
from torch_ucx_rpc.pipeline.schedule import Action, Row
from torch_ucx_rpc.pipeline.stage import Stage
from torch_ucx_rpc.pipeline.values import Packet, to_device
from torch_ucx_rpc.pipeline.wiring import DRIVER, INPUT

__all__ = ["AbortedError", "ActionError", "Run", "failure_of"]

_CPU = torch.device("cpu")

_DOING = {
    "F": "the forward",
    "B": "the backward",
    "I": "the backward to the inputs",
    "W": "the backward to the weights",
}


class AbortedError(Exception):
    """The driver has called the present call off."""


class ActionError(Exception):
    """The code of a stage raised in an action; the cause says what."""

    def __init__(self, action: Action) -> None:
        super().__init__(str(action))
        self.action = action


def failure_of(error: BaseException) -> Failure:
    """What the driver is told of an exception in an order."""
    action = None
    if isinstance(error, ActionError) and error.__cause__ is not None:
        action, error = error.action, error.__cause__
    # From the stage's own code on: the frames above are ours.
    frames = traceback.extract_tb(error.__traceback__)
    ours = [place for place, frame in enumerate(frames) if __package__.replace(".", "/") in frame.filename]
    kept = frames[ours[-1] + 1 :] if ours and ours[-1] + 1 < len(frames) else frames
    text = "Traceback of the stage (most recent call last):\n" + "".join(traceback.format_list(kept))
    text += "".join(traceback.format_exception_only(error))
    what = f"{type(error).__name__}: {error}"
    if action is None:
        return Failure(what, text)
    return Failure(what, text, action.stage, action.micro_batch, _DOING[action.kind])


class Run:
    """A call on the stages of one worker."""

    def __init__(self, stages: Mapping[int, Stage], exchange: Exchange, request: Request) -> None:
        self._stages = stages
        self._exchange = exchange
        self._request = request
        self._losses: list[torch.Tensor] = []
        # What the driver gets: "loss", "outputs", "input_gradients", "events"; those that there are.
        self._result: dict[str, Any] = {}
        self._events: list[tuple[str, float, float]] | None = [] if request.record else None

    def carry_out(self, row: Row) -> Generator[Waiting, None, dict[str, Any]]:
        """All actions in turn. Raises ActionError; AbortedError and LostPeerError as they come."""
        for action, following in zip(row, (*row[1:], None), strict=True):
            try:
                if action.kind == "F":
                    yield from self._forward(self._stages[action.stage], action, following)
                else:
                    yield from self._backward(self._stages[action.stage], action)
            except (AbortedError, LostPeerError, GeneratorExit):
                raise
            except BaseException as error:
                raise ActionError(action) from error
        if self._losses:
            self._result["loss"] = (sum(self._losses[1:], self._losses[0]) / len(self._losses)).cpu()
        if self._events is not None:
            self._result["events"] = self._events
        return self._result

    def _forward(self, stage: Stage, action: Action, following: Action | None) -> Generator[Waiting, None, None]:
        request, number = self._request, action.micro_batch
        # As in the last stage of 1F1B. To compute the activations again would cost a forward, and spare no memory.
        goes_back_next = following is not None and (following.stage, following.micro_batch) == (stage.index, number)
        packets: dict[int, Packet] = {}
        for edge in stage.spec.edges_in:
            if edge.source == INPUT:
                packets[INPUT] = request.inputs[stage.index][number]
            else:
                packets[edge.source] = yield from self._exchange.wait(("F", stage.index, number, edge.source))
        if INPUT in packets:
            # Once used it may go: on the way back only what autograd has saved of it is needed.
            request.inputs[stage.index][number] = None  # type: ignore[call-overload]
        yield None
        is_last = stage.index == self._exchange.last_stage
        begin = time.time()
        sent = stage.forward(
            (request.call, number),
            packets,
            grad=request.grad,
            autocast=request.autocast,
            target=request.targets[number] if is_last and request.targets is not None else None,
            micro_batches=request.micro_batches,
            scale=request.scale,
            to_driver=request.to_driver and is_last,
            goes_back_next=goes_back_next,
        )
        self._record(stage.index, "F", number, begin)
        for target, packet in sent.items():
            if target != DRIVER:
                slot = ("F", target, number, stage.index)
                self._exchange.send(target, slot, packet, for_gradients=request.is_step)
            elif request.to_driver:
                self._result.setdefault("outputs", []).append(to_device(packet, _CPU))
            else:
                self._losses.append(packet[0])

    def _backward(self, stage: Stage, action: Action) -> Generator[Waiting, None, None]:
        request = self._request
        number, kind = action.micro_batch, action.kind
        if not stage.has_halves and kind in "IW":
            if kind == "W":
                return
            kind = "B"
        gradients: dict[int, Any] = {}
        if kind != "W":
            for target in stage.targets:
                gradients[target] = yield from self._exchange.wait(("B", stage.index, number, target))
            if request.output_gradients is not None and stage.index == self._exchange.last_stage:
                gradients[DRIVER] = request.output_gradients[number]
        tied: dict[int, list[torch.Tensor | None]] = {}
        for tie, _ in stage.ties if kind != "I" else ():
            if tie.owner == stage.index:
                tied[tie.number] = []
                for user in tie.users:
                    tied[tie.number].append((yield from self._exchange.wait(("T", tie.number, number, user))))
        yield None
        begin = time.time()
        found, owed = stage.backward((request.call, number), kind, gradients, tied)
        self._record(stage.index, kind, number, begin)
        for source, some in found.items():
            if source != INPUT:
                self._exchange.send(source, ("B", source, number, stage.index), some)
            elif request.input_gradients:
                by_stage = self._result.setdefault("input_gradients", {})
                by_stage.setdefault(stage.index, {})[number] = to_device(some, _CPU)
        for tie, _ in stage.ties:
            if tie.number in owed:
                self._exchange.send(tie.owner, ("T", tie.number, number, stage.index), owed[tie.number])

    def _record(self, stage: int, kind: str, number: int, begin: float) -> None:
        """An action that began then has ended now."""
        if self._events is not None:
            self._events.append((str(Action(stage, kind, number)), begin, time.time()))
