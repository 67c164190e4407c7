"""How fast do large tensors travel?

The echo of 1 MiB and of 64 MiB between two workers on one host. It is compared with the limits of the machine: a memcpy
of 64 MiB within warm memory, and UCX's own ucx_perftest with messages of 64 MiB. ucx_perftest uses the workers' lanes,
which exclude cma, since cma cannot report dead peers.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed.rpc as rpc

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure

MIB = 2**20
LARGE = 64 * MIB
SMALL_CALLS, LARGE_CALLS = 200, 7


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def echo_us(tensor: torch.Tensor, count: int) -> list[float]:
    """Return the durations of ``count`` echoes, sorted. Each answer is freed before the next call, as in a program that
    has used it."""
    return harness.durations_us(lambda: rpc.rpc_sync("worker1", echo, (tensor,)), count)


def measure() -> harness.Figures:
    figures = {}
    for name, size, calls in (("1 MiB", MIB, SMALL_CALLS), ("64 MiB", LARGE, LARGE_CALLS)):
        tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
        assert torch.equal(rpc.rpc_sync("worker1", echo, (tensor,)), tensor)  # this also warms up
        figures[name] = harness.p50(echo_us(tensor, calls))
    return {
        "echo of 1 MiB, p50": figures["1 MiB"],
        "echo of 64 MiB, both ways": 2 * LARGE / 2**30 / (1e-6 * figures["64 MiB"]),
    }


def measure_memcpy() -> harness.Figures:
    source, target = torch.ones(LARGE, dtype=torch.uint8), torch.zeros(LARGE, dtype=torch.uint8)
    duration = harness.p50(harness.durations_us(lambda: target.copy_(source), LARGE_CALLS))
    return {"echo of 64 MiB, both ways": LARGE / 2**30 / (1e-6 * duration)}


def ucx_perftest(
    size: int, iterations: int, test: str = "ucp_am_bw", lanes: str = "self,sysv,posix,tcp", memory: str = "host"
) -> float:
    """Return the bandwidth between two processes on this host by UCX's own benchmark, in GiB/s.

    A test of latency (``ucp_am_lat``) gives the bandwidth of messages that wait for each other, as those of an echo do.
    """
    import libucx

    program = Path(libucx.__file__).parent / "bin" / "ucx_perftest"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = perftest_environment(Path(libucx.__file__).parent / "lib", lanes)
    common = [str(program), "-p", str(port), "-m", memory]
    with subprocess.Popen(common, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            give_up_at = time.monotonic() + 10
            while True:
                client = subprocess.run(
                    [*common, "127.0.0.1", "-t", test, "-s", str(size), "-n", str(iterations), "-w", "3", "-f", "-v"],
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=60,
                )
                if client.returncode == 0:
                    if test.endswith("_lat"):
                        return size / 2**30 / (1e-6 * perftest_latency_us(client.stdout))
                    return perftest_bandwidth(client.stdout)
                if time.monotonic() > give_up_at:
                    raise RuntimeError(f"ucx_perftest failed: {client.stdout}{client.stderr}")
                time.sleep(0.05)  # the server may not have opened its port yet
        finally:
            server.terminate()


def perftest_environment(libraries: Path, lanes: str) -> dict[str, str]:
    """Return an environment in which the loader also finds the UCX in ``libraries``."""
    others = os.environ.get("LD_LIBRARY_PATH", "")
    path = f"{libraries}:{others}" if others else str(libraries)
    return {**os.environ, "UCX_TLS": lanes, "LD_LIBRARY_PATH": path}


def perftest_bandwidth(output: str) -> float:
    """Return the overall bandwidth, in GiB/s, from the last line of figures of `ucx_perftest -f -v`.

    UCX's own messages may follow that line, for example at the end of a process that has used a GPU.
    """
    return _perftest_figures(output)[-3] / 1024


def perftest_latency_us(output: str) -> float:
    """Return the median latency, in microseconds and one way, from `ucx_perftest -f -v`."""
    return _perftest_figures(output)[1]


def _perftest_figures(output: str) -> list[float]:
    """Return the figures: iterations; latency or overhead in us (median, average, overall); MiB/s and messages/s
    (average, overall)."""
    for line in reversed(output.splitlines()):
        try:
            figures = [float(field) for field in line.split(",")]
        except ValueError:
            continue
        if len(figures) >= 5:
            return figures
    raise RuntimeError(f"ucx_perftest has printed no figures: {output}")


def measure_ucx_perftest() -> harness.Figures:
    return {"echo of 64 MiB, both ways": ucx_perftest(LARGE, 20)}


BENCHMARK = harness.Benchmark(
    question="How fast do large tensors travel?",
    figures=(
        Figure(
            "echo of 1 MiB, p50",
            "us",
            (Bound(0.55, 0.4), jobs.over_tcp(1)),
        ),
        Figure(
            "echo of 64 MiB, both ways",
            "GiB/s",
            (
                Bound(2.5),
                Bound(0.9, reference="ucx_perftest"),
                Bound(None, 0.9, reference="memcpy"),
                jobs.over_tcp(1),
            ),
            more_is_better=True,
        ),
    ),
    contenders=lambda: [
        *(jobs.RpcJob(transport, measure) for transport in jobs.TRANSPORTS),
        jobs.Baseline("ucx_perftest", measure_ucx_perftest),
        jobs.Baseline("memcpy", measure_memcpy),
    ],
)
