"""The measurements of each library: the echo of an array of 1 KB and of 64 MiB, and many echoes at once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

# The modules that measure the libraries, by the names of the columns.
PROGRAMS = {
    "UCXX": "ucxx_echo",
    "UCXX plain": "ucxx_echo",
    "gRPC unix": "grpc_echo",
    "gRPC tcp": "grpc_echo",
    "mpi4py": "mpi_echo",
    "mpi4py pickled": "mpi_echo",
    "Gloo": "gloo_echo",
    "Ray": "ray_echo",
    "Monarch": "monarch_echo",
}

Figures = dict[str, object]

SMALL = np.random.default_rng(0).random(128)
# Each array, and how often it is measured.
ARRAYS: dict[str, tuple[np.ndarray, int]] = {"1 KB": (SMALL, 1000), "64 MiB": (np.ones(2**26, dtype=np.uint8), 7)}
IN_FLIGHT = (1, 10, 100)


def in_flight_name(echoes: int) -> str:
    return f"1 KB, {echoes} in flight"


def rounds_of(echoes: int) -> int:
    """Return the number of measurements of echoes at once, after a first unmeasured one."""
    return max(5, 500 // echoes)


def median(durations: Sequence[float]) -> float:
    return sorted(durations)[len(durations) // 2]


def measured(
    echo: Callable[[np.ndarray], np.ndarray], echo_at_once: Callable[[np.ndarray, int], Sequence[np.ndarray]]
) -> Figures:
    """Return microseconds: the median duration of the echo of each array, and an echo's share of many echoes at once.

    ``echo_at_once(array, n)`` starts n echoes, waits for all, and returns the arrays that came back. Both functions are
    called as `schedule` says: the other side of some libraries must know this.
    """

    def durations_us(array: np.ndarray, calls: int) -> list[float]:
        return [_duration_us(lambda: echo(array)) for _ in range(calls)]

    def durations_at_once_us(echoes: int) -> list[float]:
        return [_duration_us(lambda: echo_at_once(SMALL, echoes)) for _ in range(rounds_of(echoes))]

    figures: Figures = {}
    for name, (array, calls) in ARRAYS.items():
        assert np.array_equal(echo(array), array)
        figures[name] = median(durations_us(array, calls))
    for echoes in IN_FLIGHT:
        assert all(np.array_equal(answer, SMALL) for answer in echo_at_once(SMALL, echoes))
        figures[in_flight_name(echoes)] = median(durations_at_once_us(echoes)) / echoes
    return figures


def schedule() -> Iterator[tuple[np.ndarray, int]]:
    """Return the requests of `measured` in order: the array, and the number of echoes at once."""
    for array, calls in ARRAYS.values():
        yield from [(array, 1)] * (calls + 1)
    for echoes in IN_FLIGHT:
        yield from [(SMALL, echoes)] * (rounds_of(echoes) + 1)


def _duration_us(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - started)


@contextlib.contextmanager
def server(name: str) -> Iterator[str]:
    """Run this program with ``--serve`` in another process. Yield the argument of its `serving_at`."""
    command = [sys.executable, "-m", "benchmarks.peers", name, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            # Libraries may write to stdout too.
            yield next(line for line in process.stdout if line.startswith("at ")).split(maxsplit=1)[1].strip()
        finally:
            process.stdin.close()


def serving_at(address: str) -> None:
    """Tell `server` where this process serves."""
    print(f"at {address}", flush=True)


def wait_for_the_end() -> None:
    """Return when the block of `server` ends."""
    sys.stdin.read()
