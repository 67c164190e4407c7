"""The driver's side of the workers: numbered orders to all of them, and what came of each."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed.rpc as rpc
from torch.futures import Future

from torch_ucx_rpc._workers.futures import fail
from torch_ucx_rpc._workers.lost import was_lost
from torch_ucx_rpc.pipeline import host
from torch_ucx_rpc.pipeline.errors import PipelineError, StageError, StageLostError
from torch_ucx_rpc.pipeline.exchange import worker_info
from torch_ucx_rpc.pipeline.messages import Failure, Request

__all__ = ["Crew", "Place"]

# Seconds that living workers get to say how a call ended that has been called off.
_SETTLING_S = 10.0

_UNANSWERED = (
    "it could not take the order, or not answer it. What goes to a worker must be of modules that can be imported "
    "there, and what it answers must be picklable: "
)

_numbers = itertools.count()


@dataclasses.dataclass
class Place:
    """Where a row of the schedule runs."""

    worker: str
    device: str
    host: str
    """Name of the `host.Host` there; two places may be in one process."""
    is_here: bool = False
    info: Any = None
    lost: bool = False
    is_new: bool = False
    """It has been made in the place of another, and does not know all yet."""

    def __str__(self) -> str:
        return self.worker if self.device == "cpu" else f"{self.worker}/{self.device}"


class _Sent(NamedTuple):
    """An order that all have been given."""

    number: int
    name: str
    payloads: Sequence[Any]
    futures: list[Future[Any]]


class Crew:
    """The workers of one pipeline. The driver's thread has it; only `abort` is called by threads of the agent too.

    Args:
        places: worker and device of each row of the schedule.
        worker_of: the row of each stage.

    Attributes:
        number: of the next order.
        stages_of: the stages of each row.
    """

    def __init__(self, places: Sequence[tuple[str, str]], worker_of: Sequence[int]) -> None:
        own = rpc.get_worker_info()
        self.name = f"{own.name}-{os.getpid()}-{next(_numbers)}"
        self.here = own.name
        self.places = [self.place(worker, device) for worker, device in places]
        self.number = 0
        self.worker_of = worker_of
        self.stages_of = [[stage for stage, of in enumerate(worker_of) if of == row] for row in range(len(places))]
        self._unsettled: list[_Sent] = []

    def place(self, worker: str, device: str) -> Place:
        info = worker_info(worker)
        return Place(worker, device, f"{self.name}.{next(_numbers)}", worker == self.here, info)

    # ----------------------------------------------------------------------------------------------------- orders

    def send(self, name: str, payloads: Sequence[Any]) -> _Sent:
        """Give an order to all; `settle` waits for it."""
        self.check()
        number, self.number = self.number, self.number + 1
        futures: list[Future[Any]] = []
        try:
            for place, payload in zip(self.places, payloads, strict=True):
                futures.append(self._send_one(place, number, name, payload))
        except BaseException:
            self._take_back(number, payloads, sent=len(futures))
            raise
        sent = _Sent(number, name, payloads, futures)
        if name in {"run", "optimizer_step", "set_values"}:
            # In these workers wait for each other.
            noticed = threading.Event()
            for future in futures:
                future.add_done_callback(lambda done: self._notice(done, number, noticed))
        return sent

    def _take_back(self, number: int, payloads: Sequence[Any], sent: int) -> None:
        """After an order that cannot be sent, as what cannot be pickled: a number that does not come is waited for."""
        for place, payload in list(zip(self.places, payloads, strict=True))[sent:]:
            self._skip(place, number, payload, has_begun=sent > 0)
        self.abort(number)

    def _skip(self, place: Place, number: int, payload: Any, *, has_begun: bool) -> None:
        """Fill the place of an order that has not reached a worker; no harm is done where it has."""
        if isinstance(payload, Request):
            self._send_one(place, number, "skip", payload.skipped(has_begun=has_begun))
        else:
            self._send_one(place, number, "synchronize", {})

    def send_later(self, name: str, payload: Any) -> None:
        """Give an order that nobody waits for now: what goes wrong is told by the next `settle`."""
        self._unsettled.append(self.send(name, [payload] * len(self.places)))

    def _send_one(self, place: Place, number: int, name: str, payload: Any) -> Future[Any]:
        if place.is_here:
            future: Future[Any] = Future()
            host.put_order(place.host, number, name, payload, future, here=True)
            return future
        try:
            sent: Future[Any] = rpc.rpc_async(place.info, host.order, (place.host, number, name, payload), timeout=0)
            return sent
        except RuntimeError as error:
            # Known to be gone: as good as an answer.
            failed: Future[Any] = Future()
            fail(failed, error)
            return failed

    def _notice(self, future: Future[Any], number: int, noticed: threading.Event) -> None:
        """Runs when an order ends: one that fails is called off everywhere, so that nobody waits for its values."""
        try:
            good = future.value()[0] == "ok"
        except Exception:
            good = False
        if not good and not noticed.is_set():
            noticed.set()
            self.abort(number)

    def abort(self, number: int) -> None:
        for place in self.places:
            if place.is_here:
                host.abort(place.host, number)
            elif not place.lost:
                try:
                    rpc.rpc_async(place.info, host.abort, (place.host, number))
                except RuntimeError:
                    continue

    def settle(self, sent: _Sent) -> list[Any]:
        """What each made of an order, and of those before it that nobody has waited for. Raises StageError,
        StageLostError."""
        outcomes = []
        unsettled, self._unsettled = self._unsettled, []
        for one in [*unsettled, sent]:
            outcomes = [self._outcome(one.name, future) for future in one.futures]
            if any(outcome[0] != "ok" for outcome in outcomes):
                if one is not sent:
                    # It counts on the one before it.
                    self.abort(sent.number)
                self._fail(one, outcomes)
        return [outcome[1] for outcome in outcomes]

    def do(self, name: str, payload: Any) -> list[Any]:
        """Give an order to all and wait until they have carried it out."""
        return self.settle(self.send(name, [payload] * len(self.places)))

    def _outcome(self, name: str, future: Future[Any]) -> tuple[Any, ...]:
        try:
            outcome: tuple[Any, ...] = future.wait()
        except Exception as error:
            # Orders end in outcomes. What raises is that the call did not get there, or its answer back: the worker is
            # gone, or what the call or the answer carries cannot be pickled or unpickled. A reset carries nothing such.
            is_gone = was_lost(error) or name == "reset"
            return "gone" if is_gone else "unanswered", f"{type(error).__name__}: {error}"
        return outcome

    # --------------------------------------------------------------------------------------------------- failures

    def _fail(self, sent: _Sent, outcomes: Sequence[tuple[Any, ...]]) -> None:
        number, name, payloads, _ = sent
        gone = [row for row, outcome in enumerate(outcomes) if outcome[0] == "gone"]
        for row in gone:
            self.places[row].lost = True
        if gone:
            reasons = {self.places[row].worker: outcomes[row][1] for row in gone}
            raise self._lost_error(gone, reasons)
        for place, payload, outcome in zip(self.places, payloads, outcomes, strict=True):
            if outcome[0] == "unanswered":
                self._skip(place, number, payload, has_begun=True)
        if name != "reset":
            self.settle(self.send("reset", [{"undo": number}] * len(self.places)))
        for row, outcome in enumerate(outcomes):
            if outcome[0] == "error":
                raise self._stage_error(self.places[row], name, outcome[1])
            if outcome[0] == "unanswered":
                raise self._stage_error(self.places[row], name, Failure(_UNANSWERED + outcome[1], ""))
        for outcome in outcomes:
            if outcome[0] == "lost":
                raise PipelineError(
                    f"a stage could not send to worker {outcome[1]}, which the driver reaches: look at the network "
                    f"between the two workers. The step has been undone; it can be tried again."
                )
        raise PipelineError("the pipeline has been closed on a worker: make a new one")

    def routes(self) -> list[tuple[str, str]]:
        """Worker and host of each stage."""
        return [(self.places[row].worker, self.places[row].host) for row in self.worker_of]

    def reset(self) -> None:
        """After workers have changed."""
        self.settle(self.send("reset", [{"routes": self.routes(), "gradients": True}] * len(self.places)))

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
        lost = [row for row, place in enumerate(self.places) if place.lost]
        if lost:
            raise self._lost_error(lost, {self.places[row].worker: "it was lost before" for row in lost})

    def give_up_unsettled(self) -> None:
        """After a loss: see the orders of the living to their end, and forget what came of them."""
        unsettled, self._unsettled = self._unsettled, []
        deadline = time.monotonic() + _SETTLING_S
        for sent in unsettled:
            for future in sent.futures:
                while not future.done() and time.monotonic() < deadline:
                    time.sleep(0.001)

    def close(self) -> None:
        for place in self.places:
            self.close_place(place)

    def close_place(self, place: Place) -> None:
        if place.is_here:
            host.close(place.host)
        elif not place.lost:
            with contextlib.suppress(RuntimeError):
                rpc.rpc_async(place.info, host.close, (place.host,))
