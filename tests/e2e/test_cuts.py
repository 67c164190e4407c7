"""Network cuts longer than heartbeat_limit delay calls, but lose none."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.futures import Future

import torch_ucx_rpc
from tests.support import workers
from tests.support.labs import Fate, VirtualHosts
from tests.support.workers import Stalls, eventually
from torch_ucx_rpc.errors import WorkerLost

from ._failures import echo, failure_of, leave_ungracefully_after, sleep, stay

pytestmark = pytest.mark.ucx_only

LIMIT = 1.0
LARGE = 4 << 20  # elements: 16 MiB
# The limit for the first answer after a cut or a reset.
SOON_S = 2.0

executed: collections.Counter[str] = collections.Counter()


def count(name: str, tensor: torch.Tensor) -> torch.Tensor:
    executed[name] += 1
    return tensor + 1


def executions() -> dict[str, int]:
    return dict(executed)


def send(to: str, name: str, number: int) -> list[tuple[Future, torch.Tensor]]:
    """Begin calls of all sizes; return each with its expected answer."""
    tensors = [torch.full((LARGE if each % 4 == 0 else 10 ** (each % 4),), float(each)) for each in range(number)]
    calls = [rpc.rpc_async(to, count, (f"{name} {each}", tensor)) for each, tensor in enumerate(tensors)]
    return [(call, tensor + 1) for call, tensor in zip(calls, tensors, strict=True)]


def check(calls: list[tuple[Future, torch.Tensor]]) -> int:
    for call, answer in calls:
        assert torch.equal(call.wait(), answer)
    return len(calls)


def call_back_for(seconds: float) -> int:
    """Runs on worker1: it calls worker0 before, during and after the cut."""
    end = time.monotonic() + seconds
    calls = []
    while time.monotonic() < end:
        calls += send("worker0", f"back {len(calls)}", 4)
        time.sleep(seconds / 8)
    return check(calls)


def state_of_worker1() -> str:
    return torch_ucx_rpc.statistics().peers[1].state


@contextlib.contextmanager
def losing_nothing(seconds: float) -> Iterator[None]:
    """Connections may break during the block. worker1 calls back for ``seconds``. Each call must run once, and an RRef
    must stay."""
    lost = []
    torch_ucx_rpc.on_lost(lambda worker, reason: lost.append(reason))
    rref = rpc.remote("worker1", echo, (torch.arange(3.0),))
    assert rref.to_here().sum() == 3
    back = rpc.rpc_async("worker1", call_back_for, (seconds,))
    yield
    assert rref.rpc_sync().sum() == 3
    assert back.wait() > 0
    assert set(rpc.rpc_sync("worker1", executions).values()) == {1}, "a call was executed twice"
    assert set(executions().values()) == {1}
    assert state_of_worker1() == "present"
    assert lost == []


def work_through_a_cut(rank: int, fate: Fate, seconds: float) -> None:
    if rank == 1:
        return
    with losing_nothing(seconds + 1), dist_autograd.context() as context, Stalls() as stalls:
        parameter = torch.ones(3, requires_grad=True)
        loss = rpc.rpc_sync("worker1", count, ("forward", parameter)).sum()
        calls = send("worker1", "before", 8)
        fate.of("b", "cut_for", seconds)
        healed = time.monotonic() + seconds
        calls += send("worker1", "in the cut", 8)
        first = rpc.rpc_async("worker1", echo, (1,))
        made = rpc.remote("worker1", sleep, (0,))
        backward = threading.Thread(target=dist_autograd.backward, args=(context, [loss]))
        backward.start()
        eventually(lambda: state_of_worker1() == "resuming", "the silence is seen")
        assert time.monotonic() < healed
        while not first.done():
            time.sleep(0.01)
        answered = time.monotonic()
        assert answered > healed - 0.5, "the cable was not cut"
        assert answered < healed + SOON_S + stalls.seconds()
        assert check(calls) == 16
        made.to_here()
        backward.join()
        assert torch.equal(dist_autograd.get_gradients(context)[parameter], torch.ones(3))
    assert torch_ucx_rpc.statistics().peers[1].times_resumed == 1


def test_a_cut_longer_than_heartbeat_limit_loses_no_call(hosts: VirtualHosts, fate: Fate) -> None:
    options = {"heartbeat_limit": LIMIT}
    workers.run_workers(2, work_through_a_cut, fate, 4 * LIMIT, hosts=hosts, options=options)


@pytest.mark.field
def test_a_cut_of_30_s_loses_no_call_with_default_options(hosts: VirtualHosts, fate: Fate) -> None:
    workers.run_workers(2, work_through_a_cut, fate, 30.0, hosts=hosts, timeout=120)


def work_through_resets(rank: int, fate: Fate, resets: int) -> None:
    if rank == 1:
        return
    calls = []
    with losing_nothing(2 * resets):
        for reset in range(resets):
            for part in range(4):
                calls += send("worker1", f"{reset} {part}", 8)
                time.sleep(0.05)
                fate.of("b", "reset_connections")
            began = time.monotonic()
            with Stalls() as stalls:
                assert rpc.rpc_sync("worker1", echo, (reset,)) == reset
                assert time.monotonic() - began < SOON_S + stalls.seconds()
        assert check(calls) == 32 * resets
    assert torch_ucx_rpc.statistics().peers[1].times_resumed >= 1


def test_resets_of_connections_lose_no_call(hosts: VirtualHosts, fate: Fate) -> None:
    workers.run_workers(2, work_through_resets, fate, 3, hosts=hosts)


def lose_after_both_limits(rank: int, fate: Fate) -> None:
    if rank == 0:
        rpc.rpc_sync("worker1", echo, (1,))
        fate.of("b", "cut")
        began = time.monotonic()
        error = failure_of(lambda: rpc.rpc_sync("worker1", echo, (2,)), WorkerLost)
        took = time.monotonic() - began
        assert took > 3 * LIMIT
        assert "heartbeat_limit is 1.0 s and reconnect_limit 2.0 s" in str(error)
    else:
        stay()


def test_a_cut_beyond_reconnect_limit_loses_the_worker(hosts: VirtualHosts, fate: Fate) -> None:
    body = leave_ungracefully_after(lose_after_both_limits)
    options = {"heartbeat_limit": LIMIT, "reconnect_limit": 2.0}
    arguments = {"options": options, "expendable": {1}, "shutdown": False, "silent": False}
    workers.run_workers(2, body, fate, hosts=hosts, **arguments)
