"""Writes all tables of figures from the results that ``python -m benchmarks --record NAME`` has kept.

    python -m benchmarks.tables             name the pages that differ from the results; the exit code is 1 if any does
    python -m benchmarks.tables --write     write the pages

``benchmarks/results/NAME.md`` has every table of a run. The README and the docs have a few tables, each between two
comments. This program writes the lines between them::

    <!-- benchmark: two_cores calls -->
    <!-- end of benchmark -->

The first word is the file in benchmarks/results. The second word is a key of `SUMMARIES`, or ``beside_others``, or
``machines``, which also reads other files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.__main__ import BENCHMARKS, load
from benchmarks.harness import Result
from benchmarks.kept import RESULTS

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

BEGIN = re.compile(r"^<!-- benchmark: (?P<file>\w+) (?P<name>\w+) -->$")
END = "<!-- end of benchmark -->"

# The beginning of the page of a run.
PREFACE = """\
<!-- Over 1,500 words: all tables of a run, written by `python -m benchmarks.tables --write`. -->
# {run}

`{run}.json` has every round. Each cell here has the median of the rounds, with the lowest and the highest.
"TensorPipe" has its default transports, and "TensorPipe, uv" those for networks. In each round, the ratio is that of
UCX to the better of the two, unless the row names another. UCX over TCP is compared with uv. "must" and "aim" are the
project's own bounds for the ratio."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A figure of a summary."""

    title: str
    benchmark: str
    figure: str
    unit: str = ""
    contender: str = "UCX"
    # The ratio is to this contender, or to the best of several.
    reference: str | tuple[str, ...] = harness.TENSORPIPES
    # If set, the run of another machine instead of the table's.
    run: str = ""

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


@dataclasses.dataclass(frozen=True)
class Summary:
    """A table with a row for each figure and a column for each contender.

    Without ``contenders`` the columns are the row's own contender and its reference.
    """

    rows: tuple[Row, ...]
    contenders: tuple[str, ...] = ()
    has_spread: bool = False

    @property
    def ratio_heading(self) -> str:
        match [*{row.reference for row in self.rows if row.reference}]:
            case [harness.TENSORPIPES]:
                return "ratio to the better TensorPipe"
            case [str(one)]:
                return f"ratio to {one}"
            case _:
                return "ratio"


UCX, TENSORPIPE, TENSORPIPE_UV, UCX_TCP = "UCX", "TensorPipe", "TensorPipe, uv", "UCX, tcp"
ON_ONE_HOST = (UCX, TENSORPIPE, TENSORPIPE_UV)

NO_ARGUMENT = Row("`rpc_sync` without arguments, median", "small_calls", "no-argument function, p50", "us")
NO_ARGUMENT_P99 = Row("the same, 99th percentile", "small_calls", "no-argument function, p99", "us")
ONE_KB = Row("`rpc_sync`, echo of 1 KB, median", "small_calls", "echo of 1 KB, p50", "us")
RATE = Row("`rpc_async`, calls per second", "small_calls", "asynchronous calls")
LARGE = Row("echo of 64 MiB, both ways", "large_tensors", "echo of 64 MiB, both ways", "GiB/s")
SERVER = Row("autograd step, parameter server", "parameter_server", "parameter server, a step", "us")
PIPELINE = Row("autograd step, pipeline", "pipeline", "pipeline, a step", "us")

