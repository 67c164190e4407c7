"""`torch_ucx_rpc.on_lost`: which ends it reports, and to which workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.rpc as rpc

import torch_ucx_rpc
from tests.support.workers import Steps, backend_options, eventually, init_rpc
from torch_ucx_rpc._workers import lost as ends
from torch_ucx_rpc.errors import CallTimedOut, MessageNotSent, NotRunning, UnknownWorker, WorkerLeft, WorkerLost

from ._jobs import KILLED, die

RunWorkers = Callable[..., list]


def test_the_death_of_a_worker_reaches_all_watchers(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(3, see_a_death, Steps(tmp_path), shutdown=False, exit_codes={1: KILLED})


def see_a_death(rank: int, steps: Steps) -> None:
    if rank == 0:
        told: list[tuple[str, int, str]] = []
        also: list[str] = []
        torch_ucx_rpc.on_lost(lambda worker, reason: told.append((worker.name, worker.id, reason)))
        torch_ucx_rpc.on_lost(lambda worker, reason: 1 / 0)
        torch_ucx_rpc.on_lost(lambda worker, reason: also.append(worker.name))
        stop = torch_ucx_rpc.on_lost(lambda worker, reason: also.append("although it has ended"))
        stop()
        stop()
        rpc.rpc_async("worker1", die)
        eventually(lambda: bool(told and also), "both are told")
        [(name, number, reason)] = told
        assert (name, number) == ("worker1", 1)
        assert "worker1" in reason
        assert also == ["worker1"]
        assert [gone.name for gone in ends.ended()] == ["worker1"]
        steps.done("over")
    steps.wait_for("over")
    rpc.shutdown(graceful=False)


def test_handlers_waiting_for_an_end_do_not_delay_its_news(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    options, codes = {"num_worker_threads": 2}, {2: KILLED}
    run_on_ucx(3, wait_in_all_threads, Steps(tmp_path), options=options, shutdown=False, exit_codes=codes)


_lost = threading.Event()


def wait_for_a_death(seconds: float) -> bool:
    return _lost.wait(seconds)


def wait_in_all_threads(rank: int, steps: Steps) -> None:
    if rank == 0:
        torch_ucx_rpc.on_lost(lambda worker, reason: _lost.set())
        steps.done("subscribed")
    elif rank == 1:
        steps.wait_for("subscribed")
        waiting = [rpc.rpc_async("worker0", wait_for_a_death, args=(10.0,)) for _ in range(4)]
        rpc.rpc_async("worker2", die)
        assert all(answer.wait() for answer in waiting)
        steps.done("over")
    steps.wait_for("over")
    rpc.shutdown(graceful=False)


def test_a_worker_that_leaves_is_not_lost_but_gone(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(2, see_one_leave, Steps(tmp_path), init=False)


def see_one_leave(rank: int, steps: Steps) -> None:
    if rank:
        steps.wait_for("joined 0")
    init_rpc(rank, world_size=None, rpc_backend_options=backend_options(init_method=(steps.directory / "s").as_uri()))
    steps.done(f"joined {rank}")
    if rank == 0:
        lost: list[str] = []
        gone: list[tuple[str, bool]] = []
        torch_ucx_rpc.on_lost(lambda worker, reason: lost.append(worker.name))
        ends.subscribe(lambda end: gone.append((end.name, end.failed)))
        steps.done("subscribed")
        eventually(lambda: gone == [("worker1", False)], "it is gone")
        assert lost == []
    else:
        steps.wait_for("subscribed")
    rpc.shutdown()


def test_without_rpc_no_worker_can_be_lost() -> None:
    with pytest.raises(NotRunning, match="RPC is not running"):
        torch_ucx_rpc.on_lost(print)


def test_another_backend_takes_subscribers_but_reports_nothing(run_on_tensorpipe: RunWorkers) -> None:
    run_on_tensorpipe(1, subscribe_on_tensorpipe)


def subscribe_on_tensorpipe(rank: int) -> None:
    stop = torch_ucx_rpc.on_lost(print)
    assert ends.ended() == []
    stop()


PS = {"name": "ps", "rank": 1, "host": "a"}
RAISED_THERE = "On WorkerInfo(id=1, name=ps):\n"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkerLost("lost worker 'ps' (rank 1, pid 3 on a): it has died", **PS), "lost"),
        (WorkerLeft("worker 'ps' (rank 1, pid 3 on a) has left the group", **PS), "lost"),
        # After a while workers forget a lost worker.
        (UnknownWorker("could not find destination worker 'ps'", name="ps"), "lost"),
        (CallTimedOut("RPC ran for more than set timeout (60000 ms)", **PS), "timed out"),
        # The callee has lost a third worker: torch makes a new exception, without attributes.
        (WorkerLost(f"{RAISED_THERE}WorkerLost(\"lost worker 'x' (rank 2)\")"), None),
        (CallTimedOut(f"{RAISED_THERE}CallTimedOut('RPC ran for more than set timeout (60000 ms)')"), None),
        (MessageNotSent("could not send to worker 'ps': Connection reset by remote peer", **PS), None),
        (ValueError("connection reset"), None),
        # Errors of TensorPipe's agent do not have this package's types.
        (RuntimeError("eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)"), "lost"),
        (
            RuntimeError("RPC ran for more than set timeout (60000 ms) and will now be marked with an error"),
            "timed out",
        ),
        (RuntimeError(f"{RAISED_THERE}RuntimeError('eof')"), None),
        (RuntimeError(f"RuntimeError: {RAISED_THERE}RuntimeError('RPC ran for more than set timeout')"), None),
        (RuntimeError("out of memory"), None),
    ],
)
def test_an_error_says_whether_the_callee_was_lost_or_slow(error: BaseException, kind: str | None) -> None:
    assert (ends.was_lost(error), ends.timed_out(error)) == (kind == "lost", kind == "timed out")


@pytest.mark.parametrize(
    ("error", "is_lookup"),
    [
        (LookupError(f"{RAISED_THERE}LookupError('no such name')"), True),
        (KeyError("a subclass"), True),
        (RuntimeError(f"{RAISED_THERE}LookupError('no such name')\nTraceback: ..."), True),
        (RuntimeError(f"{RAISED_THERE}ValueError('LookupError(1)')\nTraceback: LookupError("), False),
        (RuntimeError("LookupError("), False),
    ],
)
def test_an_error_has_the_type_that_the_callee_raised(error: BaseException, is_lookup: bool) -> None:
    assert ends.was_raised_there(error, LookupError) == is_lookup
