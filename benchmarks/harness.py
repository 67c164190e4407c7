"""Runs contenders in turns and compares them.

A benchmark asks one question. Its figures are what is measured, with the bounds that a ratio must keep. Its contenders
are RPC jobs on UCX and on TensorPipe, and baselines such as a memcpy. All contenders stay alive together and are
measured one after the other, round by round, so that other load of the machine strikes all alike. Contenders that are
not being measured are stopped (SIGSTOP): an idle worker of TensorPipe spins and would take a core from the others.
Reported are the medians over the rounds, lowest and highest, and the median of each round's ratio: ratios are what to
trust on a shared machine.

TensorPipe comes in two configurations, and a ratio is taken to the better one in each round. A contender that fails or
hangs is left out from then on; its bounds count as missed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import re
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch._C._distributed_rpc import RpcBackendOptions

Figures = dict[str, float]

# Its configurations: as it comes, and with the transport and channels that it would have between hosts.
TENSORPIPES = ("TensorPipe", "TensorPipe, uv")


@dataclasses.dataclass(frozen=True)
class Bound:
    """What the ratio of ``contender`` to ``reference`` must keep, and what we aim at.

    Of several references the best one of each round counts. Without any, the bound is on the figure itself.
    """

    must: float | None
    aim: float | None = None
    contender: str = "UCX"
    reference: str | tuple[str, ...] | None = TENSORPIPES

    @property
    def references(self) -> tuple[str, ...]:
        return (self.reference,) if isinstance(self.reference, str) else self.reference or ()


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
    # How its lanes to another worker must read, a pattern; TensorPipe does not tell its own.
    lanes: str = ""
    # Another checkout, built in place, whose package the workers import instead of this one's.
    tree: str = ""

    def rpc_backend_options(self, **more: Any) -> RpcBackendOptions:
        if self.backend == "UCX":
            from torch_ucx_rpc import UcxRpcBackendOptions

            return UcxRpcBackendOptions(**self.options, **more)
        from torch.distributed.rpc import TensorPipeRpcBackendOptions

        return TensorPipeRpcBackendOptions(**self.options, **more)


UCX = Transport("UCX", "UCX", lanes="sysv|posix")
TENSORPIPE = Transport("TensorPipe", "TENSORPIPE")
UCX_TCP = Transport("UCX, tcp", "UCX", environment={"UCX_TLS": "tcp,self"}, lanes=r"(?!.*(sysv|posix)).*tcp")
# Without its transport and its channel for one host (shm, cma): what it has between hosts. mpt_uv sends large tensors
# over several connections; without it the echo of 64 MiB takes 1.2 to 1.3 times as long.
TENSORPIPE_UV = Transport(
    "TensorPipe, uv", "TENSORPIPE", options={"_transports": ["uv"], "_channels": ["mpt_uv", "basic"]}
)
# On one host either may be the faster one.
ON_ONE_HOST = (UCX, TENSORPIPE, TENSORPIPE_UV)
TRANSPORTS = (UCX, TENSORPIPE, UCX_TCP, TENSORPIPE_UV)


def over_tcp(must: float, aim: float | None = None) -> Bound:
    """The bound of UCX over TCP against TensorPipe's."""
    return Bound(must, aim, contender=UCX_TCP.name, reference=TENSORPIPE_UV.name)


PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch.distributed.rpc"])


# For workers to meet, for one round, and for the end of a job, each.
LIMIT_S = 180.0
_END_S = 20.0


# By which the messages of contenders went, as far as they tell.
LANES: dict[str, str] = {}


class ContenderFailed(Exception):
    """A contender has failed, has died, or has not answered in time."""


