"""Workers that are silent or cut off: when they count as lost, and when they do not."""

from __future__ import annotations

import collections
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc as rpc
from torch.futures import Future

from tests.support import workers
from tests.support.labs import Fate, VirtualHosts, needs_virtual_hosts
from tests.support.workers import Stalls, Steps, eventually
from torch_ucx_rpc.errors import WorkerLost

from ._failures import LOST_SOON, SHORT_LIMIT, echo, failure_of, is_lost, leave_ungracefully_after, let_go, sleep, stay

pytestmark = pytest.mark.ucx_only

# heartbeat_limit, in seconds, for tests that wait until it has passed.
LIMIT = 3.0

TCP_ESTABLISHED = "01"  # in /proc/net/tcp

counted: collections.Counter[int] = collections.Counter()


def stop_for(seconds: float) -> None:
    """Stop this process as Ctrl-Z does, until its child continues it."""
    me = os.getpid()
    stopped = f"grep -q 'State:.T' /proc/{me}/status"
    wait_and_resume = f"until {stopped}; do sleep 0.02; done; sleep {seconds}; kill -CONT {me}"
    subprocess.run(["sh", "-c", f"({wait_and_resume}) &"], check=True)
    os.kill(me, signal.SIGSTOP)


def hold_the_gil(seconds: float) -> None:
    # A PyDLL keeps the GIL during the call.
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def see_silence(rank: int, fate: Fate, what: str) -> None:
    if rank == 0:
        for peer in ("worker1", "worker2"):
            rpc.rpc_sync(peer, echo, (1,))
        start = time.monotonic()
        pending = rpc.rpc_async("worker1", sleep, (60,))
        if what == "stop":
            rpc.rpc_async("worker1", stop_for, (60,))
        else:
            fate.of("b", what)
        silent_since = time.monotonic()
        slowest = 0.0
        with Stalls() as stalls:
            while not pending.done():
                before = time.monotonic()
                assert before - start < 2 * LIMIT, "no worker noticed"
                # The other workers are not affected.
                assert rpc.rpc_sync("worker2", echo, (2,)) == 2
                slowest = max(slowest, time.monotonic() - before)
        noticed = time.monotonic()
        error = failure_of(pending.wait, WorkerLost)
        assert (error.name, error.rank, error.host) == ("worker1", 1, "b")
        assert re.search(r"no sign of life for \d+\.\d s", str(error.cause)), error
        assert noticed - start >= LIMIT
        assert noticed - silent_since <= 1.05 * LIMIT + 1 + stalls.seconds()
        assert slowest < 0.5 + stalls.seconds()
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
            options={"heartbeat_limit": LIMIT, "reconnect_limit": 0},
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
        tensors = [torch.full((sizes[n % 4],), float(n)) for n in range(48)]

        def send(numbers: range) -> list[Future]:
            return [rpc.rpc_async("worker1", count, (n, tensors[n])) for n in numbers]

        calls = send(range(20))
        fate.of("b", "cut_for", LIMIT / 2)
        calls += send(range(20, 40))
        time.sleep(LIMIT / 2)
        calls += send(range(40, 48))
        for n, call in enumerate(calls):
            number, tensor = call.wait()
            assert number == n
            assert tensor.eq(n + 1).all()
        assert rpc.rpc_sync("worker1", counts) == dict.fromkeys(range(48), 1)


def test_a_cut_of_half_the_limit_loses_nothing(hosts: VirtualHosts, fate: Fate) -> None:
    options = {"heartbeat_limit": LIMIT, "reconnect_limit": 0}
    workers.run_workers(2, call_through_a_cut, fate, hosts=hosts, options=options)


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
        # If small calls waited for the tensor, only two would be answered: one in each direction.
        assert small > 4, small


def test_tensor_slower_than_the_limit_delays_no_small_call(hosts: VirtualHosts) -> None:
    with hosts[1].slowed_down(megabits=200):  # 64 MiB take 2.7 s, each way
        workers.run_workers(2, call_over_a_slow_network, hosts=hosts, options=LOST_SOON)


