"""``torch_ucx_rpc.statistics()``, and its readers: Prometheus, and observers of a running job."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import socket
import threading
import urllib.error
import urllib.request

import pytest
import torch
import torch.distributed.rpc as rpc
from prometheus_client.parser import text_string_to_metric_families

from tests.support.workers import backend_options, eventually, in_every_worker, in_worker0, init_rpc
from torch_ucx_rpc.errors import CallTimedOut, JoinFailed, NotRunning

pytestmark = pytest.mark.ucx_only

MIB = 1 << 20


def statistics():
    import torch_ucx_rpc

    return torch_ucx_rpc.statistics()


def peer(name: str):
    [found] = [peer for peer in statistics().peers if peer.name == name]
    return found


def discard(*_: object) -> None:
    pass


def fail() -> None:
    raise KeyError("on purpose")


# ---- The snapshot ----------------------------------------------------------------------------------------------------


@in_worker0(of=3)
def test_calls_bytes_lanes_and_latencies_are_counted_by_peer() -> None:
    assert [p.name for p in statistics().peers] == ["worker0", "worker1", "worker2"]
    assert peer("worker1").lanes == ()
    tensor = torch.ones(MIB, dtype=torch.uint8)
    for _ in range(10):
        rpc.rpc_sync("worker1", discard, args=(tensor,))
    rpc.rpc_sync("worker0", discard)
    now = statistics()
    assert [(p.calls_sent, p.latencies.count) for p in now.peers] == [(1, 1), (10, 10), (0, 0)]
    assert [p.calls_received for p in now.peers] == [1, 0, 0]
    assert (now.calls_sent, now.latencies.count) == (11, 11)
    one = peer("worker1")
    assert 10 * MIB <= one.bytes_sent < 11 * MIB
    assert one.lanes
    assert one.state == "present"
    assert 0 < one.latencies.percentile_us(50) <= one.latencies.percentile_us(99)
    assert one.latencies.percentile_us(0) <= 1.25 * one.latencies.mean_us


@in_worker0(of=2)
def test_large_tensors_that_come_in_turn_share_few_buffers() -> None:
    tensor = torch.ones(MIB, dtype=torch.uint8)
    for _ in range(200):
        rpc.rpc_sync("worker1", discard, args=(tensor,))
    there = rpc.rpc_sync("worker1", statistics)
    assert there.pool_hits + there.pool_misses == 200
    assert there.pool_misses <= 32


def hang() -> None:
    assert _released.wait(60)


@in_worker0(of=2, silent=False)
def test_unanswered_call_is_counted_and_has_no_latency() -> None:
    with pytest.raises(KeyError):
        rpc.rpc_sync("worker1", fail)
    one = peer("worker1")
    assert (one.calls_sent, one.calls_failed, one.latencies.count) == (1, 0, 1)
    with pytest.raises(CallTimedOut) as raised:
        rpc.rpc_sync("worker1", hang, timeout=0.05)
    assert (raised.value.name, raised.value.timeout) == ("worker1", 0.05)
    one = peer("worker1")
    assert (one.calls_sent, one.calls_failed, one.latencies.count, one.calls_open) == (2, 1, 1, 0)
    assert statistics().calls_timed_out == 1
    rpc.rpc_sync("worker1", release)


def release() -> None:
    _released.set()


_released = threading.Event()
_counted = threading.Event()


def wait_for_release() -> None:
    assert _released.wait(60)


def wait_for_count() -> None:
    assert _counted.wait(60)


def queues() -> tuple[int, int, int]:
    now = statistics()
    return now.requests_open, now.requests_running, now.requests_waiting


@in_every_worker(of=2, options={"num_worker_threads": 2})
def test_queues_count_running_and_waiting_calls(rank: int) -> None:
    if rank == 0:
        futures = [rpc.rpc_async("worker1", wait_for_release) for _ in range(5)]
        eventually(lambda: statistics().messages_sending == 0, "the calls are sent")
        assert statistics().calls_open == peer("worker1").calls_open == 5
        _counted.set()
        torch.futures.wait_all(futures)
        assert statistics().calls_open == peer("worker1").calls_open == 0
    else:
        eventually(lambda: queues() == (5, 2, 3), "two run, and three wait")
        rpc.rpc_sync("worker0", wait_for_count)
        release()
        eventually(lambda: queues() == (0, 0, 0), "all are answered")


@in_worker0(of=2)
def test_snapshots_are_constant_comparable_and_serializable() -> None:
    from torch_ucx_rpc import Statistics

    rpc.rpc_sync("worker1", discard)
    eventually(lambda: statistics() == statistics(), "all is at rest")
    now = statistics()
    with pytest.raises(dataclasses.FrozenInstanceError):
        now.calls_open = 1
    rpc.rpc_sync("worker1", discard)
    assert statistics() != now
    assert Statistics.from_values(json.loads(json.dumps(now.to_values()))) == now
    for values in ({}, {"peers": [{}]}, {**now.to_values(), "more": 1}, []):
        with pytest.raises(ValueError, match="not the statistics of a worker"):
            Statistics.from_values(values)


@in_every_worker(of=2, init=False, shutdown=False)
def test_without_an_agent_there_are_no_statistics(rank: int) -> None:
    with pytest.raises(NotRunning, match=r"RPC is not running with the backend UCX; call init_rpc"):
        statistics()
    init_rpc(rank)
    rpc.shutdown()
    with pytest.raises(NotRunning, match="RPC is not running"):
        statistics()


# ---- Prometheus ------------------------------------------------------------------------------------------------------


def scrape(port: int) -> dict[tuple[str, str], float]:
    """Return the samples by name and peer, as Prometheus's own parser reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, sample.labels.get("peer", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("le", "+Inf") == "+Inf"
    }