def _work(
    rank: int,
    workers: int,
    transport: Transport,
    store: str,
    measure: Callable[[], Figures],
    turns: Any,
    is_over: Any,
) -> None:
    """A worker; only worker0 has ``turns``, whose end tells that it is gone.

    ``is_over``: of jobs in which workers are killed; its end is that of the job.
    """
    try:
        os.environ.update(transport.environment)
        import torch
        import torch.distributed.rpc as rpc
        from torch._C._distributed_rpc import _get_current_rpc_agent

        torch.set_num_threads(1)
        if transport.backend == "UCX":
            if transport.tree:
                sys.path.insert(0, transport.tree)
            import torch_ucx_rpc  # makes "UCX" a backend

            assert torch_ucx_rpc.__file__.startswith(transport.tree), f"{torch_ucx_rpc.__file__} is of another tree"
        rpc.init_rpc(
            f"worker{rank}",
            backend=rpc.BackendType[transport.backend],
            rank=rank,
            world_size=workers,
            rpc_backend_options=transport.rpc_backend_options(init_method=store),
        )
        if rank == 0:
            turns.send(("ready", None))
            while turns.recv() == "measure":
                figures = measure()
                lanes = _get_current_rpc_agent().get_debug_info().get("lanes.worker1", "")
                turns.send(("figures", (figures, lanes)))
        # A graceful shutdown ends as soon as a worker has died, in the middle of the job.
        if is_over is not None:
            is_over.poll(None)
        rpc.shutdown(graceful=is_over is None)
    except BaseException:
        if turns is not None:
            turns.send(("failed", traceback.format_exc()))
        raise


