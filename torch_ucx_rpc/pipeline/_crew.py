"""The workers of one pipeline, as the driver sees them: epochs, orders to all workers, and their outcomes (`Crew`).

**Epochs.** The driver alone decides. An epoch is a number and the hosts of the rows, its crew. These invariants hold:

1. In an epoch the driver's messages are numbered from 0. Every host carries them out in turn.
2. An epoch ends *at* a message, by the driver's ``cut``: a message has failed, or a worker is given up. Every host
   carries out all messages before that one and none from it on. A host that has already carried out its call undoes it.
   The driver's questions repeat the cut, so no host misses it. A host may learn from another that the epoch is over. It
   then stops its call, and waits for the cut.
3. The next epoch begins when each host has said so, or has been given up. Only then does the driver send orders again.
4. The number fences. Orders, values between stages and outcomes travel in boxes of the receiver, in its epoch: those of
   another epoch are dropped. The driver no longer uses the box of a worker that it has given up. If that worker comes
   back, it learns that its host is closed.
5. A worker is given up if its end is certain, if it has not answered a question for ``rpc_timeout``, or if its stage is
   busy when ``step_timeout`` is over. No other timeout means anything.
6. After a loss the epoch ends at message 0. The hosts load the last checkpoint, so that no earlier gradient or
   optimizer step counts, and `recovery` repeats the journal since.

Gradients and steps of optimizers are applied as they are carried out. A call that fails is undone everywhere: gradients
that it created are removed, and optimizers refuse the others until ``zero_grad``. If an optimizer fails on one worker,
the others have taken their step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import get_rpc_timeout

from torch_ucx_rpc._workers.life import life
from torch_ucx_rpc._workers.lost import Gone, subscribe, timed_out, was_lost
from torch_ucx_rpc.errors import EpochEnded
from torch_ucx_rpc.pipeline import _host
from torch_ucx_rpc.pipeline._errors import PipelineError, StageError, StageLostError
from torch_ucx_rpc.pipeline._exchange import (
    Box,
    close_to_send,
    decode,
    encode,
    open_to_send,
    put,
)
from torch_ucx_rpc.pipeline._messages import Failure, Request

__all__ = ["Crew", "Message", "Place"]

Outcome = tuple[Any, ...]

# Seconds to wait for one outcome before the driver asks the workers that have not answered.
_SLICE_S = 0.5
# The same where the agent does not report the end of a worker: only the questions notice it.
_SLICE_UNTOLD_S = 0.1
# Seconds between two questions to a worker that has not answered.
_ASKING_S = 1.0

_numbers = itertools.count()


class Place:
    """Where a row of the schedule runs."""

    def __init__(self, worker: str, device: str, name: str) -> None:
        self.worker = worker
        self.device = device
        self.host = name
        """Name of the `_host.Host` there, and of its box. Two places may be in one process."""
        self.info = rpc.get_worker_info(worker)
        self.is_here = worker == rpc.get_worker_info().name
        open_to_send(name)
        self.lost = False
        self.is_new = False
        """It has been made in the place of another, and does not know all yet."""

    def __str__(self) -> str:
        return self.worker if self.device == "cpu" else f"{self.worker}/{self.device}"


class Message(NamedTuple):
    """One or more orders that all workers have been given."""

    number: int
    name: str
    quiet: dict[str, Any]
    adds_gradients: bool
    is_answered: bool
    """If not, hosts only report failures: an outcome of a later message shows that this one succeeded."""


class _Epoch:
    """State of the present epoch. Any thread may use it: RPC's threads report failures.

    Attributes:
        messages: numbers of the messages that have been sent and not settled.
        outcomes: outcomes by number of the message, and row.
        gone: the reason why a row's worker is given up.
        reason: the reason, if no worker is to blame.
        cut: the end of the epoch as the hosts learn it.
    """

    def __init__(self, number: int, places: Sequence[Place]) -> None:
        self.number = number
        self.places = places
        self.messages: list[Message] = []
        self.outcomes: dict[tuple[int, int], Outcome] = {}
        self.gone: dict[int, str] = {}
        self.reason: str | None = None
        self.cut: _host.Cut | None = None
        self._lock = threading.RLock()

    @property
    def at(self) -> int | None:
        """The message at which the epoch ends, if it does."""
        return None if self.cut is None else self.cut.at

    def note(self, number: int, row: int, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes.setdefault((number, row), outcome)
            if outcome[0] in {"error", "lost"}:
                self.end(number)

    def give_up(self, row: int, reason: str) -> None:
        with self._lock:
            self.gone.setdefault(row, reason)
            if self.messages:
                self.end(0)

    def end(self, at: int) -> None:
        """Tell the hosts that this epoch ends at a message, unless they know of an earlier one."""
        with self._lock:
            if self.at is not None and self.at <= at:
                return
            spoils = any(message.adds_gradients for message in self.messages if message.number >= at)
            cut = self.cut = _host.Cut(self.number + 1, at, spoils)
            for row, place in enumerate(self.places):
                if place.is_here:
                    _host.cut(place.host, cut)
                elif row not in self.gone:
                    # If it is lost on the way, the next question repeats it.
                    with contextlib.suppress(RuntimeError):  # its end is known already
                        rpc.rpc_async(place.info, _host.cut, (place.host, cut), timeout=0)


class _Question:
    """The last answer of a worker that has not sent its outcome, and how long it has been silent."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._next = 0.0
        self._call: Any = None
        self._silence_s = 0.0
        self._answer = ""

    def look(self, passed_s: float, cut: _host.Cut | None) -> str | None:
        """Say why the worker is to be given up, if so. A question repeats the ``cut``."""
        if self._call is None:
            if time.monotonic() >= self._next:
                self._next = time.monotonic() + _ASKING_S
                self._silence_s = 0.0
                try:
                    self._call = rpc.rpc_async(self._place.info, _host.progress, (self._place.host, cut), timeout=0)
                except RuntimeError as error:
                    return str(error)
        elif self._call.done():
            try:
                self._answer = self._call.value()
            except RuntimeError as error:
                return str(error)
            self._call = None
            if self._answer == "closed":
                return "its stages have been closed"
        else:
            # This counts questions, not time: this process may have been stopped itself.
            self._silence_s += passed_s
            limit = get_rpc_timeout()
            if self._silence_s > limit > 0:
                return f"it has not answered for {limit:g} s"
        return None

    @property
    def is_busy(self) -> bool:
        return self._answer == "busy" or self._silence_s > _ASKING_S


