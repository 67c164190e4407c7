"""Runs contenders in turns and compares them.

A benchmark asks one question. It has figures (what is measured, with the bounds that a ratio must keep) and contenders
(who is measured): RPC jobs on UCX and on TensorPipe, and baselines such as a memcpy. All contenders stay alive together
and are measured one after the other, round by round, so that what else the machine does strikes all alike. Who is not
measured is stopped (SIGSTOP): an idle worker of TensorPipe spins and would take a core from the others. Reported are
the medians over the rounds, lowest and highest, and the median of each round's ratio: ratios are what to trust on a
machine that is shared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import platform
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

Figures = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Bound:
    """What the ratio of ``contender`` to ``reference``, or without one the figure itself, must keep; what we aim at."""

    must: float | None
    aim: float | None = None
    contender: str = "UCX"
    reference: str | None = "TensorPipe"


@dataclasses.dataclass(frozen=True)
class Figure:
    name: str
    unit: str
    bounds: tuple[Bound, ...] = ()
    more_is_better: bool = False

    def holds(self, ratio: float, limit: float) -> bool:
        return ratio >= limit if self.more_is_better else ratio <= limit


class Contender(Protocol):
    """Is started by ``with``, then measured any number of times."""

    name: str

    def __enter__(self) -> Any: ...
    def __exit__(self, *exception: object) -> None: ...
    def measure(self) -> Figures:
        """One round."""
        ...


@dataclasses.dataclass(frozen=True)
class Benchmark:
    question: str
    figures: tuple[Figure, ...]
    contenders: Callable[[], Sequence[Contender]]
    rounds: int = 5
    in_short_set: bool = True
    needs_gpu: bool = False


# ------------------------------------------------------------------------------------------------------- RPC jobs


@dataclasses.dataclass(frozen=True)
class Transport:
    """A backend, and the way it is told to take."""

    name: str
    backend: str
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def rpc_backend_options(self, **more: Any) -> Any:
        if self.backend == "UCX":
            from torch_ucx_rpc import UcxRpcBackendOptions as Options
        else:
            from torch.distributed.rpc import TensorPipeRpcBackendOptions as Options
        return Options(**self.options, **more)


UCX = Transport("UCX", "UCX")
TENSORPIPE = Transport("TensorPipe", "TENSORPIPE")
UCX_TCP = Transport("UCX, tcp", "UCX", environment={"UCX_TLS": "tcp,self"})
# Without its channels for one host (cma), which other hosts do not have.
TENSORPIPE_UV = Transport("TensorPipe, uv", "TENSORPIPE", options={"_transports": ["uv"], "_channels": ["basic"]})
TRANSPORTS = (UCX, TENSORPIPE, UCX_TCP, TENSORPIPE_UV)


def over_tcp(must: float, aim: float | None = None) -> Bound:
    """The bound of UCX over TCP against TensorPipe's."""
    return Bound(must, aim, contender=UCX_TCP.name, reference=TENSORPIPE_UV.name)


PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch.distributed.rpc"])


def _work(
    rank: int,
    workers: int,
    transport: Transport,
    store: str,
    measure: Callable[[], Figures],
    turns: Any,
    kills: bool,
) -> None:
    os.environ.update(transport.environment)
    import torch
    import torch.distributed.rpc as rpc

    torch.set_num_threads(1)
    if transport.backend == "UCX":
        import torch_ucx_rpc  # noqa: F401  (makes "UCX" a backend)
    rpc.init_rpc(
        f"worker{rank}",
        backend=rpc.BackendType[transport.backend],
        rank=rank,
        world_size=workers,
        rpc_backend_options=transport.rpc_backend_options(init_method=store),
    )
    if rank == 0:
        turns.send("ready")
        while turns.recv() == "measure":
            turns.send(measure())
    # Where workers have been killed, it says so.
    with contextlib.suppress(*([RuntimeError] if kills else [])):
        rpc.shutdown()


class RpcJob:
    """Workers on this machine, named worker0, worker1 and so on; ``measure`` runs on worker0, and may kill others."""

    def __init__(
        self, transport: Transport, measure: Callable[[], Figures], *, workers: int = 2, kills: bool = False
    ) -> None:
        self.name = transport.name
        self._kills = kills
        self._transport = transport
        self._measure = measure
        self._workers = workers

    def __enter__(self) -> RpcJob:
        self._folder = tempfile.TemporaryDirectory()
        self._turns, theirs = PROCESSES.Pipe()
        store = Path(self._folder.name, "store").as_uri()
        self._processes = [
            PROCESSES.Process(
                target=_work,
                args=(rank, self._workers, self._transport, store, self._measure, theirs, self._kills),
                daemon=True,
            )
            for rank in range(self._workers)
        ]
        for process in self._processes:
            process.start()
        theirs.close()
        self._turns.recv()
        self._signal(signal.SIGSTOP)
        return self

    def measure(self) -> Figures:
        self._signal(signal.SIGCONT)
        self._turns.send("measure")
        figures: Figures = self._turns.recv()
        self._signal(signal.SIGSTOP)
        return figures

    def __exit__(self, *exception: object) -> None:
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._turns.send("end")
        for process in self._processes:
            process.join(timeout=60)
            if process.exitcode is None:
                process.kill()
        self._folder.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            assert process.pid is not None
            # Some benchmarks kill workers.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


