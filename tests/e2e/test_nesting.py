"""Calls that handlers make and wait for, nested deeper than there are threads."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed.rpc as rpc
from torch.autograd import profiler_legacy

from tests.support.workers import Stalls, agent, eventually, in_worker0, over_shared_memory
from torch_ucx_rpc.errors import OutOfResources

pytestmark = [pytest.mark.ucx_only, over_shared_memory]

THREADS = {"num_worker_threads": 4}


def bounce(way: str, depth: int, here: str, there: str) -> int:
    """Call back and forth between two workers, and return the number of calls."""
    return 0 if depth == 0 else 1 + WAYS[way](there, (way, depth - 1, there, here))


WAYS: dict[str, Callable[..., int]] = {
    "rpc_sync": lambda to, arguments: rpc.rpc_sync(to, bounce, arguments),
    "future": lambda to, arguments: rpc.rpc_async(to, bounce, arguments).wait(),
    "to_here": lambda to, arguments: rpc.remote(to, bounce, arguments).to_here(),
}


@in_worker0(of=2, options=THREADS)
def test_a_chain_of_calls_may_be_longer_than_there_are_threads() -> None:
    for way in WAYS:
        assert rpc.rpc_sync("worker1", bounce, (way, 200, "worker1", "worker0")) == 200, way


# torch's older profiler runs each profiled request on its own thread.
@in_worker0(of=2, options={"num_worker_threads": 1})
def test_chain_of_profiled_calls_may_exceed_the_threads() -> None:
    with profiler_legacy.profile():
        assert rpc.rpc_sync("worker1", bounce, ("rpc_sync", 6, "worker1", "worker0"), timeout=20) == 6


def threads() -> int:
    return int(agent().get_metrics()["agent.num_threads"])


_gate = threading.Event()
_at_gate: list[int] = []


def stop_at_gate() -> None:
    _at_gate.append(threading.get_ident())
    assert _gate.wait(60)


@in_worker0(of=2, options=THREADS)
def test_threads_are_added_only_for_calls_that_wait() -> None:
    blocked = [rpc.rpc_async("worker0", stop_at_gate) for _ in range(20)]
    eventually(lambda: len(_at_gate) == 4, "as many run as there are threads for them")
    time.sleep(0.5)
    assert threads() <= 2 * 4 + 3
    assert len(_at_gate) == 4
    _gate.set()
    for call in blocked:
        call.wait()
    rpc.rpc_sync("worker1", bounce, ("rpc_sync", 40, "worker1", "worker0"))
    # Beside the usual threads, 20 threads wait here.
    assert 20 <= threads() <= 20 + 2 * 4 + 3


@in_worker0(of=2, options={**THREADS, "max_worker_threads": 32}, silent=False)
def test_a_chain_that_exceeds_the_limit_fails_saying_so() -> None:
    what = r"worker 'worker\d' has no thread left for this call: all 32 calls .* raise max_worker_threads"
    with Stalls() as stalls:
        began = time.monotonic()
        with pytest.raises(OutOfResources, match=what):
            rpc.rpc_sync("worker1", bounce, ("rpc_sync", 100, "worker1", "worker0"))
    assert 1 <= time.monotonic() - began < 10 + stalls.seconds()
    # All threads are free again.
    assert rpc.rpc_sync("worker1", bounce, ("rpc_sync", 60, "worker1", "worker0")) == 60


def call_in_a_loop() -> None:
    sent = []
    for _ in range(20):
        tensor = torch.ones(100)
        sent.append(weakref.ref(tensor))
        rpc.rpc_sync("worker0", torch.add, args=(tensor, 1))
    del tensor
    eventually(lambda: not any(tensor() is not None for tensor in sent), "the tensors that were sent are free")


@in_worker0(of=2)
def test_a_handler_keeps_nothing_of_the_calls_that_it_has_made() -> None:
    rpc.rpc_sync("worker1", call_in_a_loop)