@in_worker0(of=2, options={"prometheus_port": 0})
def test_prometheus_reads_the_statistics() -> None:
    for _ in range(7):
        rpc.rpc_sync("worker1", discard)
    samples = scrape(statistics().prometheus_port)
    assert samples["torch_ucx_rpc_calls_sent_total", "worker1"] == 7
    assert samples["torch_ucx_rpc_call_duration_seconds_count", "worker1"] == 7
    assert samples["torch_ucx_rpc_call_duration_seconds_bucket", "worker1"] == 7
    assert 0 < samples["torch_ucx_rpc_call_duration_seconds_sum", "worker1"] < 60
    assert samples["torch_ucx_rpc_window_limit_bytes", ""] == 64 * MIB
    assert samples["torch_ucx_rpc_calls_failed_total", "worker1"] == 0


@in_every_worker(of=1, init=False, shutdown=False)
def test_taken_port_fails_init_rpc_and_a_retry_works(rank: int) -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        options = backend_options(prometheus_port=other.getsockname()[1])
        with pytest.raises(JoinFailed, match="that port is not available"):
            init_rpc(rank, rpc_backend_options=options)
    init_rpc(rank, rpc_backend_options=backend_options(prometheus_port=0))
    port = statistics().prometheus_port
    assert scrape(port)
    rpc.shutdown()
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(port)


# ---- Observers of a running job --------------------------------------------------------------------------------------


def command_line(*arguments: str) -> tuple[int, str]:
    """Run ``python -m torch_ucx_rpc`` in this process; return its exit code and output. The program asks this worker
    like any other."""
    from _torch_ucx_rpc_cli import main

    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = main(arguments)
    return code, output.getvalue()


@in_worker0(of=2)
def test_top_shows_all_workers_of_the_job() -> None:
    for _ in range(5):
        rpc.rpc_sync("worker1", discard)
    code, text = command_line("top", "--once", "--json", "--pid", str(os.getpid()))
    assert code == 0
    workers = json.loads(text)
    assert [workers[rank]["name"] for rank in ("0", "1")] == ["worker0", "worker1"]
    assert workers["0"]["peers"][1]["calls_sent"] == 5
    assert workers["1"]["peers"][0]["calls_received"] == 5
    code, text = command_line("top", "--once", "--peers", "--pid", str(os.getpid()))
    assert code == 0
    assert "worker1" in text


@in_worker0(of=3)
def test_workers_on_other_hosts_are_asked_by_rpc() -> None:
    [own] = [found for found in observation().workers_of_this_host() if found.pid == os.getpid()]
    answers = own.ask([1, 2, 7])
    assert [answers[rank].name for rank in (1, 2)] == ["worker1", "worker2"]
    assert "could not find destination worker with rank 7" in answers[7]


@in_every_worker(of=1, shutdown=False)
def test_nonsense_gets_no_answer_and_does_no_harm(rank: int) -> None:
    [own] = [found for found in observation().workers_of_this_host() if found.pid == os.getpid()]
    questions = (b"\n", b"GET / HTTP/1.1\r\n\r\n", b'["0"]\n', b"[true]\n", b'{"0": 1}\n', b"\xff\0\n")
    # torch accepts ranks of at most 16 bits.
    for nonsense in (*questions, b"[" * 99_999 + b"\n", b"[99999]\n", b"[-99999, 1e9]\n", b"[" + b"9" * 9_999 + b"]\n"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(observation()._address(own.name))
            connection.sendall(nonsense)
            assert connection.recv(1) == b""
    assert own.ask()[0].name == "worker0"
    rpc.shutdown()
    assert own not in observation().workers_of_this_host()
    with pytest.raises(OSError, match="refused"):
        own.ask()


@in_every_worker(of=2, init=False)
def test_a_worker_that_cannot_be_watched_works(rank: int) -> None:
    def no_such_sockets(name: str) -> str:
        raise OSError("abstract sockets are not supported")

    observation()._address = no_such_sockets
    init_rpc(rank)
    rpc.rpc_sync(f"worker{1 - rank}", discard)
    assert os.getpid() not in [found.pid for found in observation().workers_of_this_host()]
    rpc.shutdown()


def test_top_without_a_worker_says_where_to_start_top(capsys: pytest.CaptureFixture[str]) -> None:
    from _torch_ucx_rpc_cli import ExitCode, main

    assert main(["top", "--once", "--pid", str(os.getpid())]) == ExitCode.NO_JOB
    assert "no worker of this user runs on this host in process" in capsys.readouterr().err


def observation():
    from torch_ucx_rpc._observe import socket as room_of_observers

    return room_of_observers
