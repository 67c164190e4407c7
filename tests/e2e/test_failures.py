"""Workers that die, fall silent or are cut off; the others, and what is left of them."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import faulthandler
import gc
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import workers
from labs import Fate, VirtualHosts, needs_virtual_hosts
from torch.futures import Future
from workers import agent, eventually

pytestmark = pytest.mark.ucx_only

# heartbeat_limit, in seconds: where its end is awaited, and where it has only to be exceeded.
LIMIT = 3.0
SHORT_LIMIT = 1.0

TCP_ESTABLISHED = "01"  # in /proc/net/tcp

# Arguments of `run_workers`: UCX logs what it notices of a death, too.
DEATH_OF_WORKER1: dict[str, Any] = {"exit_codes": {1: -signal.SIGKILL}, "shutdown": False, "silent": False}

gone = threading.Event()
kept: list[Any] = []
counted: collections.Counter[int] = collections.Counter()


@pytest.fixture(scope="module")
def hosts() -> Iterator[VirtualHosts]:
    needs_virtual_hosts()
    with VirtualHosts(["a", "b", "c"]) as made:
        yield made


@pytest.fixture
def fate(hosts: VirtualHosts) -> Iterator[Fate]:
    with Fate(hosts) as desk:
        yield desk


class leave_ungracefully_after:  # noqa: N801 - used as a function, and pickled
    """The body, and then a shutdown that waits for nobody."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = body

    def __call__(self, *arguments: object) -> None:
        self._body(*arguments)
        rpc.shutdown(graceful=False)


def let_go() -> None:
    gone.set()


def stay() -> None:
    assert gone.wait(60), "not released"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_for(seconds: float) -> None:
    """Stop this process, as Ctrl-Z does, until a child of it lets it go on."""
    me = os.getpid()
    stopped = f"grep -q 'State:.T' /proc/{me}/status"
    wait_and_resume = f"until {stopped}; do sleep 0.02; done; sleep {seconds}; kill -CONT {me}"
    subprocess.run(["sh", "-c", f"({wait_and_resume}) &"], check=True)
    os.kill(me, signal.SIGSTOP)


def hold_the_gil(seconds: float) -> None:
    # A PyDLL keeps it during the call.
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def metric(name: str) -> int:
    return int(agent().get_metrics()[name])


def echo(value: object) -> object:
    return value


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def failure_of(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)


def is_lost(name: str) -> bool:
    try:
        rpc.rpc_sync(name, echo, (1,))
    except RuntimeError as error:
        return f"lost worker '{name}'" in str(error)
    return False


# ------------------------------------------------------------------------------------------ processes that end


def see_a_worker_die(rank: int) -> None:
    if rank == 0:
        rpc.rpc_sync("worker1", echo, (1,))
        pending = [rpc.rpc_async("worker1", sleep, (60,)) for _ in range(10)]
        start = time.monotonic()
        rpc.rpc_async("worker1", die)
        for call in pending:
            assert re.search(r"lost worker 'worker1' \(rank 1, pid \d+ on .*\)", failure_of(call.wait))
        assert time.monotonic() - start < 1
        start = time.monotonic()
        assert "lost worker 'worker1'" in failure_of(lambda: rpc.rpc_sync("worker1", echo, (1,)))
        assert time.monotonic() - start < 0.5
        assert rpc.rpc_sync("worker2", echo, (2,)) == 2
        rpc.rpc_sync("worker2", let_go)
    else:
        stay()


def test_calls_to_a_killed_process_fail_within_a_second(run_workers: Callable[..., list]) -> None:
    run_workers(3, leave_ungracefully_after(see_a_worker_die), **DEATH_OF_WORKER1)


def test_calls_to_a_killed_process_of_another_host_fail_within_a_second(hosts: VirtualHosts) -> None:
    workers.run_workers(3, leave_ungracefully_after(see_a_worker_die), hosts=hosts, **DEATH_OF_WORKER1)


def outlive_owners_to_be(rank: int) -> None:
    if rank == 0:
        created = [rpc.remote("worker1", sleep, (60,)) for _ in range(5)]
        forwarded = rpc.rpc_async("worker2", fetch, (created[0],))
        rpc.rpc_async("worker1", die)
        for rref in created:
            assert "lost worker 'worker1'" in failure_of(rref.to_here)
        assert "lost worker 'worker1'" in failure_of(forwarded.wait)
        assert rpc.rpc_sync("worker2", echo, (2,)) == 2
        rpc.rpc_sync("worker2", let_go)
    else:
        stay()


def fetch(rref: rpc.RRef) -> object:
    return rref.to_here()