def connections(*, blocked: bool) -> set[tuple[str, str]]:
    """Return the TCP connections of this host: all, or only those with unacknowledged bytes."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {(row[1], row[2]) for row in rows if row[3] == TCP_ESTABLISHED and (int(row[4][:8], 16) or not blocked)}


def lose_each_other(rank: int, fate: Fate, steps: Steps) -> None:
    other = f"worker{1 - rank}"
    assert rpc.rpc_sync(other, echo, (1,)) == 1
    calls = []

    def send(number: int) -> None:
        # UCX sends this size without asking the receiver.
        calls.extend(rpc.rpc_async(other, echo, (bytes(50_000),)) for _ in range(number))

    def is_lost_under_load() -> bool:
        send(400)  # more than sockets hold
        return is_lost(other)

    send(200)
    if rank == 0:
        fate.of("b", "cut")
    eventually(is_lost_under_load, "the cut")  # both workers send until they notice it
    waiting = connections(blocked=True)
    assert waiting, "nothing was under way"
    steps.meet("lost", rank, of=2)
    if rank == 0:
        assert waiting & connections(blocked=True), "closed while there was more to write"
        fate.of("b", "heal")
    eventually(lambda: not waiting & connections(blocked=False), "what connected them is closed", 30)
    assert is_lost(other)
    assert rpc.rpc_sync(f"worker{rank}", echo, (2,)) == 2


def test_workers_that_lost_each_other_survive_the_cuts_end(hosts: VirtualHosts, fate: Fate, tmp_path: Path) -> None:
    body = leave_ungracefully_after(lose_each_other)
    workers.run_workers(2, body, fate, Steps(tmp_path), hosts=hosts, options=LOST_SOON, shutdown=False, silent=False)


def call_a_busy_worker(rank: int) -> None:
    if rank == 0:
        rpc.rpc_sync("worker1", echo, (1,))
        busy = [rpc.rpc_async("worker1", hold_the_gil, (2.5 * SHORT_LIMIT,)) for _ in range(2)]
        # There are more calls than threads, and each call needs the GIL.
        calls = [rpc.rpc_async("worker1", echo, (n,)) for n in range(40)]
        for call in busy:
            call.wait()
        assert [call.wait() for call in calls] == list(range(40))


def test_worker_holding_the_gil_beyond_the_limit_is_not_lost(hosts: VirtualHosts) -> None:
    options = {**LOST_SOON, "num_worker_threads": 4}
    workers.run_workers(2, call_a_busy_worker, hosts=hosts, options=options)


def call_a_stopped_worker(rank: int) -> None:
    if rank == 1:
        stay()  # it writes no message when it is stopped, which would make worker0 warn
        return
    with workers.stopped(rpc.rpc_sync("worker1", os.getpid)):
        call = rpc.rpc_async("worker1", echo, (1,))
        time.sleep(2.5 * SHORT_LIMIT)
        assert not call.done()
    assert call.wait() == 1
    rpc.rpc_sync("worker1", let_go)


def test_a_stopped_worker_of_the_same_host_is_not_lost(run_workers: Callable[..., list]) -> None:
    run_workers(2, call_a_stopped_worker, options=LOST_SOON)


def be_stopped_for_longer_than_the_own_limit(rank: int) -> None:
    # worker1 has a longer limit, or it would lose the stopped worker.
    limit = SHORT_LIMIT if rank == 0 else 60.0
    workers.init_rpc(rank, rpc_backend_options=workers.backend_options(heartbeat_limit=limit, reconnect_limit=0))
    if rank == 0:
        rpc.rpc_sync("worker1", echo, (1,))
        pending = rpc.rpc_async("worker1", sleep, (4 * SHORT_LIMIT,))
        stopped_at = time.monotonic()
        stop_for(2.5 * SHORT_LIMIT)
        assert time.monotonic() - stopped_at > 2 * SHORT_LIMIT
        assert rpc.rpc_sync("worker1", echo, (2,)) == 2
        pending.wait()
    rpc.shutdown()


def test_worker_stopped_beyond_the_limit_loses_no_peer(hosts: VirtualHosts) -> None:
    workers.run_workers(2, be_stopped_for_longer_than_the_own_limit, hosts=hosts, init=False, shutdown=False)