class RpcJob:
    """Workers on this machine, named worker0, worker1 and so on; ``measure`` runs on worker0, and may kill others."""

    def __init__(
        self,
        transport: Transport,
        measure: Callable[[], Figures],
        *,
        workers: int = 2,
        limit_s: float = LIMIT_S,
        kills: bool = False,
    ) -> None:
        self.name = transport.name
        self._transport = transport
        self._measure = measure
        self._workers = workers
        self._limit_s = limit_s
        self._kills = kills
        self._has_failed = False

    @property
    def transport(self) -> Transport:
        return self._transport

    def afresh(self, transport: Transport) -> FreshRpcJob:
        """The same job on this transport, with new processes every round."""
        return FreshRpcJob(transport, self._measure, workers=self._workers, limit_s=self._limit_s, kills=self._kills)

    def __enter__(self) -> RpcJob:
        self._folder = tempfile.TemporaryDirectory()
        self._turns, theirs = PROCESSES.Pipe()
        is_over: Connection | None
        self._is_over: Connection | None
        self._is_over, is_over = PROCESSES.Pipe() if self._kills else (None, None)
        store = Path(self._folder.name, "store").as_uri()
        self._has_failed = False
        self._processes = [
            PROCESSES.Process(
                target=_work,
                args=(
                    rank,
                    self._workers,
                    self._transport,
                    store,
                    self._measure,
                    theirs if rank == 0 else None,
                    is_over,
                ),
                daemon=True,
            )
            for rank in range(self._workers)
        ]
        for process in self._processes:
            process.start()
        theirs.close()
        if is_over is not None:
            is_over.close()
        try:
            self._receive("ready")
        except ContenderFailed:
            self._end()
            raise
        self._signal(signal.SIGSTOP)
        return self

    def measure(self) -> Figures:
        self._signal(signal.SIGCONT)
        self._turns.send("measure")
        figures: Figures
        figures, lanes = self._receive("figures")
        if lanes and not re.search(self._transport.lanes, lanes):
            raise self._failure(f"its messages go by {lanes}")
        if lanes:
            LANES[self.name] = lanes
        self._signal(signal.SIGSTOP)
        return figures

    def __exit__(self, *exception: object) -> None:
        self._signal(signal.SIGCONT)
        if not self._has_failed:
            with contextlib.suppress(BrokenPipeError):
                self._turns.send("end")
        self._end()

    def _receive(self, expected: str) -> Any:
        try:
            if not self._turns.poll(self._limit_s):
                raise self._failure(f"worker0 has not answered in {self._limit_s:g} s")
            kind, content = self._turns.recv()
        except (EOFError, ConnectionError) as error:
            raise self._failure("worker0 has died") from error
        if kind != expected:
            raise self._failure(content)
        return content

    def _failure(self, reason: str) -> ContenderFailed:
        """Its workers are killed: they would take time from the contenders that are left."""
        self._has_failed = True
        for process in self._processes:
            process.kill()
        return ContenderFailed(reason)

    def _end(self) -> None:
        if self._is_over is not None:
            self._is_over.close()
        give_up_at = time.monotonic() + (0.0 if self._has_failed else _END_S)
        for process in self._processes:
            process.join(timeout=max(0.0, give_up_at - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        self._turns.close()
        self._folder.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


class FreshRpcJob:
    """The same with new processes every round, for what only the first time shows."""

    def __init__(
        self,
        transport: Transport,
        measure: Callable[[], Figures],
        *,
        workers: int = 2,
        limit_s: float = LIMIT_S,
        kills: bool = False,
    ) -> None:
        self.name = transport.name
        self._job = RpcJob(transport, measure, workers=workers, limit_s=limit_s, kills=kills)

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


def against(benchmark: Benchmark, tree: Path) -> Benchmark:
    """The same question, put to UCX of this checkout and of another one. There are ratios, and no bounds on them.

    Each round has new processes. How two processes settle beside each other can move a figure by 15 % for all their
    life, which is more than what is looked for here.
    """
    jobs = [job for job in benchmark.contenders() if isinstance(job, RpcJob) and job.transport.backend == "UCX"]
    here = [job.afresh(job.transport) for job in jobs]
    there = [
        job.afresh(dataclasses.replace(job.transport, name=f"{job.name}, {tree.name}", tree=str(tree))) for job in jobs
    ]
    bounds = tuple(
        Bound(None, contender=mine.name, reference=other.name) for mine, other in zip(here, there, strict=True)
    )
    figures = tuple(dataclasses.replace(figure, bounds=bounds) for figure in benchmark.figures)
    return dataclasses.replace(benchmark, figures=figures, contenders=lambda: [*here, *there])


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


# Of fewer the 99th percentile is the highest.
FEWEST_FOR_P99 = 200


def p99(durations: Sequence[float]) -> float:
    if len(durations) < FEWEST_FOR_P99:
        raise ValueError(f"{len(durations)} samples are too few for a 99th percentile: take {FEWEST_FOR_P99}")
    return durations[len(durations) * 99 // 100]


# -------------------------------------------------------------------------------------------------------- results


@dataclasses.dataclass
class Result:
    """Every round of every contender, and why contenders have failed."""

    benchmark: Benchmark
    rounds: dict[str, list[Figures]]
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    def values(self, contender: str, figure: str) -> list[float]:
        return [figures[figure] for figures in self.rounds.get(contender, []) if figure in figures]

    def ratio(self, figure: Figure, bound: Bound) -> float | None:
        """The median over the rounds of one contender's figure divided by that of the best of the others."""
        values = self.values(bound.contender, figure.name)
        if bound.reference is not None:
            best = max if figure.more_is_better else min
            columns = [column for name in bound.references if (column := self.values(name, figure.name))]
            others = [best(row) for row in zip(*columns, strict=False)]
            values = [mine / theirs for mine, theirs in zip(values, others, strict=False)]
        return statistics.median(values) if values else None

    def verdicts(self) -> Iterator[Verdict]:
        """Of each bound that there is one of; a bound whose contenders have failed is missed."""
        for figure in self.benchmark.figures:
            for bound in figure.bounds:
                if bound.must is None:
                    continue
                ratio = self.ratio(figure, bound)
                if ratio is None and not {bound.contender, *bound.references} & set(self.failures):
                    continue  # nobody was to measure it
                yield Verdict(figure, bound, ratio, ratio is not None and figure.holds(ratio, bound.must))


@dataclasses.dataclass(frozen=True)
class Verdict:
    figure: Figure
    bound: Bound
    ratio: float | None
    holds: bool

    def __str__(self) -> str:
        relation = "at least" if self.figure.more_is_better else "at most"
        found = "not measured" if self.ratio is None else number(self.ratio)
        against = " or ".join(self.bound.references)
        return (
            f"{self.figure.name}, {self.bound.contender}{f' to {against}' if against else ''}: {found}, "
            f"{relation} {self.bound.must:g} {'holds' if self.holds else 'MISSED'}"
        )


def run(
    benchmark: Benchmark,
    rounds: int | None = None,
    on_step: Callable[[str], None] = lambda _: None,
    on_figures: Callable[[str, Figures], None] = lambda _, __: None,
) -> Result:
    """Measures all contenders in turns.

    ``on_step`` is told what is being measured, once for each step of steps(), and ``on_figures`` what was found.
    """
    contenders = benchmark.contenders()
    result = Result(benchmark, {contender.name: [] for contender in contenders})

    @contextlib.contextmanager
    def failing_alone(name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = str(error) if isinstance(error, ContenderFailed) else traceback.format_exc()
            result.failures[name] = reason
            print(f"{name} has failed and is left out: {reason}", file=sys.stderr, flush=True)

    with contextlib.ExitStack() as alive:
        for contender in contenders:
            with failing_alone(contender.name):
                alive.enter_context(contender)
        for turn in range(rounds or benchmark.rounds):
            # Every other round in reverse: nobody always follows the same neighbour.
            for contender in contenders if turn % 2 == 0 else reversed(contenders):
                on_step(contender.name)
                if contender.name not in result.failures:
                    with failing_alone(contender.name):
                        figures = contender.measure()
                        result.rounds[contender.name].append(figures)
                        on_figures(contender.name, figures)
    return result


def steps(benchmark: Benchmark, rounds: int | None = None) -> int:
    return len(benchmark.contenders()) * (rounds or benchmark.rounds)


def number(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 4
    return f"{value:,.{digits}f}"


def spread(values: Sequence[float]) -> str:
    return f"{number(statistics.median(values))} ({number(min(values))} to {number(max(values))})"


def table(result: Result) -> Iterator[str]:
    """The lines of a Markdown table: figures, contenders, ratios with their bounds."""
    names = list(result.rounds)
    titles = [f"{name} (failed)" if name in result.failures else name for name in names]
    rounds = max(map(len, result.rounds.values()), default=0)
    question = f"{result.benchmark.question} ({rounds} round{'' if rounds == 1 else 's'})"
    yield f"| {question} | " + " | ".join(titles) + " | ratio | must | aim | |"
    yield "|---|" + "---:|" * (len(names) + 3) + "---|"
    for figure in result.benchmark.figures:
        cells = []
        for name in names:
            values = result.values(name, figure.name)
            cells.append(spread(values) if values else "")
        if not any(cells):
            continue  # results from before the figure was there
        line = f"| {', '.join(filter(None, (figure.name, figure.unit)))} | " + " | ".join(cells)
        shown = False
        for bound in figure.bounds:
            ratio = result.ratio(figure, bound)
            if ratio is None:
                continue
            relation = "≥" if figure.more_is_better else "≤"
            must = "" if bound.must is None else f"{relation} {bound.must:g}"
            aim = "" if bound.aim is None else f"{relation} {bound.aim:g}"
            verdict = "" if bound.must is None else "holds" if figure.holds(ratio, bound.must) else "MISSED"
            against = _against(bound, names)
            # The words are a row's title: in the column of the ratios they would make it as wide as they are.
            head = f"{line} | {number(ratio)}{against}" if not shown else _row_of_ratio(against, names, ratio)
            yield f"{head} | {must} | {aim} | {verdict} |"
            shown = True
        if not shown:
            yield f"{line} | | | | |"


def _row_of_ratio(against: str, names: Sequence[str], ratio: float) -> str:
    """A row for one ratio more of the figure above."""
    return f"| {f'ratio{against}' if against else ''} | {' | '.join('' for _ in names)} | {number(ratio)}"


def _against(bound: Bound, names: Sequence[str]) -> str:
    """Whose ratio it is, where not the first contender's, and to what, where not to the better one of TensorPipe's."""
    of = "" if bound.contender == names[0] else f" of {bound.contender}"
    if bound.reference is None:
        return f"{of} by itself"
    configurations = set(TENSORPIPES) & set(names)
    if configurations and configurations <= set(bound.references):
        return of
    return f"{of} to {' or '.join(bound.references)}"