def test_a_worker_outlives_the_owners_of_rrefs_that_were_being_made(run_workers: Callable[..., list]) -> None:
    run_workers(3, leave_ungracefully_after(outlive_owners_to_be), **DEATH_OF_WORKER1)


def die_while_writing(to: str, directory: Path) -> None:
    """Send what cannot be read to its end: the kernel kills this process in the middle of a copy into shared memory."""
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
        assert "lost worker 'worker1'" in failure_of(dying.wait)
        for number in range(1000):
            assert rpc.rpc_sync("worker2", echo, (number,)) == number
        big = torch.arange(1 << 20)
        assert torch.equal(rpc.rpc_sync("worker2", echo, (big,)), big)
        rpc.rpc_sync("worker2", let_go)
    else:
        stay()


def test_a_worker_killed_while_it_writes_here_keeps_nobody_else_from_it(
    run_workers: Callable[..., list], tmp_path: Path
) -> None:
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


def test_workers_of_a_host_use_shared_memory_and_still_notice_a_death() -> None:
    workers.run_workers(3, leave_ungracefully_after(keep_shared_memory), **DEATH_OF_WORKER1)


# -------------------------------------------------------------------------------------- what the dead held


def make_value() -> dict[str, int]:
    return {"a": 1}


def keep(rref: object) -> None:
    kept.append(rref)


def drop_kept() -> None:
    kept.clear()


def hold_all_sorts_of_things() -> None:
    """Runs on worker1, before it dies: holds references of worker0's objects, an autograd context there, its window."""
    kept.append(rpc.remote("worker0", make_value))
    kept[0].to_here()
    # A reference of a third worker's: it must outlive its creator.
    rpc.rpc_sync("worker2", keep, (kept[0],))
    kept.append(rpc.remote("worker2", make_value))
    with dist_autograd.context():
        rpc.rpc_sync("worker0", torch.add, (torch.ones(2, requires_grad=True), 1))
        # More than worker0 takes in at a time, so that some are being received and others wait.
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
        eventually(lambda: int(dist_autograd._get_debug_info()["num_autograd_contexts"]) == 0, "its context is closed")
        # worker2 got a reference of its from worker1.
        assert rref_count("num_owner_rrefs") == "1"
        rpc.rpc_sync("worker2", drop_kept)
        eventually(lambda: rref_count("num_owner_rrefs") == "0", "the value that only the dead held is freed")
        rpc.rpc_sync("worker2", let_go)
    else:
        stay()
        eventually(lambda: rref_count("num_owner_rrefs") == "0", "the value that only the dead held is freed")


def rref_count(name: str) -> str:
    return rpc._rref_context_get_debug_info()[name]


def test_what_a_dead_worker_held_is_released(run_workers: Callable[..., list]) -> None:
    run_workers(
        3,
        leave_ungracefully_after(outlive_worker1),
        options={"receive_window_bytes": 16 * 2**20},
        **DEATH_OF_WORKER1,
    )


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
    """Runs on worker1, before it dies: worker0 makes values for it, and worker2 has a reference to one.

    The other one is made of a value that never comes.
    """
    rpc.rpc_sync("worker2", keep, (rpc.remote("worker0", make_slowly),))
    kept.append(reference_whose_request_never_comes(3))
    kept.append(rpc.remote("worker0", value_here, (kept[0],)))


def reference_whose_request_never_comes(number: int) -> rpc.RRef:
    """As worker1 passes it on, when it dies before its `rpc.remote` is out."""
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
        # The first keeps a thread of the owner's waiting, the second none.
        vain = [pool.submit(count_keys, called), pool.submit(fetched.to_here, timeout=0)]
        eventually(lambda: rpc.rpc_sync("worker0", metric, ("agent.server_active_calls",)) == 6, "all wait at worker0")
        rpc.rpc_async("worker1", die)
        eventually(lambda: rpc.rpc_sync("worker0", is_lost, ("worker1",)), "worker0 has lost worker1")
        vain.append(pool.submit(count_keys, asked_late))
        assert not comes.done()
        rpc.rpc_sync("worker0", set_made)
        assert comes.result(30) == make_value()
        for wait in vain:
            assert re.search(r"this RRef will never have a value: lost worker 'worker1'", failure_of(wait.result))
    eventually(lambda: rpc.rpc_sync("worker0", metric, ("agent.server_active_calls",)) == 1, "no other call is open")
    kept.clear()
    del comes, vain, called, fetched, asked_late, wait
    gc.collect()
    for what in ("num_owner_rrefs", "num_forks"):
        eventually(lambda what=what: rpc.rpc_sync("worker0", rref_count, (what,)) == "0", "no reference is left")
    rpc.rpc_sync("worker0", let_go)


