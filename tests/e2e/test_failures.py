"""Workers that die: their effect on other workers, and the state that they leave. (Silent workers: test_silence.py.)"""

from __future__ import annotations

import concurrent.futures
import faulthandler
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

import torch_ucx_rpc
from tests.support import workers
from tests.support.labs import VirtualHosts
from tests.support.workers import Stalls, agent, eventually
from torch_ucx_rpc.errors import RRefLost, WorkerLost

from ._failures import (
    DEATH_OF_WORKER1,
    autograd_contexts,
    die,
    echo,
    failure_of,
    is_lost,
    leave_ungracefully_after,
    let_go,
    sleep,
    stay,
)

pytestmark = pytest.mark.ucx_only

kept: list[Any] = []


def metric(name: str) -> int:
    return int(agent().get_metrics()[name])


# ------------------------------------------------------------------------------------------ processes that end


def see_a_worker_die(rank: int) -> None:
    if rank == 0:
        pid, host = rpc.rpc_sync("worker1", os.getpid), rpc.rpc_sync("worker1", socket.gethostname)
        pending = [rpc.rpc_async("worker1", sleep, (60,)) for _ in range(10)]
        start = time.monotonic()
        with Stalls() as stalls:
            rpc.rpc_async("worker1", die)
            for call in pending:
                error = failure_of(call.wait, WorkerLost)
                assert (error.name, error.rank, error.host) == ("worker1", 1, host)
                assert f"lost worker 'worker1' (rank 1, pid {pid} on {host})" in str(error)
                assert error.cause
            assert time.monotonic() - start < 1 + stalls.seconds()
            start = time.monotonic()
            assert failure_of(lambda: rpc.rpc_sync("worker1", echo, (1,)), WorkerLost).name == "worker1"
            assert time.monotonic() - start < 0.5 + stalls.seconds()
            # rpc.remote() or to_here() raises it: torch looks at the call at once, and the agent may be faster.
            for _ in range(10):
                error = failure_of(lambda: rpc.remote("worker1", echo, (1,)).to_here(), WorkerLost)
                assert (error.name, error.rank, error.host) == ("worker1", 1, host)
                assert error.cause
        assert rpc.rpc_sync("worker2", echo, (2,)) == 2
        rpc.rpc_sync("worker2", let_go)
    else:
        stay()


def test_calls_to_a_killed_process_fail_within_a_second(run_workers: Callable[..., list]) -> None:
    run_workers(3, leave_ungracefully_after(see_a_worker_die), **DEATH_OF_WORKER1)


def test_calls_across_hosts_fail_within_a_second_of_a_kill(hosts: VirtualHosts) -> None:
    workers.run_workers(3, leave_ungracefully_after(see_a_worker_die), hosts=hosts, **DEATH_OF_WORKER1)


def outlive_owners_to_be(rank: int) -> None:
    if rank == 0:
        created = [rpc.remote("worker1", sleep, (60,)) for _ in range(5)]
        forwarded = rpc.rpc_async("worker2", fetch, (created[0],))
        rpc.rpc_async("worker1", die)
        for rref in created:
            assert failure_of(rref.to_here, WorkerLost).name == "worker1"
        # The error's type and sentence also arrive through worker2.
        assert "lost worker 'worker1'" in str(failure_of(forwarded.wait, WorkerLost))
        assert rpc.rpc_sync("worker2", echo, (2,)) == 2
        rpc.rpc_sync("worker2", let_go)
    else:
        stay()


def fetch(rref: rpc.RRef) -> object:
    return rref.to_here()


def test_worker_survives_deaths_of_owners_of_unfinished_rrefs(run_workers: Callable[..., list]) -> None:
    run_workers(3, leave_ungracefully_after(outlive_owners_to_be), **DEATH_OF_WORKER1)