class Crew:
    """The workers of one pipeline. It belongs to the driver's thread, except `tell`, `lose` and `forget`.

    ``places`` has worker and device of each row of the schedule, and ``worker_of`` the row of each stage.
    """

    def __init__(
        self, places: Sequence[tuple[str, str]], worker_of: Sequence[int], step_timeout: float | None = None
    ) -> None:
        own = rpc.get_worker_info()
        self.name = f"pipeline {own.name}-{os.getpid()}-{next(_numbers)}"
        self.session = life().number
        self.box = Box(self.name, 0)
        self.places = [self.place(worker, device) for worker, device in places]
        self._epoch = _Epoch(0, self.places)
        _crews[self.name] = self
        reference = weakref.ref(self)
        self._unsubscribe = subscribe(lambda gone: _lose(reference, gone))
        self.worker_of = worker_of
        self.stages_of = [[stage for stage, of in enumerate(worker_of) if of == row] for row in range(len(places))]
        self.step_timeout = math.inf if step_timeout is None else step_timeout
        # Number of the next message.
        self._number = 0
        # Orders that travel with the next message, by name.
        self._quiet: dict[str, Any] = {}
        self._forgotten: list[int] = []
        self._slice_s = _SLICE_S if life().tells_ends else _SLICE_UNTOLD_S
        self._is_closed = False

    @property
    def epoch(self) -> int:
        return self._epoch.number

    def place(self, worker: str, device: str) -> Place:
        return Place(worker, device, f"{self.name}.{next(_numbers)}")

    def routes(self) -> list[tuple[str, str]]:
        """Worker and host of each stage."""
        return [(self.places[row].worker, self.places[row].host) for row in self.worker_of]

    # ----------------------------------------------------------------------------------------------------- orders

    def later(self, name: str, payload: Any) -> None:
        """Have all carry out an order before the next one. It replaces an order of the same name; lists add up."""
        self._quiet[name] = [*self._quiet.get(name, ()), *payload] if isinstance(payload, list) else payload

    def send(
        self, name: str, payloads: Sequence[Any], *, adds_gradients: bool = False, is_answered: bool = True
    ) -> Message:
        """Give an order to all; `settle` waits for it. Raises what pickle raises, before anything has been sent."""
        self.check()
        if self._forgotten:
            forgotten, self._forgotten = self._forgotten, []
            self.later("forget", forgotten)
        first = payloads[0]
        quiet = list(self._quiet.items())
        if all(payload is first for payload in payloads):
            encoded = [encode((is_answered, [*quiet, (name, first)]))] * len(payloads)
        else:
            encoded = [encode((is_answered, [*quiet, (name, payload)])) for payload in payloads]
        message = Message(self._number, name, self._quiet, adds_gradients, is_answered)
        self._number, self._quiet = self._number + 1, {}
        self._epoch.messages.append(message)
        try:
            for row, orders in enumerate(encoded):
                self._put(row, message, orders)
        except BaseException:
            # Some workers have it, and the others do not.
            self._epoch.end(message.number)
            self._collect()
            self._begin_epoch()
            raise
        return message

    def _put(self, row: int, message: Message, orders: Any) -> None:
        """Put a message into the box of a worker, or give the worker up."""
        place, watch = self.places[row], _Watch(self.places, math.inf)
        while row not in self._epoch.gone:
            try:
                put(place.host, self.epoch, place.worker, str(message.number), orders, _SLICE_S)
                return
            except EpochEnded:
                return  # a message before it has failed
            except RuntimeError as error:
                if was_lost(error):
                    self._epoch.give_up(row, str(error))
                elif timed_out(error):
                    watch.look([row], self._epoch, self._epoch.cut)
                else:
                    raise

    def send_later(self, name: str, payload: Any) -> None:
        """Give an order without waiting for it: the next `settle` raises its failure."""
        self.send(name, [payload] * len(self.places), is_answered=False)

    def do(self, name: str, payload: Any) -> list[Any]:
        """Give an order to all and wait until they have carried it out."""
        return self.settle(self.send(name, [payload] * len(self.places)))

    def run(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Have each worker carry out its part of a call. Returns their answers."""
        return self.settle(self.send("run", requests, adds_gradients=requests[0].adds_gradients))

    def forget(self, call: int) -> None:
        """Let the workers free what they keep of a call. The garbage collector may call this, in any thread."""
        self._forgotten.append(call)

    def settle(self, sent: Message) -> list[Any]:
        """Return each worker's result of a message, after the messages before it. Raises StageError, StageLostError,
        PipelineError."""
        epoch, rows = self._epoch, range(len(self.places))
        self._collect()
        if epoch.at is None:
            results = [epoch.outcomes[sent.number, row][1] for row in rows]
            epoch.messages, epoch.outcomes = [], {}
            return results
        self._begin_epoch()
        raise self._error_of(epoch)

    def _collect(self) -> None:
        """Return when all messages have outcomes, up to where the epoch ends."""
        epoch, watch = self._epoch, _Watch(self.places, self.step_timeout)
        if epoch.gone:
            epoch.end(0)
        while still := [
            (message.number, row)
            for message in epoch.messages
            if message.is_answered and (epoch.at is None or message.number < epoch.at)
            for row in range(len(self.places))
            if row not in epoch.gone and (message.number, row) not in epoch.outcomes
        ]:
            number, row = still[0]
            outcome = self._take(row, str(number))
            if outcome is not None:
                epoch.note(number, row, outcome)
            else:
                watch.look({row for _, row in still}, epoch, epoch.cut)
        if epoch.gone:
            epoch.end(0)

    def _take(self, row: int, tag: str) -> Outcome | None:
        """Return what a host sends, if it does so in time."""
        place = self.places[row]
        try:
            outcome: Outcome = decode(self.box.take(self.epoch, place.worker, f"{place.host} {tag}", self._slice_s))
        except RuntimeError as error:
            if timed_out(error):
                return None
            if not was_lost(error):
                raise
            self._epoch.give_up(row, str(error))
            return None
        return outcome

    # --------------------------------------------------------------------------------------------------- epochs

    def tell(self, epoch: int, number: int, host: str, outcome: Outcome) -> None:
        """A host has failed. Any thread may call this."""
        now = self._epoch
        for row, place in enumerate(now.places):
            if place.host == host and epoch == now.number:
                now.note(number, row, outcome)

    def lose(self, worker: str, reason: str) -> None:
        """A worker has ended. Any thread may call this."""
        for row, place in enumerate(self._epoch.places):
            if place.worker == worker:
                self._epoch.give_up(row, reason)

    def _begin_epoch(self) -> None:
        """Return when all hosts that live have begun the next epoch."""
        ended = self._epoch
        epoch = _Epoch(ended.number + 1, self.places)
        epoch.gone.update(ended.gone)
        self._epoch, self._number = epoch, 0
        self.box.advance(epoch.number)
        # Orders that were to travel with another may not have been carried out everywhere. Repeating them does no harm.
        for message in reversed(ended.messages):
            if message.number >= (ended.at or 0):
                self._quiet = {**message.quiet, **self._quiet}
        watch = _Watch(self.places, self.step_timeout)
        begun: set[int] = set()
        while still := [row for row in range(len(self.places)) if row not in epoch.gone and row not in begun]:
            if self._take(still[0], "begins") is not None:
                begun.add(still[0])
            else:
                watch.look(still, epoch, ended.cut)
        ended.gone.update(epoch.gone)
        epoch.gone.clear()
        for row in ended.gone:
            self.places[row].lost = True

    def renew(self) -> None:
        """Begin another epoch, for a crew that changes though none is lost."""
        if any(place.lost for place in self.places):
            return  # the epoch has ended with them
        with contextlib.suppress(PipelineError):
            self.do("synchronize", {})
        if not any(place.lost for place in self.places):
            self._epoch.end(self._number)
            self._begin_epoch()

    # --------------------------------------------------------------------------------------------------- failures

    def _error_of(self, ended: _Epoch) -> PipelineError:
        if ended.gone:
            reasons = {self.places[row].worker: reason for row, reason in ended.gone.items()}
            return self._lost_error(sorted(ended.gone), reasons)
        if ended.reason is not None:
            return PipelineError(ended.reason)
        failed = sorted((key, outcome) for key, outcome in ended.outcomes.items() if outcome[0] in {"error", "lost"})
        names = {message.number: message.name for message in ended.messages}
        for (number, row), outcome in failed:
            if outcome[0] == "error":
                return self._stage_error(self.places[row], names[number], outcome[1])
        return PipelineError(
            f"a stage could not send to worker {failed[0][1][1]}, which the driver reaches: look at the network "
            f"between the two workers. The step has been undone; it can be tried again."
        )

    def _stage_error(self, place: Place, name: str, failure: Failure) -> StageError:
        if failure.stage is None:
            what = f"worker {place.worker!r} failed in {name.replace('_', ' ')}"
        else:
            what = (
                f"stage {failure.stage} on worker {place.worker!r} failed in {failure.doing} of micro-batch "
                f"{failure.micro_batch}"
            )
        return StageError(
            f"{what}: {failure.error}",
            stage=failure.stage,
            worker=place.worker,
            micro_batch=failure.micro_batch,
            traceback_text=failure.traceback,
        )

    def _lost_error(self, rows: Sequence[int], reasons: dict[str, str]) -> StageLostError:
        workers = tuple(dict.fromkeys(self.places[row].worker for row in rows))
        stages = tuple(sorted(stage for row in rows for stage in self.stages_of[row]))
        which = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        reason = "; ".join(f"{worker}: {text}" for worker, text in reasons.items())
        return StageLostError(
            f"lost {which} with worker{'s' if len(workers) > 1 else ''} {', '.join(map(repr, workers))}. Replace it "
            f"with pipe.replace({workers[0]!r}, '<another worker>') and pipe.load(<the last checkpoint>), or give "
            f"DistributedPipeline(..., spares=[...]), which does both. ({reason})",
            workers=workers,
            stages=stages,
        )

    def check(self) -> None:
        if self._is_closed:
            raise PipelineError("the pipeline has been closed: make a new one")
        lost = [row for row, place in enumerate(self.places) if place.lost]
        if lost:
            raise self._lost_error(lost, {self.places[row].worker: "it was lost before" for row in lost})

    # ------------------------------------------------------------------------------------------------------ the end

    def close(self) -> None:
        self._is_closed = True
        self._unsubscribe()
        for place in self.places:
            self.close_place(place)
        with contextlib.suppress(RuntimeError):  # RPC has been shut down
            self.box.close()

    def close_place(self, place: Place) -> None:
        """Close the stages of a place, which may be lost."""
        if place.is_here:
            _host.close(place.host)
        with contextlib.suppress(RuntimeError):  # RPC has been shut down, or the worker has ended
            close_to_send(place.host)
            if not place.is_here:
                rpc.rpc_async(place.info, _host.close, (place.host,), timeout=0)


class _Watch:
    """Questions to the workers that have not answered yet."""

    def __init__(self, places: Sequence[Place], limit_s: float) -> None:
        self._places = places
        self._limit_s = limit_s
        self._begin = self._looked = time.monotonic()
        self._questions: dict[int, _Question] = {}

    def look(self, rows: Iterable[int], epoch: _Epoch, cut: _host.Cut | None) -> None:
        """Give up workers that are silent, or busy for too long, in ``epoch``. The others get the ``cut``."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * _SLICE_S), now
        busy = []
        for row in rows:
            if row not in self._questions:
                self._questions[row] = _Question(self._places[row])
            question = self._questions[row]
            if (reason := question.look(passed, cut)) is not None:
                epoch.give_up(row, reason)
            elif question.is_busy:
                busy.append(row)
        # Each has been asked at least once.
        if now - self._begin > max(self._limit_s, 2 * _SLICE_S) and epoch.at is None:
            for row in busy:
                epoch.give_up(row, f"its stage is busy after step_timeout={self._limit_s:g} s")
            if not busy and epoch.messages:
                epoch.reason = f"the step does not end within step_timeout={self._limit_s:g} s, but no stage is busy"
                epoch.end(0)


# The crews of this process, by name.
_crews: weakref.WeakValueDictionary[str, Crew] = weakref.WeakValueDictionary()


def tell(crew: str, epoch: int, number: int, host: str, outcome: Outcome) -> None:
    """Note that a message has failed on a host. Hosts call this."""
    if (found := _crews.get(crew)) is not None:
        found.tell(epoch, number, host, outcome)


def _lose(reference: weakref.ref[Crew], gone: Gone) -> None:
    if (crew := reference()) is not None:
        crew.lose(gone.name, gone.reason)
