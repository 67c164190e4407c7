"""A graceful shutdown serves until every living worker has called it. Then it names the workers that have died."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import api

from tests.support import workers
from tests.support.labs import Fate, VirtualHosts, needs_virtual_hosts
from tests.support.workers import Stalls, Transport, agent
from torch_ucx_rpc._torch import patches
from torch_ucx_rpc._workers.lost import subscribe
from torch_ucx_rpc.errors import BarrierFailed, RpcError, WorkerLeft, WorkerLost

from ._failures import DEATH_OF_WORKER1, LOST_SOON, SHORT_LIMIT, die, echo, failure_of, let_go, sleep, stay

pytestmark = pytest.mark.ucx_only

KILLED = DEATH_OF_WORKER1["exit_codes"][1]
# The shutdown waits for several workers, so no attribute of the error names a missing one.
SHUTDOWN_RAN_OUT_OF_TIME = (
    r"waited 1000 ms for all workers to come to the same point; missing: worker .worker1. \(rank 1"
)


def assert_names_the_dead(error: BarrierFailed, dying: Collection[int]) -> None:
    for rank in dying:
        assert f"lost worker 'worker{rank}' (rank {rank}," in str(error), error
        assert f"lost worker 'worker{rank}'" in str(error.cause)


# ------------------------------------------------------------------------------------------ survivors serve


def ask(name: str, value: int) -> int:
    return rpc.rpc_sync(name, echo, (value,))


def drive_others_that_serve(rank: int, driver: int, dying: list[int]) -> tuple[float, float]:
    """Drive workers that, like parameter servers, only call ``rpc.shutdown()``. Then kill ``dying``."""
    if rank == driver:
        living = [other for other in range(4) if other not in (driver, *dying)]
        held = [rpc.remote(f"worker{other}", echo, (other,)) for other in range(4)]
        assert [rref.to_here() for rref in held] == list(range(4))
        for other in dying:
            failure_of(lambda other=other: rpc.rpc_sync(f"worker{other}", die), WorkerLost)
        for _ in range(3):
            for other in living:
                assert ask(f"worker{other}", 7) == 7
                # Survivors still reach each other and this worker.
                for third in [*living, driver]:
                    assert rpc.rpc_sync(f"worker{other}", ask, (f"worker{third}", 8)) == 8
            time.sleep(0.3)
        assert all(rref.to_here() == other for other, rref in enumerate(held) if other not in dying)
    began = time.monotonic()
    assert_names_the_dead(failure_of(rpc.shutdown, BarrierFailed), dying)
    return began, time.monotonic()


@pytest.mark.parametrize("transport", list(Transport))
@pytest.mark.parametrize(
    ("driver", "dying"),
    [
        pytest.param(0, [2], id="a worker"),
        pytest.param(3, [0], id="rank 0, which hosts the Store"),
        pytest.param(1, [0, 2], id="two"),
    ],
)
def test_survivors_serve_in_shutdown_until_all_living_have_come(
    transport: Transport, driver: int, dying: list[int]
) -> None:
    codes = dict.fromkeys(dying, KILLED)
    with Stalls() as stalls:
        ends = workers.run_workers(
            4, drive_others_that_serve, driver, dying, transport=transport, **{**DEATH_OF_WORKER1, "exit_codes": codes}
        )
    last_came, _ = ends[driver]
    assert max(ended for _, ended in filter(None, ends)) - last_came < 1 + stalls.seconds()


def call_and_shut_down_at_once(rank: int) -> None:
    if rank == 1:
        die()
    call = rpc.rpc_async("worker2" if rank == 0 else "worker0", sleep, (1.0,))
    assert_names_the_dead(failure_of(rpc.shutdown, BarrierFailed), [1])
    assert call.done()
    assert call.value() is None


def test_calls_among_survivors_are_answered_before_shutdown_ends(run_workers: Callable[..., list]) -> None:
    run_workers(3, call_and_shut_down_at_once, **DEATH_OF_WORKER1)


kept: list[rpc.RRef] = []


def keep(*rrefs: rpc.RRef) -> None:
    kept.extend(rrefs)


def shut_down_with_rrefs_of_the_dead(rank: int) -> float:
    if rank == 0:
        kept.extend(rpc.remote(f"worker{other}", echo, (torch.ones(3),)) for other in (1, 2))
        for other in (1, 2):
            # If an owner passes a reference to a worker, only that worker can free it.
            rpc.rpc_sync(f"worker{other}", keep, (*kept, rpc.RRef(rank)))
        failure_of(lambda: rpc.rpc_sync("worker1", die), WorkerLost)
    began = time.monotonic()
    assert_names_the_dead(failure_of(rpc.shutdown, BarrierFailed), [1])
    return time.monotonic() - began


def test_shutdown_does_not_wait_for_rrefs_of_the_dead(run_workers: Callable[..., list]) -> None:
    took = run_workers(3, shut_down_with_rrefs_of_the_dead, **DEATH_OF_WORKER1)
    assert max(took[0], took[2]) < 5, "torch waits for references to RRefs for 100 s"


def pass_rrefs_to_worker1() -> None:
    failure_of(lambda: rpc.rpc_sync("worker1", keep, (*kept, rpc.RRef(0))), RpcError)


def make_rrefs_at_worker1() -> None:
    for function in (echo, torch.neg):
        # torch raises the failure here if the agent has failed the call already.
        with contextlib.suppress(RpcError):
            kept.append(rpc.remote("worker1", function, (torch.ones(1),)))


def use_ended_worker1_and_shut_down(rank: int, end: Callable[[], None], use: Callable[[], None]) -> float:
    if rank == 0:
        kept.extend(rpc.remote(f"worker{other}", echo, (torch.ones(3),)) for other in (1, 2))
        assert all(rref.to_here().sum() == 3 for rref in kept)
        has_ended = threading.Event()
        unsubscribe = subscribe(lambda _gone: has_ended.set())
        with contextlib.suppress(WorkerLost, WorkerLeft):
            rpc.rpc_sync("worker1", end)
        assert has_ended.wait(10)
        unsubscribe()
        use()
    elif rank == 1:
        stay()
        with contextlib.suppress(RuntimeError):  # torch reports that others have references
            rpc.shutdown(graceful=False)
        return 0
    began = time.monotonic()
    with contextlib.suppress(BarrierFailed):
        rpc.shutdown()
    return time.monotonic() - began


@pytest.mark.parametrize(("end", "code"), [pytest.param(die, KILLED, id="dead"), pytest.param(let_go, 0, id="left")])
@pytest.mark.parametrize("use", [pass_rrefs_to_worker1, make_rrefs_at_worker1])
def test_shutdown_does_not_wait_for_rrefs_sent_to_the_gone(
    end: Callable[[], None], code: int, use: Callable[[], None], run_workers: Callable[..., list]
) -> None:
    took = run_workers(3, use_ended_worker1_and_shut_down, end, use, **{**DEATH_OF_WORKER1, "exit_codes": {1: code}})
    assert max(took[0], took[2]) < 5, "torch waits for news of references for 100 s"


# ------------------------------------------------------------------------------------------ deaths in the shutdown


def shut_down_without_worker1(rank: int, fate: Fate | None) -> float:
    if rank == 1:
        if fate is not None:
            fate.of("b", "power_off")
        die()
    start = time.monotonic()
    with Stalls() as stalls:
        assert_names_the_dead(failure_of(rpc.shutdown, BarrierFailed), [1])
    return time.monotonic() - start - stalls.seconds()


def test_graceful_shutdown_with_a_dead_worker_raises(run_workers: Callable[..., list]) -> None:
    took = run_workers(3, shut_down_without_worker1, None, **DEATH_OF_WORKER1)
    assert max(took[0], took[2]) < 3, "the agent's own end takes up to two seconds where handlers or sends hang"


def test_graceful_shutdown_notices_a_dead_host_it_never_called() -> None:
    needs_virtual_hosts()
    with VirtualHosts(["a", "b", "c"]) as hosts, Fate(hosts) as fate:
        arguments = {"options": LOST_SOON, "expendable": {1}, "shutdown": False, "silent": False}
        took = workers.run_workers(3, shut_down_without_worker1, fate, hosts=hosts, **arguments)
        assert max(took[0], took[2]) < SHORT_LIMIT + 4


def end(*_args: Any, **_kwargs: Any) -> None:
    os._exit(5)


def die_in_shutdown(rank: int, dying: int, moment: str) -> float:
    if rank == dying:
        if moment == "torch's barrier":
            api._all_gather = end
        elif moment == "RRefs are deleted":
            api._delete_all_user_and_unforked_owner_rrefs = end
        else:
            agent().join = end
    start = time.monotonic()
    assert_names_the_dead(failure_of(lambda: rpc.shutdown(timeout=30), BarrierFailed), [dying])
    return time.monotonic() - start


@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize("moment", ["torch's barrier", "RRefs are deleted", "the last rounds"])
def test_a_death_ends_the_shutdown_for_all_and_is_named(
    run_workers: Callable[..., list], dying: int, moment: str
) -> None:
    took = run_workers(3, die_in_shutdown, dying, moment, exit_codes={dying: 5}, shutdown=False, silent=False)
    assert max(filter(None, took)) < 10, "the timeout is 30 s"


# ------------------------------------------------------------------------------------------------- large groups


def shut_down_where_the_gather_ends(rank: int) -> None:
    patches._MOST_GATHERED = 2
    api._all_gather = end
    rpc.shutdown()


def test_large_group_is_not_gathered_at_one_worker(run_workers: Callable[..., list]) -> None:
    run_workers(3, shut_down_where_the_gather_ends, shutdown=False)


# ------------------------------------------------------------------------------------------ a worker that hangs


def shut_down_with_a_hung_worker(rank: int) -> None:
    if rank == 1:
        time.sleep(4)
        return
    start = time.monotonic()
    with Stalls() as stalls, pytest.raises(BarrierFailed, match=SHUTDOWN_RAN_OUT_OF_TIME):
        rpc.shutdown(timeout=1)
    took = time.monotonic() - start
    assert 1 <= took < 3.5 + stalls.seconds()


def test_graceful_shutdown_with_a_hung_worker_keeps_its_timeout(run_workers: Callable[..., list]) -> None:
    run_workers(2, shut_down_with_a_hung_worker, shutdown=False, silent=False)