def test_nobody_waits_for_a_value_that_a_dead_worker_was_to_make(run_workers: Callable[..., list]) -> None:
    run_workers(3, leave_ungracefully_after(await_what_worker1_has_promised), **DEATH_OF_WORKER1)


# ------------------------------------------------------------------------------ silence, between hosts


def see_silence(rank: int, fate: Fate, what: str) -> None:
    if rank == 0:
        for peer in ("worker1", "worker2"):
            rpc.rpc_sync(peer, echo, (1,))
        slowest = start = time.monotonic()
        pending = rpc.rpc_async("worker1", sleep, (60,))
        if what == "stop":
            rpc.rpc_async("worker1", stop_for, (60,))
        else:
            fate.of("b", what)
        slowest = 0.0
        while not pending.done():
            before = time.monotonic()
            assert before - start < 2 * LIMIT, "nobody noticed"
            # The others notice nothing.
            assert rpc.rpc_sync("worker2", echo, (2,)) == 2
            slowest = max(slowest, time.monotonic() - before)
        took = time.monotonic() - start
        text = failure_of(pending.wait)
        assert re.search(r"lost worker 'worker1' \(rank 1, .* on b\).*no sign of life for \d+\.\d s", text), text
        assert LIMIT <= took <= 1.05 * LIMIT + 1, took
        assert slowest < 0.5
        rpc.rpc_sync("worker2", let_go)
    else:
        stay()


@pytest.mark.parametrize("what", ["cut", "power_off", "stop"])
def test_a_silent_host_is_lost_after_the_limit(what: str) -> None:
    needs_virtual_hosts()
    with VirtualHosts(["a", "b", "c"]) as hosts, Fate(hosts) as fate:
        workers.run_workers(
            3,
            leave_ungracefully_after(see_silence),
            fate,
            what,
            hosts=hosts,
            options={"heartbeat_limit": LIMIT},
            expendable={1},
            shutdown=False,
            silent=False,
        )


