"""The agent's metrics and debug information, and its limits on threads and memory."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed.rpc as rpc

from tests.support import workers
from tests.support.workers import agent, eventually, in_every_worker, in_worker0

pytestmark = pytest.mark.ucx_only

MIB = 1 << 20

METRICS = {
    "agent.bytes_received",
    "agent.bytes_sent",
    "agent.calls_received",
    "agent.calls_sent",
    "agent.calls_timed_out",
    "agent.client_active_calls",
    "agent.num_idle_threads",
    "agent.num_worker_threads",
    "agent.server_active_async_calls",
    "agent.server_active_calls",
    "agent.thread_pool_size",
    "pool.cached_bytes",
    "pool.hits",
    "pool.in_use_bytes",
    "pool.misses",
    "window.in_use_bytes",
    "window.limit_bytes",
    "window.waiting_messages",
}


def metric(name: str) -> int:
    return int(agent().get_metrics()[name])


def metric_of(worker: str, name: str) -> int:
    return rpc.rpc_sync(worker, metric, args=(name,))


def discard(*_: object) -> None:
    pass


def tensor_of(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


@in_worker0(of=2)
def test_all_metrics_are_there_and_debug_info_has_them_too() -> None:
    metrics, info = agent().get_metrics(), agent().get_debug_info()
    assert set(metrics) >= METRICS
    assert set(info) >= METRICS
    assert all(isinstance(value, str) for value in (*metrics.values(), *info.values()))
    assert all(float(metrics[name]) >= 0 for name in METRICS)
    assert info["ucx.version"].count(".") == 2
    assert "libucp" in info["ucx.path"]
    # torch asks in this way.
    assert set(info) <= set(rpc._get_debug_info())


@in_worker0(of=3)
def test_lanes_of_called_peers_are_known_and_right() -> None:
    assert not [key for key in agent().get_debug_info() if key.startswith("lanes.")]
    rpc.rpc_sync("worker1", discard, args=(tensor_of(4 * MIB),))
    info = agent().get_debug_info()
    assert [key for key in info if key.startswith("lanes.")] == ["lanes.worker1"]
    if os.environ.get("UCX_TLS") == "tcp,self":
        assert all(lane.startswith("tcp/") for lane in info["lanes.worker1"].split(","))
    else:
        # By default, UCX's endpoints that report errors do not use shared memory. The agent must ask for it.
        assert {lane.split("/")[0] for lane in info["lanes.worker1"].split(",")} & {"sysv", "posix"}


@in_worker0(of=2)
def test_calls_and_bytes_are_counted_on_both_sides() -> None:
    received_before = metric_of("worker1", "agent.calls_received"), metric_of("worker1", "agent.bytes_received")
    sent_before = metric("agent.calls_sent"), metric("agent.bytes_sent")
    for _ in range(10):
        rpc.rpc_sync("worker1", discard, args=(tensor_of(MIB),))
    calls, nbytes = metric("agent.calls_sent") - sent_before[0], metric("agent.bytes_sent") - sent_before[1]
    assert calls == 10
    assert 10 * MIB <= nbytes < 11 * MIB
    # Each question is itself a call.
    assert 10 <= metric_of("worker1", "agent.calls_received") - received_before[0] <= 14
    assert nbytes <= metric_of("worker1", "agent.bytes_received") - received_before[1] < 11 * MIB


_entered = threading.Semaphore(0)
_released = threading.Event()


def wait_for_release(*_: object) -> None:
    _entered.release()
    assert _released.wait(60)


def wait_until_entered(n: int) -> None:
    for _ in range(n):
        assert _entered.acquire(timeout=60)


def release() -> None:
    _released.set()


@in_worker0(of=2)
def test_active_calls_are_the_unanswered_ones() -> None:
    futures = [rpc.rpc_async("worker1", wait_for_release) for _ in range(5)]
    rpc.rpc_sync("worker1", wait_until_entered, args=(5,))
    assert metric("agent.client_active_calls") == 5
    # The question is the sixth call. The previous call may be answered but not over yet.
    eventually(lambda: metric_of("worker1", "agent.server_active_calls") == 6, "five calls are active")
    rpc.rpc_sync("worker1", release)
    torch.futures.wait_all(futures)
    assert metric("agent.client_active_calls") == 0
    eventually(lambda: metric_of("worker1", "agent.server_active_calls") <= 1, "worker1 is at rest")


_six = threading.Barrier(6)


def meet() -> None:
    _six.wait(60)


@in_worker0(of=2, options={"num_worker_threads": 6})
def test_as_many_handlers_run_at_a_time_as_there_are_threads() -> None:
    # No handler returns before all have begun.
    torch.futures.wait_all([rpc.rpc_async("worker1", meet) for _ in range(6)])


# ---- The receive window ----------------------------------------------------------------------------------------------


def window_in_use(*_: object) -> int:
    return metric("window.in_use_bytes")


def window_at_rest() -> bool:
    # The question itself does not count.
    return metric("window.in_use_bytes") == 0 and metric("window.waiting_messages") == 0


@in_worker0(of=3, options={"receive_window_bytes": 8 * MIB})
def test_the_window_bounds_received_large_tensors() -> None:
    assert metric_of("worker1", "window.limit_bytes") == 8 * MIB
    futures = [rpc.rpc_async("worker1", window_in_use, args=(tensor_of(3 * MIB),)) for _ in range(60)]
    assert max(future.wait() for future in futures) <= 8 * MIB
    # A message larger than the window arrives alone, and small calls overtake it.
    futures = [rpc.rpc_async("worker1", window_in_use, args=(tensor_of(20 * MIB),)) for _ in range(4)]
    futures += [rpc.rpc_async("worker1", window_in_use) for _ in range(50)]
    assert max(future.wait() for future in futures) <= 21 * MIB
    eventually(lambda: rpc.rpc_sync("worker1", window_at_rest), "nothing is left in the window")


def bounce(peers: list[str], tensor: torch.Tensor) -> int:
    return 1 + (rpc.rpc_sync(peers[0], bounce, args=(peers[1:], tensor + 1)) if peers else 0)


@in_every_worker(of=3, options={"receive_window_bytes": 4 * MIB})
def test_handlers_that_send_on_do_not_stall_the_window(rank: int) -> None:
    # Each handler holds 3 of the 4 MiB while it waits for others that need as much.
    ways = [[f"worker{(rank + i) % 3}" for i in range(1, hops)] for hops in (2, 3, 4)]
    futures = [rpc.rpc_async(way[0], bounce, args=(way[1:], tensor_of(3 * MIB))) for way in ways for _ in range(2)]
    assert [future.wait() for future in futures] == [len(way) for way in ways for _ in range(2)]


_kept: list[torch.Tensor] = []


def keep(tensor: torch.Tensor) -> None:
    _kept.append(tensor)


def kept_bytes() -> int:
    return sum(tensor.nbytes for tensor in _kept)


def drop_kept() -> None:
    _kept.clear()
    gc.collect()


@in_worker0(of=2, options={"receive_window_bytes": 4 * MIB})
def test_handlers_keeping_tensors_do_not_stall_the_window() -> None:
    torch.futures.wait_all([rpc.rpc_async("worker1", keep, args=(tensor_of(3 * MIB),)) for _ in range(20)])
    assert rpc.rpc_sync("worker1", kept_bytes) == 60 * MIB
    assert metric_of("worker1", "pool.in_use_bytes") >= 60 * MIB
    rpc.rpc_sync("worker1", drop_kept)
    eventually(lambda: metric_of("worker1", "pool.in_use_bytes") < MIB, "worker1's buffers are back")


# ---- The pool of receive buffers -------------------------------------------------------------------------------------


@in_worker0(of=2, options={"host_pool_bytes": 16 * MIB})
def test_buffers_are_reused_and_kept_within_the_limit() -> None:
    for _ in range(10):
        rpc.rpc_sync("worker1", discard, args=(tensor_of(4 * MIB),))
    # Several buffers, since a handler's tensors live a little longer than its call.
    assert metric_of("worker1", "pool.misses") <= 4
    assert metric_of("worker1", "pool.hits") >= 6
    assert metric_of("worker1", "pool.cached_bytes") + metric_of("worker1", "pool.in_use_bytes") >= 4 * MIB
    torch.futures.wait_all([rpc.rpc_async("worker1", keep, args=(tensor_of(4 * MIB),)) for _ in range(20)])
    rpc.rpc_sync("worker1", drop_kept)
    eventually(lambda: metric_of("worker1", "pool.in_use_bytes") < MIB, "worker1's buffers are back")
    assert metric_of("worker1", "pool.cached_bytes") <= 16 * MIB


@in_worker0(of=2, options={"host_pool_bytes": 0})
def test_a_pool_of_size_zero_keeps_no_buffer() -> None:
    for _ in range(5):
        rpc.rpc_sync("worker1", discard, args=(tensor_of(4 * MIB),))
        assert torch.equal(rpc.rpc_sync("worker1", tensor_of, args=(4 * MIB,)), tensor_of(4 * MIB))
    assert metric_of("worker1", "pool.cached_bytes") == 0
    assert metric("pool.cached_bytes") == 0


@in_worker0(of=2)
def test_received_memory_returns_to_the_callers_pool() -> None:
    result = rpc.rpc_sync("worker1", tensor_of, args=(4 * MIB,))
    view = result[:100]
    del result
    gc.collect()
    assert metric("pool.in_use_bytes") >= 4 * MIB
    assert (view == 1).all()
    del view
    gc.collect()
    eventually(lambda: metric("pool.in_use_bytes") < MIB, "the buffer is back")


CPU_ONLY = {"cpu": "cpu"}


def compare_maps(rank: int) -> None:
    # worker0 calls worker1, and worker2 calls worker0.
    maps = {0: {"worker1": CPU_ONLY}, 1: {}, 2: {"worker0": CPU_ONLY}}
    workers.init_rpc(rank, rpc_backend_options=workers.backend_options(device_maps=maps[rank]))
    cpu = torch.device("cpu")
    known = {name: agent()._get_device_map(rpc.get_worker_info(name)) for name in ("worker0", "worker1", "worker2")}
    expected = {name: {cpu: cpu} if name in maps[rank] else {} for name in known}
    rpc.shutdown()
    assert known == expected


def test_agent_keeps_maps_for_calls_and_for_replies_apart(run_workers: Callable[..., list]) -> None:
    run_workers(3, compare_maps, init=False, shutdown=False)
