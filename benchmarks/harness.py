"""Runs contenders in turns and compares them.

A benchmark asks one question. It measures figures, whose ratios must keep bounds. Its contenders are RPC jobs on UCX
and on TensorPipe, and baselines such as a memcpy (jobs.py). They are measured one after the other in each round, so
that other load of the machine affects all alike. The report has the median, lowest and highest figure of the rounds,
and the median of each round's ratio. On a shared machine, trust the ratios.

TensorPipe has two configurations. In each round the better one counts. A contender that fails or hangs is left out from
then on, and its bounds count as missed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

Figures = dict[str, float]

# TensorPipe's configurations: the default, and the transport and channels that it would use between hosts.
TENSORPIPES = ("TensorPipe", "TensorPipe, uv")


@dataclasses.dataclass(frozen=True)
class Bound:
    """The limit that the ratio of ``contender`` to ``reference`` must keep, and our aim.

    The best of several references counts in each round. Without any, the bound is on the figure itself.
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
    """A contender. ``with`` starts it, and then it can be measured any number of times."""

    name: str

    def __enter__(self) -> Any: ...
    def __exit__(self, *exception: object) -> None: ...
    def measure(self) -> Figures:
        """Measure one round."""
        ...


class ContenderFailed(Exception):
    """A contender has failed, has died, or has not answered in time."""


@dataclasses.dataclass(frozen=True)
class Benchmark:
    question: str
    figures: tuple[Figure, ...]
    contenders: Callable[[], Sequence[Contender]]
    rounds: int = 5
    in_short_set: bool = True
    needs_gpu: bool = False


# --------------------------------------------------------------------------------------------------------- timing


def durations_us(call: Callable[[], object], count: int) -> list[float]:
    """Return the times of ``count`` calls, sorted, in microseconds; for p50 and p99."""
    durations = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        durations.append(1e6 * (time.perf_counter() - started))
    return sorted(durations)


def p50(durations: Sequence[float]) -> float:
    return statistics.median(durations)


# With fewer samples the 99th percentile is the highest sample, or the one below.
FEWEST_FOR_P99 = 200


def p99(durations: Sequence[float]) -> float:
    if len(durations) < FEWEST_FOR_P99:
        raise ValueError(f"{len(durations)} samples are too few for a 99th percentile: take {FEWEST_FOR_P99}")
    return durations[len(durations) * 99 // 100]


# -------------------------------------------------------------------------------------------------------- results


@dataclasses.dataclass
class Result:
    """Every round of every contender, and the reasons of failures."""

    benchmark: Benchmark
    rounds: dict[str, list[Figures]]
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    def values(self, contender: str, figure: str) -> list[float]:
        return [figures[figure] for figures in self.rounds.get(contender, []) if figure in figures]

    def ratio(self, figure: Figure, bound: Bound) -> float | None:
        """Return the median over the rounds of the contender's figure divided by the best reference's."""
        values = self.values(bound.contender, figure.name)
        if bound.reference is not None:
            best = max if figure.more_is_better else min
            columns = [column for name in bound.references if (column := self.values(name, figure.name))]
            others = [best(row) for row in zip(*columns, strict=False)]
            values = [mine / theirs for mine, theirs in zip(values, others, strict=False)]
        return statistics.median(values) if values else None

    def verdicts(self) -> Iterator[Verdict]:
        """Return a verdict for each bound that was measured. A bound whose contenders have failed is missed."""
        for figure in self.benchmark.figures:
            for bound in figure.bounds:
                if bound.must is None:
                    continue
                ratio = self.ratio(figure, bound)
                if ratio is None and not {bound.contender, *bound.references} & set(self.failures):
                    continue  # this benchmark does not measure the bound's figure
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
    """Measure all contenders in turns.

    ``on_step`` gets the name of the contender before each step of steps(), and ``on_figures`` the results.
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
            # Every other round runs in reverse, so that no contender always follows the same neighbour.
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
    """Return the lines of a Markdown table: figures, contenders, ratios with their bounds."""
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
            continue  # these results are older than the figure
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
            # A further ratio has its own row with `against` as title, which is too wide for the column of ratios.
            head = f"{line} | {number(ratio)}{against}" if not shown else _row_of_ratio(against, names, ratio)
            yield f"{head} | {must} | {aim} | {verdict} |"
            shown = True
        if not shown:
            yield f"{line} | | | | |"


def _row_of_ratio(against: str, names: Sequence[str], ratio: float) -> str:
    """Return a row for a further ratio of the figure above."""
    return f"| {f'ratio{against}' if against else ''} | {' | '.join('' for _ in names)} | {number(ratio)}"


def _against(bound: Bound, names: Sequence[str]) -> str:
    """Return words for the ratio's contender and reference. Leave out the first contender, and the better TensorPipe as
    reference."""
    of = "" if bound.contender == names[0] else f" of {bound.contender}"
    if bound.reference is None:
        return f"{of} by itself"
    configurations = set(TENSORPIPES) & set(names)
    if configurations and configurations <= set(bound.references):
        return of
    return f"{of} to {' or '.join(bound.references)}"