SUMMARIES = {
    "headline": Summary(
        (
            Row("small call over shared memory", "small_calls", "no-argument function, p50", "us"),
            Row("small call over TCP", "small_calls", "no-argument function, p50", "us", UCX_TCP, TENSORPIPE_UV),
            Row("64 workers, from start to shutdown", "life", "64 workers, in sum", "s"),
            Row(
                "echo of 1 MiB on an H100",
                "device_tensors",
                "echo of 1 MiB, both ways",
                "GiB/s",
                run="h100_mps",
            ),
            Row(
                "small call on a machine that wakes threads slowly",
                "small_calls",
                "no-argument function, p50",
                "us",
                run="two_slow_cores",
            ),
        ),
        has_spread=True,
    ),
    "calls": Summary(
        (
            NO_ARGUMENT,
            NO_ARGUMENT_P99,
            ONE_KB,
            RATE,
            LARGE,
            Row("small call beside 64 MiB, median", "beside_large", "small call beside 64 MiB, p50", "us"),
            Row("300 calls of 1 MiB at once", "in_flight", "300 calls of 1 MiB, the first time", "GiB/s"),
            SERVER,
            PIPELINE,
            Row("idle worker, CPU time", "idle", "CPU time of an idle worker", "%", reference=()),
        ),
        (UCX, UCX_TCP, TENSORPIPE, TENSORPIPE_UV),
    ),
    "jobs": Summary(
        (
            Row("2 workers, forked", "life", "2 workers, in sum", "s"),
            Row("24 workers, forked", "life", "24 workers, in sum", "s"),
            Row("64 workers, forked", "life", "64 workers, in sum", "s"),
            Row("24 workers, from the command to the end", "launched", "24 workers", "s"),
        ),
        ON_ONE_HOST,
    ),
    "gpu": Summary(
        (
            Row("echo of 4 KiB, median", "device_tensors", "echo of 4 KiB, p50", "us"),
            Row("echo of 1 MiB, both ways", "device_tensors", "echo of 1 MiB, both ways", "GiB/s"),
            Row("echo of 1 GiB, both ways", "device_tensors", "echo of 1 GiB, both ways", "GiB/s"),
        ),
        (UCX, TENSORPIPE),
    ),
    "libraries": Summary(
        (
            Row("call of a service by name, to `rpc_sync`", "services", "call to rpc_sync", reference=()),
            Row("gradients of 1 MB, 4 trainers", "reduction", "1 MB", "ms", reference="gloo's DDP"),
            Row("gradients of 100 MB, 4 trainers", "reduction", "100 MB", "ms", reference="gloo's DDP"),
            Row(
                "step of the tutorial's pipeline",
                "pipelines",
                "a step of the tutorial's model, 6 micro-batches",
                "ms",
                "ours, UCX",
                "tutorial, UCX",
            ),
            Row(
                "the same",
                "pipelines",
                "a step of the tutorial's model, 6 micro-batches",
                "ms",
                "ours, UCX",
                "torch pipelining, gloo",
            ),
            Row(
                "step in which a pipeline's worker dies",
                "recovery",
                "a step in which a stage is killed and a spare takes over",
                "s",
                reference=(),
            ),
        )
    ),
    "arrays_sent": Summary(
        (
            Row("echo of 1 KB, median", "arrays", "echo of 1 KB, p50", "us"),
            Row("echo of 1 MiB, median", "arrays", "echo of 1 MiB, p50", "us"),
            Row("echo of 64 MiB, both ways", "arrays", "echo of 64 MiB, both ways", "GiB/s"),
        ),
        (*ON_ONE_HOST, "UCX, pickled"),
    ),
    "updates": Summary(
        (
            Row("updates per second", "native_updates", "updates", reference="UCX, Python"),
            Row(
                "the same while Python is busy",
                "native_updates",
                "updates while Python is busy",
                reference="UCX, Python",
            ),
        ),
        (UCX, "UCX, Python", "TensorPipe, native", TENSORPIPE, TENSORPIPE_UV),
    ),
}
# The table ``machines`` has a column for each of these runs.
MACHINES = {"two_cores": "two cores", "one_core": "one core", "two_slow_cores": "two slow cores"}
ON_MACHINES = (NO_ARGUMENT, ONE_KB, RATE, LARGE, SERVER)
# The figures of the table ``beside_others``, which has a row for each library.
BESIDE_OTHERS = {"1 KB": "1 KB, us", "64 MiB": "64 MiB, us"}


@dataclasses.dataclass(frozen=True)
class Claim:
    """A sentence of the README's list, and the limit of the ratio that it claims."""

    words: str
    benchmark: str
    figures: tuple[str, ...]
    limit: float
    reference: str | tuple[str, ...] = harness.TENSORPIPES
    run: str = "two_cores"


SMALL_CALLS = (
    "no-argument function, p50",
    "no-argument function, p99",
    "torch.add of 1 element, p50",
    "echo of 1 KB, p50",
)
CLAIMS = (
    Claim("A small call takes less than a third of TensorPipe's time", "small_calls", SMALL_CALLS, 1 / 3),
    Claim(
        "up to 0.6 of it on a machine that wakes threads slowly", "small_calls", SMALL_CALLS, 0.6, run="two_slow_cores"
    ),
    Claim(
        "large tensors travel at more than half of the speed of a memcpy",
        "large_tensors",
        ("echo of 64 MiB, both ways",),
        0.55,
        "memcpy",
    ),
    Claim("64 workers on two cores takes less than half of TensorPipe's time", "life", ("64 workers, in sum",), 0.5),
)