class FreshRpcJob:
    """The same with new processes every round, for what only the first time shows."""

    def __init__(
        self, transport: Transport, measure: Callable[[], Figures], *, workers: int = 2, kills: bool = False
    ) -> None:
        self.name = transport.name
        self._job = RpcJob(transport, measure, workers=workers, kills=kills)

    def __enter__(self) -> FreshRpcJob:
        return self

    def measure(self) -> Figures:
        with self._job:
            return self._job.measure()

    def __exit__(self, *exception: object) -> None:
        pass


class Baseline:
    """A function that measures in this process, or in one that it starts."""

    def __init__(self, name: str, measure: Callable[[], Figures]) -> None:
        self.name = name
        self.measure = measure

    def __enter__(self) -> Baseline:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


# --------------------------------------------------------------------------------------------------------- timing


def durations_us(call: Callable[[], object], count: int) -> list[float]:
    """How long each of ``count`` calls takes, sorted, in microseconds; for p50 and p99."""
    durations = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        durations.append(1e6 * (time.perf_counter() - started))
    return sorted(durations)


def p50(durations: Sequence[float]) -> float:
    return statistics.median(durations)


def p99(durations: Sequence[float]) -> float:
    return durations[len(durations) * 99 // 100]


# -------------------------------------------------------------------------------------------------------- results


@dataclasses.dataclass
class Result:
    """Every round of every contender."""

    benchmark: Benchmark
    rounds: dict[str, list[Figures]]

    def values(self, contender: str, figure: str) -> list[float]:
        return [figures[figure] for figures in self.rounds.get(contender, []) if figure in figures]

    def ratio(self, figure: Figure, bound: Bound) -> float | None:
        """The median over the rounds of one contender's figure divided by the other's."""
        if bound.reference is None:
            values = self.values(bound.contender, figure.name)
            return statistics.median(values) if values else None
        pairs = zip(self.values(bound.contender, figure.name), self.values(bound.reference, figure.name), strict=False)
        ratios = [mine / theirs for mine, theirs in pairs]
        return statistics.median(ratios) if ratios else None


def run(benchmark: Benchmark, rounds: int | None = None, on_step: Callable[[str], None] = lambda _: None) -> Result:
    """Measures all contenders in turns. ``on_step`` is told what is being measured, once for each step of steps()."""
    contenders = benchmark.contenders()
    result = Result(benchmark, {contender.name: [] for contender in contenders})
    with contextlib.ExitStack() as alive:
        for contender in contenders:
            alive.enter_context(contender)
        for turn in range(rounds or benchmark.rounds):
            # Every other round in reverse: nobody always follows the same neighbour.
            for contender in contenders if turn % 2 == 0 else reversed(contenders):
                on_step(contender.name)
                result.rounds[contender.name].append(contender.measure())
    return result


def steps(benchmark: Benchmark, rounds: int | None = None) -> int:
    return len(benchmark.contenders()) * (rounds or benchmark.rounds)


def _number(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 4
    return f"{value:,.{digits}f}"


def _spread(values: Sequence[float]) -> str:
    return f"{_number(statistics.median(values))} ({_number(min(values))} to {_number(max(values))})"


def table(result: Result) -> Iterator[str]:
    """The lines of a Markdown table: figures, contenders, ratios with their bounds."""
    names = list(result.rounds)
    yield f"| {result.benchmark.question} | " + " | ".join(names) + " | ratio | must | aim | |"
    yield "|---|" + "---:|" * (len(names) + 3) + "---|"
    for figure in result.benchmark.figures:
        cells = []
        for name in names:
            values = result.values(name, figure.name)
            cells.append(_spread(values) if values else "")
        line = f"| {figure.name}, {figure.unit} | " + " | ".join(cells)
        shown = False
        for bound in figure.bounds:
            ratio = result.ratio(figure, bound)
            if ratio is None:
                continue
            relation = "≥" if figure.more_is_better else "≤"
            must = "" if bound.must is None else f"{relation} {bound.must:g}"
            aim = "" if bound.aim is None else f"{relation} {bound.aim:g}"
            verdict = "" if bound.must is None else "holds" if figure.holds(ratio, bound.must) else "MISSED"
            against = {"TensorPipe": "", None: " by itself"}.get(bound.reference, f" to {bound.reference}")
            head = line if not shown else "| | " + " | ".join("" for _ in names)
            yield f"{head} | {_number(ratio)}{against} | {must} | {aim} | {verdict} |"
            shown = True
        if not shown:
            yield f"{line} | | | | |"


def _output(*command: str) -> str:
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return found.stdout.strip()


def circumstances() -> dict[str, Any]:
    """The machine, the versions, the commit: what a figure means nothing without."""
    import torch

    import torch_ucx_rpc
    from torch_ucx_rpc import _native

    processor = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor[1] if processor else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ucx": ".".join(map(str, loaded.version)) if (loaded := _native.loaded_ucx()) else "",
        "torch_ucx_rpc": torch_ucx_rpc.__version__,
        "commit": _output("git", "describe", "--always", "--dirty", "--abbrev=12"),
    }