def count(number: int, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    counted[number] += 1
    return number, tensor + 1


def counts() -> dict[int, int]:
    return dict(counted)


def call_through_a_cut(rank: int, fate: Fate) -> None:
    if rank == 0:
        rpc.rpc_sync("worker1", echo, (1,))
        sizes = [10, 2**10, 2**18, 2**22]

        def send(numbers: range) -> list[Future]:
            return [rpc.rpc_async("worker1", count, (n, torch.full((sizes[n % 4],), float(n)))) for n in numbers]

        calls = send(range(20))
        fate.of("b", "cut")
        calls += send(range(20, 40))
        time.sleep(LIMIT / 2)
        fate.of("b", "heal")
        calls += send(range(40, 48))
        for n, call in enumerate(calls):
            number, tensor = call.wait()
            assert number == n
            assert tensor.eq(n + 1).all()
        assert rpc.rpc_sync("worker1", counts) == dict.fromkeys(range(48), 1)


def test_a_cut_of_half_the_limit_loses_nothing(hosts: VirtualHosts, fate: Fate) -> None:
    workers.run_workers(2, call_through_a_cut, fate, hosts=hosts, options={"heartbeat_limit": LIMIT})


def call_over_a_slow_network(rank: int) -> None:
    if rank == 0:
        assert rpc.rpc_sync("worker1", echo, (1,)) == 1
        tensor = torch.arange(2**24, dtype=torch.int32)
        large = rpc.rpc_async("worker1", echo, (tensor,))
        small = 0
        while not large.done():
            assert rpc.rpc_sync("worker1", echo, (small,)) == small
            small += 1
        assert torch.equal(large.wait(), tensor)
        # Were they to wait for the tensor, there would be one on its way there and one on its way back.
        assert small > 4, small


def test_a_tensor_that_takes_longer_than_the_limit_keeps_nothing_waiting(hosts: VirtualHosts) -> None:
    with hosts[1].slowed_down(megabits=200):  # 64 MiB take 2.7 s, each way
        workers.run_workers(2, call_over_a_slow_network, hosts=hosts, options={"heartbeat_limit": SHORT_LIMIT})


def connections(*, blocked: bool) -> set[tuple[str, str]]:
    """TCP connections of this host; those that hold bytes which the other side has not acknowledged, or all."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {(row[1], row[2]) for row in rows if row[3] == TCP_ESTABLISHED and (int(row[4][:8], 16) or not blocked)}


def lose_each_other(rank: int, fate: Fate) -> None:
    other = f"worker{1 - rank}"
    assert rpc.rpc_sync(other, echo, (1,)) == 1
    calls = []

    def send(number: int) -> None:
        # Of a size that is sent without asking.
        calls.extend(rpc.rpc_async(other, echo, (bytes(50_000),)) for _ in range(number))

    def is_lost_under_load() -> bool:
        send(400)  # more than sockets hold
        return is_lost(other)

    send(200)
    if rank == 0:
        fate.of("b", "cut")
    eventually(is_lost_under_load, "the cut")  # of which worker1 knows nothing
    waiting = connections(blocked=True)
    assert waiting, "nothing was under way"
    if rank == 0:
        time.sleep(SHORT_LIMIT)  # worker1 notices too
        fate.of("b", "heal")
    eventually(lambda: not waiting & connections(blocked=False), "what connected them is closed", 30)
    assert rpc.rpc_sync(f"worker{rank}", echo, (2,)) == 2


def test_workers_that_have_lost_each_other_live_on_when_the_cut_ends(hosts: VirtualHosts, fate: Fate) -> None:
    body = leave_ungracefully_after(lose_each_other)
    options = {"heartbeat_limit": SHORT_LIMIT}
    workers.run_workers(2, body, fate, hosts=hosts, options=options, shutdown=False, silent=False)


def call_a_busy_worker(rank: int) -> None:
    if rank == 0:
        rpc.rpc_sync("worker1", echo, (1,))
        busy = [rpc.rpc_async("worker1", hold_the_gil, (2.5 * SHORT_LIMIT,)) for _ in range(2)]
        # More than there are threads, and each in need of the GIL.
        calls = [rpc.rpc_async("worker1", echo, (n,)) for n in range(40)]
        for call in busy:
            call.wait()
        assert [call.wait() for call in calls] == list(range(40))


def test_a_worker_that_holds_the_gil_for_longer_than_the_limit_is_not_lost(hosts: VirtualHosts) -> None:
    options = {"heartbeat_limit": SHORT_LIMIT, "num_worker_threads": 4}
    workers.run_workers(2, call_a_busy_worker, hosts=hosts, options=options)


def call_a_stopped_worker(rank: int) -> None:
    if rank == 0:
        rpc.rpc_sync("worker1", echo, (1,))
        rpc.rpc_async("worker1", stop_for, (2.5 * SHORT_LIMIT,))
        assert rpc.rpc_sync("worker1", echo, (2,)) == 2


def test_a_stopped_worker_of_the_same_host_is_not_lost(run_workers: Callable[..., list]) -> None:
    run_workers(2, call_a_stopped_worker, options={"heartbeat_limit": SHORT_LIMIT})


def stop_for_longer_than_the_limit(rank: int) -> None:
    if rank == 0:
        rpc.rpc_sync("worker1", echo, (1,))
        # Who was stopped itself has heard nobody, and must not blame the others.
        stop_for(SHORT_LIMIT / 2)
        assert rpc.rpc_sync("worker1", echo, (2,)) == 2


def test_who_was_stopped_does_not_take_the_others_for_dead(hosts: VirtualHosts) -> None:
    workers.run_workers(2, stop_for_longer_than_the_limit, hosts=hosts, options={"heartbeat_limit": SHORT_LIMIT})


# ------------------------------------------------------------------------------------------------ shutdown


def shut_down_without_worker1(rank: int, fate: Fate | None) -> float:
    if rank == 1:
        if fate is not None:
            fate.of("b", "power_off")
        die()
    start = time.monotonic()
    text = failure_of(rpc.shutdown)
    assert "lost worker 'worker1'" in text, text
    return time.monotonic() - start


def test_a_graceful_shutdown_with_a_dead_worker_ends_with_an_error(run_workers: Callable[..., list]) -> None:
    took = run_workers(3, shut_down_without_worker1, None, **DEATH_OF_WORKER1)
    assert max(took[0], took[2]) < 3, "the agent's own end takes up to two seconds where handlers or sends hang"


def test_a_graceful_shutdown_notices_a_dead_host_that_nobody_has_called() -> None:
    needs_virtual_hosts()
    with VirtualHosts(["a", "b", "c"]) as hosts, Fate(hosts) as fate:
        options = {"heartbeat_limit": SHORT_LIMIT}
        arguments = {"options": options, "expendable": {1}, "shutdown": False, "silent": False}
        took = workers.run_workers(3, shut_down_without_worker1, fate, hosts=hosts, **arguments)
        assert max(took[0], took[2]) < SHORT_LIMIT + 4


def shut_down_with_a_hung_worker(rank: int) -> float:
    if rank == 1:
        time.sleep(4)
        return 0.0
    start = time.monotonic()
    with contextlib.suppress(RuntimeError):
        rpc.shutdown(timeout=1)
        return 0.0
    return time.monotonic() - start


def test_a_graceful_shutdown_with_a_hung_worker_ends_within_its_timeout(run_workers: Callable[..., list]) -> None:
    took = run_workers(2, shut_down_with_a_hung_worker, shutdown=False, silent=False)
    assert 1 <= took[0] < 3.5