def die_while_writing(to: str, directory: Path) -> None:
    """Send a partly unreadable tensor: the kernel kills this process in the middle of a copy into shared memory."""
    file = directory / "gone"
    size = 8 << 20
    tensor = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
    os.truncate(file, size // 2)
    faulthandler.disable()
    rpc.rpc_sync(to, echo, (tensor,))


def lose_a_worker_that_writes(rank: int, directory: Path) -> None:
    if rank == 0:
        for name in ("worker1", "worker2"):
            rpc.rpc_sync(name, echo, (1,))
        dying = rpc.rpc_async("worker1", die_while_writing, ("worker0", directory))
        assert failure_of(dying.wait, WorkerLost).name == "worker1"
        for number in range(1000):
            assert rpc.rpc_sync("worker2", echo, (number,)) == number
        big = torch.arange(1 << 20)
        assert torch.equal(rpc.rpc_sync("worker2", echo, (big,)), big)
        rpc.rpc_sync("worker2", let_go)
    else:
        stay()


def test_writer_killed_while_writing_blocks_no_other_writer(run_workers: Callable[..., list], tmp_path: Path) -> None:
    death = {**DEATH_OF_WORKER1, "exit_codes": {1: -signal.SIGBUS}}
    run_workers(3, leave_ungracefully_after(lose_a_worker_that_writes), tmp_path, **death)


def keep_shared_memory(rank: int) -> None:
    if rank == 0:
        rpc.rpc_sync("worker1", echo, (torch.ones(2**20),))
        lanes = agent().get_debug_info()["lanes.worker1"]
        assert "sysv" in lanes or "posix" in lanes, lanes
        rpc.rpc_async("worker1", die)
        eventually(lambda: is_lost("worker1"), "worker1 is lost")
        rpc.rpc_sync("worker2", let_go)
    else:
        stay()


def test_workers_with_shared_memory_notice_a_death() -> None:
    workers.run_workers(3, leave_ungracefully_after(keep_shared_memory), **DEATH_OF_WORKER1)


# -------------------------------------------------------------------------------------- what the dead held


def make_value() -> dict[str, int]:
    return {"a": 1}


def keep(rref: object) -> None:
    kept.append(rref)


def drop_kept() -> None:
    kept.clear()


def hold_all_sorts_of_things() -> None:
    """Runs on worker1 before it dies: it holds references to worker0's objects, a context on worker0, and worker0's
    window."""
    kept.append(rpc.remote("worker0", make_value))
    kept[0].to_here()
    # A third worker's reference must outlive its creator.
    rpc.rpc_sync("worker2", keep, (kept[0],))
    kept.append(rpc.remote("worker2", make_value))
    with dist_autograd.context():
        rpc.rpc_sync("worker0", torch.add, (torch.ones(2, requires_grad=True), 1))
        # These exceed worker0's receive window: it receives some, and others wait.
        kept.extend(rpc.rpc_async("worker0", sleep_over, (torch.ones(2**20), 0.01)) for _ in range(100))
        time.sleep(0.1)
        die()


def sleep_over(tensor: torch.Tensor, seconds: float) -> None:
    time.sleep(seconds)


def outlive_worker1(rank: int) -> None:
    if rank == 1:
        stay()
    elif rank == 0:
        in_use = metric("pool.in_use_bytes")
        rpc.rpc_async("worker1", hold_all_sorts_of_things)
        eventually(lambda: is_lost("worker1"), "worker1 is lost")
        eventually(lambda: metric("agent.server_active_calls") == 0, "its calls are over")
        eventually(lambda: metric("window.in_use_bytes") == 0, "the window is free")
        eventually(lambda: metric("window.waiting_messages") == 0, "nothing waits for the window")
        eventually(lambda: metric("pool.in_use_bytes") == in_use, "its buffers are back")
        eventually(lambda: autograd_contexts() == 0, "its context is closed")
        # worker2 got a reference to worker0's object from worker1.
        assert rref_count("num_owner_rrefs") == "1"
        rpc.rpc_sync("worker2", drop_kept)
        eventually(lambda: rref_count("num_owner_rrefs") == "0", "the value that only the dead held is freed")
        rpc.rpc_sync("worker2", let_go)
    else:
        stay()
        eventually(lambda: rref_count("num_owner_rrefs") == "0", "the value that only the dead held is freed")


def rref_count(name: str) -> str:
    return rpc._rref_context_get_debug_info()[name]


def test_property_of_a_dead_worker_is_released(run_workers: Callable[..., list]) -> None:
    run_workers(
        3,
        leave_ungracefully_after(outlive_worker1),
        options={"receive_window_bytes": 16 * 2**20},
        **DEATH_OF_WORKER1,
    )


gate = threading.Event()
begun: list[int] = []


def begin(number: int) -> None:
    begun.append(number)
    assert gate.wait(30)


def call_without_waiting(calls: int) -> None:
    """Runs on worker1: its calls queue at worker0, which has few threads and finishes none of them."""
    kept.extend(rpc.rpc_async("worker0", begin, (number,)) for number in range(calls))


def outlive_worker1_and_its_queue(rank: int, calls: int) -> None:
    if rank == 0:
        rpc.rpc_sync("worker1", call_without_waiting, (calls,))
        eventually(lambda: metric("agent.server_active_calls") == calls, "all have come")
        eventually(lambda: len(begun) >= 1, "one runs")
        rpc.rpc_async("worker1", die)
        eventually(lambda: is_lost("worker1"), "worker1 is lost")
        # Running calls go on, and take all threads.
        running = list(begun)
        gate.set()
        eventually(lambda: metric("agent.server_active_calls") == 0, "its calls are over")
        assert rpc.rpc_sync("worker2", echo, (2,)) == 2
        assert begun == running
        assert len(begun) < calls
        rpc.rpc_sync("worker2", let_go)
    else:
        stay()


def test_queued_calls_of_a_dead_worker_are_not_begun(run_workers: Callable[..., list]) -> None:
    body = leave_ungracefully_after(outlive_worker1_and_its_queue)
    run_workers(3, body, 50, options={"num_worker_threads": 1}, **DEATH_OF_WORKER1)


def add_at_worker2(tensor: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker2", torch.add, (tensor, 1))


def open_a_context() -> None:
    """Runs on worker1, which never calls worker2: worker0 brings worker2 into the context."""
    context = dist_autograd.context()
    context.__enter__()
    kept.append(context)
    kept.append(rpc.rpc_sync("worker0", add_at_worker2, (torch.ones(2, requires_grad=True),)))


def state_of(name: str) -> str:
    return next(peer.state for peer in torch_ucx_rpc.statistics().peers if peer.name == name)


def outlive_the_opener_of_a_context(rank: int) -> None:
    if rank == 0:
        rpc.rpc_sync("worker1", open_a_context)
        assert autograd_contexts() == 1
        assert rpc.rpc_sync("worker2", autograd_contexts) == 1
        rpc.rpc_async("worker1", die)
        eventually(lambda: is_lost("worker1"), "worker1 is lost")
        eventually(lambda: autograd_contexts() == 0, "its context is closed here")
        eventually(lambda: rpc.rpc_sync("worker2", autograd_contexts) == 0, "and where this worker has taken it")
        assert rpc.rpc_sync("worker2", state_of, ("worker1",)) == "present", "it has not seen the death itself"
        rpc.rpc_sync("worker2", let_go)
    else:
        stay()


def test_contexts_of_a_dead_worker_are_closed_on_all_workers(hosts: VirtualHosts) -> None:
    # Worker 1 has its own host: otherwise worker 2 would see worker 1's process end, and close its contexts itself.
    body = leave_ungracefully_after(outlive_the_opener_of_a_context)
    workers.run_workers(3, body, hosts=hosts, **DEATH_OF_WORKER1)


def make_and_pass_on() -> None:
    """Runs on worker2, a third worker: worker0 owns the value, and worker1 gets a reference."""
    kept.append(rpc.remote("worker0", make_value))
    kept[0].to_here()
    rpc.rpc_sync("worker1", keep, (kept[0],))


def outlive_a_holder(rank: int) -> None:
    if rank == 0:
        rpc.rpc_sync("worker2", make_and_pass_on)
        eventually(lambda: rref_count("num_forks") == "2", "both hold a reference")
        rpc.rpc_sync("worker2", drop_kept)
        eventually(lambda: rref_count("num_forks") == "1", "worker1 alone does")
        assert rref_count("num_owner_rrefs") == "1"
        rpc.rpc_async("worker1", die)
        eventually(lambda: is_lost("worker1"), "worker1 is lost")
        eventually(lambda: rref_count("num_owner_rrefs") == "0", "the value that only the dead held is freed")
        rpc.rpc_sync("worker2", let_go)
    else:
        stay()


def test_references_the_dead_had_from_a_third_worker_are_dropped(run_workers: Callable[..., list]) -> None:
    run_workers(3, leave_ungracefully_after(outlive_a_holder), **DEATH_OF_WORKER1)


# ---------------------------------------------------------------------------- what the dead had promised

made = threading.Event()


def set_made() -> None:
    made.set()


def make_slowly() -> dict[str, int]:
    assert made.wait(30)
    return make_value()


def value_here(rref: rpc.RRef) -> object:
    return rref.local_value()


def promise() -> None:
    """Runs on worker1 before it dies: worker0 makes values for it, and worker2 has a reference to one.

    The second value depends on a value that never comes.
    """
    rpc.rpc_sync("worker2", keep, (rpc.remote("worker0", make_slowly),))
    kept.append(reference_whose_request_never_comes(3))
    kept.append(rpc.remote("worker0", value_here, (kept[0],)))


def reference_whose_request_never_comes(number: int) -> rpc.RRef:
    """Return a reference like one that worker1 passed on before it died, without having sent its `rpc.remote`."""
    owner, creator, id_of_rref, id_of_fork = 0, 1, 10**6 + number, 2 * 10**6 + number
    return rpc.PyRRef._deserialize((owner, creator, id_of_rref, creator, id_of_fork, creator, "PyObject"))


def count_keys(rref: rpc.RRef) -> int:
    return len(rref.rpc_sync(timeout=0).keys())


def await_what_worker1_has_promised(rank: int) -> None:
    if rank != 2:
        stay()
        return
    rpc.rpc_sync("worker1", promise)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        comes = pool.submit(kept[0].to_here, timeout=0)
        called, fetched, asked_late = map(reference_whose_request_never_comes, range(3))
        # The first call blocks a thread of the owner, the second does not.
        vain = [pool.submit(count_keys, called)]
        vain_fetch = pool.submit(fetched.to_here, timeout=0)
        eventually(lambda: rpc.rpc_sync("worker0", metric, ("agent.server_active_calls",)) == 6, "all wait at worker0")
        rpc.rpc_async("worker1", die)
        eventually(lambda: rpc.rpc_sync("worker0", is_lost, ("worker1",)), "worker0 has lost worker1")
        vain.append(pool.submit(count_keys, asked_late))
        assert not comes.done()
        rpc.rpc_sync("worker0", set_made)
        assert comes.result(30) == make_value()
        for wait in vain:
            assert "this RRef will never have a value: lost worker 'worker1'" in str(failure_of(wait.result, RRefLost))
        failure = failure_of(vain_fetch.result, RRefLost)
        assert "this RRef will never have a value: lost worker 'worker1'" in str(failure)
        assert failure.cause.startswith("lost worker 'worker1'")
    eventually(lambda: rpc.rpc_sync("worker0", metric, ("agent.server_active_calls",)) == 1, "no other call is open")
    kept.clear()
    # Delete the failure too: its traceback holds the references.
    del comes, vain, vain_fetch, called, fetched, asked_late, wait, failure
    gc.collect()
    for what in ("num_owner_rrefs", "num_forks"):
        eventually(lambda what=what: rpc.rpc_sync("worker0", rref_count, (what,)) == "0", "no reference is left")
    rpc.rpc_sync("worker0", let_go)


def test_waiting_for_a_value_from_a_dead_worker_fails(run_workers: Callable[..., list]) -> None:
    run_workers(3, leave_ungracefully_after(await_what_worker1_has_promised), **DEATH_OF_WORKER1)