class NotMeasured(LookupError):
    """The results lack a run, or the run lacks a benchmark."""


class Run:
    """A file of benchmarks/results."""

    def __init__(self, name: str) -> None:
        file = RESULTS / f"{name}.json"
        if not file.exists():
            raise NotMeasured(f"there is no run {name}: tools/record_benchmarks.sh")
        self.kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        self.name = name

    def result(self, benchmark: str) -> Result:
        if benchmark not in self.kept["rounds"]:
            raise NotMeasured(f"the run {self.name} has no {benchmark}: tools/record_benchmarks.sh")
        failures = self.kept.get("failures", {}).get(benchmark, {})
        return Result(load(benchmark), self.kept["rounds"][benchmark], failures)

    def lines(self, name: str) -> Iterator[str]:
        """Yield the lines of the table with this name in the README and the docs."""
        if name == "beside_others":
            yield from self.beside_others()
        elif name == "machines":
            yield from machines()
        elif name in SUMMARIES:
            yield from self.summary(SUMMARIES[name])
        else:
            raise ValueError(f"a table must be beside_others, machines or one of {', '.join(SUMMARIES)}; got {name!r}")

    def page(self) -> str:
        """Return the text of a page with all tables of the run."""
        names = [name for name in BENCHMARKS if name in self.kept["rounds"]]
        sections = {"circumstances": self.circumstances(), "bounds": self.bounds()}
        sections |= {name: harness.table(self.result(name)) for name in names}
        parts = ([f"## {name}", "", *lines] for name, lines in sections.items())
        return "\n\n".join([PREFACE.format(run=self.name), *("\n".join(lines) for lines in parts)]) + "\n"

    def broken(self, claim: Claim) -> Iterator[str]:
        """Yield the figures that contradict the claim."""
        result = self.result(claim.benchmark)
        for figure in result.benchmark.figures:
            ratio = result.ratio(figure, harness.Bound(None, reference=claim.reference))
            if figure.name in claim.figures and (ratio is None or not figure.holds(ratio, claim.limit)):
                yield f"{claim.words!r}: {figure.name} is at {ratio}"

    def summary(self, summary: Summary) -> Iterator[str]:
        columns = summary.contenders or ("measured", "compared with")
        yield f"| | {' | '.join(columns)} | {summary.ratio_heading} |"
        yield "|---|" + "---:|" * (len(columns) + 1)
        for row in summary.rows:
            result, figure = self.measured(row)
            cells = [cell(result, name, row.figure, summary.has_spread) for name in summary.contenders]
            if not summary.contenders:
                references = (row.reference,) if isinstance(row.reference, str) else row.reference
                others = {name: result.values(name, row.figure) for name in references}
                best = max if figure.more_is_better else min
                other = best(
                    (name for name in others if others[name]), key=lambda n: statistics.median(others[n]), default=""
                )
                compared = f"{other}: {cell(result, other, row.figure, summary.has_spread)}" if other else ""
                cells = [cell(result, row.contender, row.figure, summary.has_spread), compared]
            yield f"| {row.heading} | {' | '.join(cells)} | {self.ratio(row)} |"

    def measured(self, row: Row) -> tuple[Result, harness.Figure]:
        result = (Run(row.run) if row.run else self).result(row.benchmark)
        figure = next((figure for figure in result.benchmark.figures if figure.name == row.figure), None)
        if figure is None:
            raise NotMeasured(f"{row.benchmark} has no figure {row.figure!r}")
        return result, figure

    def ratio(self, row: Row) -> str:
        result, figure = self.measured(row)
        bound = harness.Bound(None, reference=row.reference, contender=row.contender)
        ratio = result.ratio(figure, bound) if row.reference else None
        return "" if ratio is None else harness.number(ratio)

    def beside_others(self) -> Iterator[str]:
        result = self.result("others")
        yield f"| | {' | '.join(BESIDE_OTHERS.values())} |"
        yield "|---|" + "---:|" * len(BESIDE_OTHERS)
        for name in result.rounds:
            yield f"| {name} | {' | '.join(cell(result, name, figure) for figure in BESIDE_OTHERS)} |"

    def bounds(self) -> Iterator[str]:
        verdicts = [verdict for name in self.kept["rounds"] for verdict in self.result(name).verdicts()]
        missed = [verdict for verdict in verdicts if not verdict.holds]
        yield f"{len(verdicts) - len(missed)} of {len(verdicts)} bounds hold{'; missed are:' if missed else '.'}"
        if missed:
            yield from ("", "| missed | |", "|---|---|")
            for verdict in missed:
                figure, _, found = str(verdict).rpartition(": ")
                yield f"| {figure} | {found} |"

    def circumstances(self) -> Iterator[str]:
        facts = self.kept["circumstances"]
        measured = self.kept["measured"].values()
        loads = [load for one in measured for load in one["load before and after"]]
        yield from ("| measured | |", "|---|---|")
        yield f"| machine | {facts['processor']}, {facts['cores']} of its cores, {facts['memory_gib']:g} GiB |"
        if "gpu" in facts:
            yield f"| GPU | {facts['gpu']} |"
        yield f"| load, from first to last | {loads[0]:.1f} to {loads[-1]:.1f} |"
        yield f"| system | {facts['system']} |"
        yield f"| versions | torch {facts['torch']}, UCX {facts['ucx']}, Python {facts['python']} |"
        commits: dict[str, list[str]] = {}
        for name, one in self.kept["measured"].items():
            commits.setdefault(f"{one['commit']}, {one['date']}", []).append(name)
        most = max(commits, key=lambda commit: len(commits[commit]))
        yield f"| commit | {most} |"
        for commit, names in commits.items():
            if commit != most:
                yield f"| commit of {', '.join(names)} | {commit} |"


