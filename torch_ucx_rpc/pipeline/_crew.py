"""The workers of one pipeline, as the driver sees them: epochs, orders to all workers, and their outcomes (`Crew`).

**Epochs.** The driver alone decides. An epoch is a number and the hosts of the rows, its crew. These invariants hold:

1. The driver numbers its messages of an epoch from 0. Every host carries them out in turn. The driver waits for the
   results of the last one only.
2. An epoch ends *at* a message, by the driver's ``cut``: a message has failed, the driver has given a worker up, or
   Ctrl-C has interrupted a call.
   Every host carries out the messages before that one, and no others. A host that has already carried out its call
   undoes it. A host with a failure carries out nothing more. The driver's questions repeat the cut, so no host misses
   it. A host may learn from another that the epoch is over. It then stops its call, and waits for the cut.
3. The next epoch begins when each host has reported that it has entered the epoch, or the driver has given the host up.
   Only then does the driver send orders again.
4. The number keeps epochs apart. Orders, values between stages and results travel in boxes of the receiver. A box drops
   everything of earlier epochs, and keeps everything of later epochs until it gets there. The driver no longer uses the
   box of a worker that it has given up. If that worker comes back, it learns that its host is closed.
5. The driver gives a worker up if its end is certain, or if it has not answered a question for ``rpc_timeout``. When
   ``step_timeout`` is over, the driver gives up the workers whose stages are busy. If none is busy, it gives up all
   workers without a result. No other timeout makes it give a worker up.
6. After the loss of a worker the epoch ends at message 0. The hosts load the last checkpoint, so that no earlier
   gradient or optimizer step counts. Then `_recovery` repeats the journal since the checkpoint.

Hosts apply gradients and steps of optimizers as they carry out each order. All hosts undo a call that fails: gradients
are then as they were before the call. If an optimizer fails on one worker, the others have taken their step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import get_rpc_timeout

from torch_ucx_rpc._workers.life import life
from torch_ucx_rpc._workers.lost import Gone, subscribe, timed_out, was_lost
from torch_ucx_rpc.errors import EpochEnded
from torch_ucx_rpc.pipeline import _host
from torch_ucx_rpc.pipeline._errors import PipelineError, StageError, StageLostError
from torch_ucx_rpc.pipeline._exchange import Box, decode, encode, open_to_send, put
from torch_ucx_rpc.pipeline._run import Failure

__all__ = ["Crew", "Place", "tell"]

# Seconds to wait for one result before the driver asks the workers that have not answered.
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
        """Name of the `_host.Host` on that worker, and of its box. Two places may be in one process."""
        self.info = rpc.get_worker_info(worker)
        self.is_here = worker == rpc.get_worker_info().name
        open_to_send(name)
        self.lost = False

    def __str__(self) -> str:
        return self.worker if self.device == "cpu" else f"{self.worker}/{self.device}"


class _Message(NamedTuple):
    """One or more orders that the driver has given to all workers."""

    number: int
    name: str
    quiet: dict[str, tuple[Any, ...]]


class _Epoch:
    """State of the present epoch. Any thread may use it: RPC's threads report failures.

    Attributes:
        messages: the messages whose outcomes the driver does not know.
        failures: failures by number of the message, and row.
        gone: the reason why a row's worker is given up.
        cut: the end of the epoch as the hosts learn it.
        news: the last cut, which questions repeat.
    """

    def __init__(self, number: int, places: Sequence[Place], box: Box, news: _host.Cut | None = None) -> None:
        self.number = number
        self.messages: list[_Message] = []
        self.failures: dict[tuple[int, int], Failure] = {}
        self.gone: dict[int, str] = {}
        self.cut: _host.Cut | None = None
        self.news = news
        self._places = places
        self._box = box
        self._lock = threading.RLock()

    def fail(self, host: str, failure: Failure) -> None:
        """Note that a message has failed on a host, which ends the epoch at that message."""
        with self._lock:
            for row, place in enumerate(self._places):
                if place.host == host and failure.epoch == self.number:
                    self.failures[failure.number, row] = failure
                    self.end(failure.number)

    def give_up(self, row: int, reason: str) -> None:
        with self._lock:
            self.gone.setdefault(row, reason)
            if self.messages:
                self.end(0)

    def end(self, at: int) -> None:
        """Tell the hosts that this epoch ends at a message, unless they know of an earlier one."""
        with self._lock:
            if self.cut is not None and self.cut.at <= at:
                return
            cut = self.cut = self.news = _host.Cut(self.number + 1, at)
            for row, place in enumerate(self._places):
                if place.is_here:
                    _host.cut(place.host, cut)
                elif row not in self.gone:
                    # If the cut is lost on the way, the next question repeats it.
                    with contextlib.suppress(RuntimeError):  # the worker's end is known already
                        rpc.rpc_async(place.info, _host.cut, (place.host, cut), timeout=0)
            # This wakes the driver.
            self._box.advance(cut.epoch)


class Crew:
    """The workers of one pipeline. It belongs to the driver's thread, except `present`, `forget` and `close`. The
    garbage collector may call the last two in any thread.

    ``places`` has worker and device of each row of the schedule, and ``worker_of`` the row of each stage.
    """

    def __init__(
        self, places: Sequence[tuple[str, str]], worker_of: Sequence[int], step_timeout: float | None = None
    ) -> None:
        self.name = f"pipeline {rpc.get_worker_info().name}-{os.getpid()}-{next(_numbers)}"
        self.box = Box(self.name, 0)
        self.places = [self.place(worker, device) for worker, device in places]
        # The present epoch.
        self.present = _Epoch(0, self.places, self.box)
        _crews[self.name] = self
        self._unsubscribe = subscribe(self._lose)
        self.worker_of = worker_of
        self.stages_of = [[stage for stage, of in enumerate(worker_of) if of == row] for row in range(len(places))]
        self._step_timeout = math.inf if step_timeout is None else step_timeout
        # Number of the next message.
        self._number = 0
        # Number of a call whose results the driver has given up.
        self._called_off: int | None = None
        # Number of the last message, if it was a call and all workers have carried it out.
        self.carried_out: int | None = None
        # Orders that travel with the next message: arguments by name.
        self._quiet: dict[str, tuple[Any, ...]] = {}
        self._forgotten: list[int] = []
        self._slice_s = _SLICE_S if life().tells_ends else _SLICE_UNTOLD_S
        self._is_closed = False

    def place(self, worker: str, device: str) -> Place:
        return Place(worker, device, f"{self.name}.{next(_numbers)}")

    def routes(self) -> list[tuple[str, str]]:
        """Worker and host of each stage."""
        return [(self.places[row].worker, self.places[row].host) for row in self.worker_of]

    # ----------------------------------------------------------------------------------------------------- orders

    def later(self, name: str, *arguments: Any) -> None:
        """Have all workers carry out an order before the next one. A later order of the same name replaces it."""
        self._quiet[name] = arguments

    def forget(self, call: int) -> None:
        """Let the workers free the state that they keep of a call."""
        self._forgotten.append(call)

    def send(self, name: str, *arguments: Any) -> None:
        """Give an order to all workers without waiting for it: the next order that waits raises its failure."""
        self._put_all(*self._message(name, [arguments] * len(self.places), is_answered=False))

    def do(self, name: str, *arguments: Any) -> list[Any]:
        """Give an order to all workers, wait until they have carried it out, and return their results. Raises
        StageError, StageLostError or PipelineError, also for earlier orders of `send`."""
        return self.each(name, [arguments] * len(self.places))

    def each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Do the same as `do`, with separate arguments for each worker."""
        message, encoded = self._message(name, arguments, is_answered=True)
        epoch = self.present
        try:
            self._put_all(message, encoded)
            results = self._gather(str(message.number))
            if epoch.gone:
                epoch.end(0)
            if epoch.cut is None:
                epoch.messages = []
                self.carried_out = message.number if name == "run" else None
                return [results[row] for row in range(len(self.places))]
        except BaseException:
            if name == "run":
                # Ctrl-C, or an answer that cannot be unpickled. Do not wait for the hosts, which may be busy for long.
                self._call_off(message.number)
            raise
        self._begin_epoch()
        raise self._error_of(epoch)

    def _message(
        self, name: str, arguments: Sequence[tuple[Any, ...]], *, is_answered: bool
    ) -> tuple[_Message, list[Any]]:
        """Return the next message, and what each worker gets. Raises pickle's errors."""
        self.carried_out = None
        self.check()
        self._end_call_off()
        forgotten, self._forgotten = self._forgotten, []
        if forgotten:
            self.later("forget", [*self._quiet.get("forget", ([],))[0], *forgotten])
        quiet = list(self._quiet.items())
        if all(some is arguments[0] for some in arguments):
            encoded = [encode((is_answered, [*quiet, (name, arguments[0])]))] * len(arguments)
        else:
            encoded = [encode((is_answered, [*quiet, (name, some)])) for some in arguments]
        return _Message(self._number, name, self._quiet), encoded

    def _put_all(self, message: _Message, encoded: list[Any]) -> None:
        """Send a message to all workers."""
        try:
            self.present.messages.append(message)
            self._number, self._quiet = self._number + 1, {}
            if self.present.gone:
                self.present.end(0)
            for row, orders in enumerate(encoded):
                self._put(row, message, orders)
        except BaseException:
            # Some workers have the message, and the others do not.
            self._call_off(message.number)
            raise

    def _call_off(self, number: int) -> None:
        """End this epoch at a message, without waiting for the hosts: the next message waits until they have undone
        it."""
        self._called_off = number
        self.present.end(number)

    def undo_last(self) -> None:
        """Undo the last message, if it was a call and all workers have carried it out."""
        if self.carried_out is not None:
            self._call_off(self.carried_out)

    def _end_call_off(self) -> None:
        """If the last call was interrupted, wait until all hosts have undone it. Raises the error of an order before
        that call, and StageLostError."""
        number, self._called_off = self._called_off, None
        if number is not None:
            ended = self.present
            self._begin_epoch()
            if ended.gone or any(failed < number for failed, _ in ended.failures):
                raise self._error_of(ended)

    def _put(self, row: int, message: _Message, orders: Any) -> None:
        """Put a message into the box of a worker, or give the worker up."""
        place, watch = self.places[row], _Watch(self.places, math.inf)
        while row not in self.present.gone:
            try:
                put(place.host, self.present.number, place.worker, str(message.number), orders, _SLICE_S)
                return
            except EpochEnded:
                return  # a message before it has failed
            except RuntimeError as error:
                if was_lost(error):
                    self.present.give_up(row, str(error))
                elif timed_out(error):
                    watch.look([row], self.present)
                else:
                    raise

    def _gather(self, tag: str) -> dict[int, Any]:
        """Return the values that all workers send under a tag, by row; fewer if the epoch ends."""
        epoch, watch = self.present, _Watch(self.places, self._step_timeout)
        found: dict[int, Any] = {}
        while epoch.cut is None:
            still = [row for row in range(len(self.places)) if row not in found and row not in epoch.gone]
            if not still:
                break
            place = self.places[still[0]]
            try:
                value = self.box.take(epoch.number, place.worker, f"{place.host} {tag}", self._slice_s)
            except EpochEnded:
                if epoch.cut is None:
                    raise  # the pipeline has been closed
            except RuntimeError as error:
                if timed_out(error):
                    watch.look(still, epoch)
                elif was_lost(error):
                    epoch.give_up(still[0], str(error))
                else:
                    raise
            else:
                found[still[0]] = decode(value)
        return found

    # --------------------------------------------------------------------------------------------------- epochs

    def _lose(self, gone: Gone) -> None:
        """Give up a worker that has ended. Any thread may call this."""
        for row, place in enumerate(self.places):
            if place.worker == gone.name:
                self.present.give_up(row, gone.reason)

    def _begin_epoch(self) -> None:
        """Return when all hosts that live have begun the next epoch."""
        ended = self.present
        epoch = _Epoch(ended.number + 1, self.places, self.box, ended.news)
        self.carried_out = None
        epoch.gone.update(ended.gone)
        self.present, self._number = epoch, 0
        # Some hosts may not have carried out orders that were to travel with another order. Repeating them does no
        # harm.
        for message in reversed(ended.messages):
            self._quiet = {**message.quiet, **self._quiet}
        self._gather("begins")
        ended.gone.update(epoch.gone)
        epoch.gone.clear()
        for row in ended.gone:
            self.places[row].lost = True

    # --------------------------------------------------------------------------------------------------- failures

    def _error_of(self, ended: _Epoch) -> PipelineError:
        if ended.gone:
            reasons = {self.places[row].worker: reason for row, reason in ended.gone.items()}
            return self._lost_error(sorted(ended.gone), reasons)
        failed = sorted(ended.failures.items(), key=lambda item: (item[1].is_lost, item[0]))
        (number, row), failure = failed[0]
        if failure.is_lost:
            return PipelineError(
                f"a stage could not exchange values with worker {failure.error}, which the driver reaches: look at the "
                f"network between the two workers. Gradients are as before this call. Try pipe.step() or pipe(x) again."
            )
        worker = self.places[row].worker
        stage, _, micro_batch = failure.action or (None, None, None)
        if stage is None:
            name = next(message.name for message in ended.messages if message.number == number)
            what = f"worker {worker!r} failed in {name.replace('_', ' ')}"
        else:
            what = f"stage {stage} on worker {worker!r} failed in {failure.doing} of micro-batch {micro_batch}"
        return StageError(
            f"{what}: {failure.error}",
            stage=stage,
            worker=worker,
            micro_batch=micro_batch,
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
        else:
            with contextlib.suppress(RuntimeError):  # RPC has been shut down, or the worker has ended
                rpc.rpc_async(place.info, _host.close, (place.host,), timeout=0)


class _Watch:
    """Questions to the workers that have not answered yet."""

    def __init__(self, places: Sequence[Place], limit_s: float) -> None:
        self._places = places
        self._limit_s = limit_s
        self._begin = self._looked = time.monotonic()
        self._questions: dict[int, _Question] = {}

    def look(self, rows: Sequence[int], epoch: _Epoch) -> None:
        """Give up workers that are silent, or busy for too long, in ``epoch``. The others get the last cut."""
        now = time.monotonic()
        # Limit the time that counts as passed: this process may itself have been stopped.
        passed, self._looked = min(now - self._looked, 2 * _SLICE_S), now
        busy = []
        for row in rows:
            question = self._questions.setdefault(row, _Question())
            if (reason := question.look(self._places[row], passed, epoch.news)) is not None:
                epoch.give_up(row, reason)
            elif question.answer == "busy" or question.silence_s > _ASKING_S:
                busy.append(row)
        # By now this object has asked each worker at least once.
        if now - self._begin > max(self._limit_s, 2 * _SLICE_S) and epoch.cut is None:
            for row in busy or rows:
                state = "busy" if busy else "waiting"
                epoch.give_up(row, f"its stage is {state} after step_timeout={self._limit_s:g} s")


class _Question:
    """The last answer of a worker that has not sent its result, and how long it has been silent."""

    def __init__(self) -> None:
        self.answer = ""
        self.silence_s = 0.0
        self._next = 0.0
        self._call: Any = None

    def look(self, place: Place, passed_s: float, cut: _host.Cut | None) -> str | None:
        """Return the reason to give the worker up, or None. A question repeats the ``cut``."""
        try:
            if self._call is None:
                if time.monotonic() >= self._next:
                    self._next, self.silence_s = time.monotonic() + _ASKING_S, 0.0
                    self._call = rpc.rpc_async(place.info, _host.progress, (place.host, cut), timeout=0)
            elif self._call.done():
                self.answer, self._call = self._call.value(), None
            else:
                self.silence_s += passed_s
        except RuntimeError as error:
            return str(error)
        limit = get_rpc_timeout()
        if self.silence_s > limit > 0:
            return f"it has not answered for {limit:g} s"
        return "its stages have been closed" if self.answer == "closed" else None


# The crews of this process, by name.
_crews: weakref.WeakValueDictionary[str, Crew] = weakref.WeakValueDictionary()


def tell(crew: str, host: str, failure: Failure) -> None:
    """Note that a message has failed on a host. Hosts call this."""
    if (found := _crews.get(crew)) is not None:
        found.present.fail(host, failure)