def machines() -> Iterator[str]:
    """Yield the lines of a table with a column for each run: UCX's figures, with the ratios to TensorPipe."""
    runs = [Run(name) for name in MACHINES]
    yield f"| | {' | '.join(MACHINES.values())} |"
    yield "|---|" + "---:|" * len(runs)
    for row in ON_MACHINES:
        cells = [f"{cell(run.result(row.benchmark), UCX, row.figure)} ({run.ratio(row)})" for run in runs]
        yield f"| {row.heading} | {' | '.join(cells)} |"


def cell(result: Result, contender: str, figure: str, has_spread: bool = False) -> str:
    """Return the median, with the lowest and the highest if asked for. It is empty for a contender that was not
    measured."""
    values = result.values(contender, figure)
    if not values:
        return "failed" if contender in result.failures else ""
    return harness.spread(values) if has_spread else harness.number(statistics.median(values))


def written(text: str, *, missing: list[str] | None = None) -> str:
    """Return the text of a page with the tables from the results.

    Raises `NotMeasured` for a table that the results lack. With ``missing`` the table stays, and the reason is added
    there.
    """
    runs: dict[str, Run] = {}
    lines: list[str] = []
    inside: str | None = None
    stays = False
    for line in text.splitlines():
        begin = BEGIN.match(line)
        if inside is None:
            lines.append(line)
            if begin:
                inside, stays = line, False
                try:
                    run = runs.setdefault(begin["file"], Run(begin["file"]))
                    lines += run.lines(begin["name"])
                except NotMeasured as error:
                    if missing is None:
                        raise
                    missing.append(f"{begin['file']} {begin['name']}: {error}")
                    stays = True
        elif begin:
            raise ValueError(f"{inside} has no {END} before {line}")
        elif line == END:
            lines.append(line)
            inside = None
        elif stays:
            lines.append(line)
    if inside is not None:
        raise ValueError(f"{inside} has no {END}")
    return "\n".join(lines) + "\n"


def written_pages(missing: list[str] | None = None) -> Iterator[tuple[Path, str]]:
    """Yield each page with figures, and its text from the results."""
    for results in sorted(RESULTS.glob("*.json")):
        yield results.with_suffix(".md"), Run(results.stem).page()
    for page in PAGES:
        yield page, written(page.read_text(encoding="utf-8"), missing=missing)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    arguments = parser.parse_args()
    missing: list[str] = []
    status = 0
    for page, text in written_pages(missing):
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        if arguments.write:
            page.write_text(text, encoding="utf-8")
        status = status if arguments.write else 1
        print(f"{page.relative_to(ROOT)} {'is written' if arguments.write else 'differs from the results'}")
    for table in missing:
        print(f"a page keeps its table {table}")
    return 1 if missing else status


if __name__ == "__main__":
    sys.exit(main())
