"""Writes the tables of the README and the docs from what ``python -m benchmarks --record NAME`` has kept.

    python -m benchmarks.tables             say which tables differ from the results; ends with 1 if one does
    python -m benchmarks.tables --write     write them

A table stands between two lines, and nobody edits what is between them::

    <!-- benchmark: two_cores small_calls -->
    <!-- end of benchmark -->

The first word is the file in benchmarks/results, the second one of its benchmarks, or ``headline`` for the table of the
README, ``bounds`` for what is missed and how much holds, ``circumstances`` for the machine, versions and commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness, jobs
from benchmarks.__main__ import load
from benchmarks.harness import Result
from benchmarks.kept import RESULTS

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

BEGIN = re.compile(r"^<!-- benchmark: (?P<file>\w+) (?P<name>\w+) -->$")
END = "<!-- end of benchmark -->"


@dataclasses.dataclass(frozen=True)
class Headline:
    """A row of the README's table."""

    title: str
    benchmark: str
    figure: str
    unit: str
    scale: float = 1.0


HEADLINES = (
    Headline("`rpc_sync`, no-argument function, median", "small_calls", "no-argument function, p50", "us"),
    Headline("the same, 99th percentile", "small_calls", "no-argument function, p99", "us"),
    Headline("`rpc_sync`, `torch.add` on 1 element, median", "small_calls", "torch.add of 1 element, p50", "us"),
    Headline("`rpc_sync`, echo of a 1 KB tensor, median", "small_calls", "echo of 1 KB, p50", "us"),
    Headline("`rpc_async`, calls per second", "small_calls", "asynchronous calls", ""),
    Headline("echo of 64 MiB, both ways", "large_tensors", "echo of 64 MiB, both ways", "GiB/s"),
    Headline("24 workers: start, init, first call of all pairs, shutdown", "life", "24 workers, in sum", "s"),
    Headline("64 workers, the same", "life", "64 workers, in sum", "s"),
)


@dataclasses.dataclass(frozen=True)
class Claim:
    """A sentence of the README's list, and the ratio that it stands for, as a limit."""

    words: str
    benchmark: str
    figures: tuple[str, ...]
    limit: float
    reference: str | tuple[str, ...] = harness.TENSORPIPES


MEMCPY = "memcpy"

CLAIMS = (
    Claim(
        "A small call takes less than a third of TensorPipe's time",
        "small_calls",
        ("no-argument function, p50", "no-argument function, p99", "torch.add of 1 element, p50", "echo of 1 KB, p50"),
        1 / 3,
    ),
    Claim(
        "Large tensors travel at more than half of the speed of a memcpy",
        "large_tensors",
        ("echo of 64 MiB, both ways",),
        0.55,
        "memcpy",
    ),
    Claim("64 workers on two cores takes about half of TensorPipe's time", "life", ("64 workers, in sum",), 0.55),
)


class NotMeasured(LookupError):
    """The results have no such run, or the run no such benchmark."""


class Run:
    """A file of benchmarks/results."""

    def __init__(self, name: str) -> None:
        file = RESULTS / f"{name}.json"
        if not file.exists():
            raise NotMeasured(f"there is no run {name}: make bench-record")
        self.kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        self.name = name

    def result(self, benchmark: str) -> Result:
        if benchmark not in self.kept["rounds"]:
            raise NotMeasured(f"the run {self.name} has no {benchmark}: make bench-record")
        failures = self.kept.get("failures", {}).get(benchmark, {})
        return Result(load(benchmark), self.kept["rounds"][benchmark], failures)

    def lines(self, name: str) -> Iterator[str]:
        """What belongs between the two lines of this name."""
        if name == "headline":
            yield from self.headline()
        elif name == "bounds":
            yield from self.bounds()
        elif name == "circumstances":
            yield from self.circumstances()
        else:
            yield from harness.table(self.result(name))

    def broken(self, claim: Claim) -> Iterator[str]:
        """The figures that do not bear the claim out."""
        result = self.result(claim.benchmark)
        for figure in result.benchmark.figures:
            ratio = result.ratio(figure, harness.Bound(None, reference=claim.reference))
            if figure.name in claim.figures and (ratio is None or not figure.holds(ratio, claim.limit)):
                yield f"{claim.words!r}: {figure.name} is at {ratio}"

    def headline(self) -> Iterator[str]:
        names = [transport.name for transport in jobs.ON_ONE_HOST]
        yield f"| | {' | '.join(names)} | ratio to the better |"
        yield "|---|" + "---:|" * (len(names) + 1)
        for row in HEADLINES:
            result = self.result(row.benchmark)
            figure = next(figure for figure in result.benchmark.figures if figure.name == row.figure)
            # Over its shared memory TensorPipe's jobs of 64 do not come up, and are not tried.
            missing = {name: "failed" if name in result.failures else "" for name in names}
            measured = {name: result.values(name, figure.name) for name in names}
            cells = [harness.spread(measured[name]) if measured[name] else missing[name] for name in names]
            ratio = result.ratio(figure, harness.Bound(None))
            title = f"{row.title}, {row.unit}" if row.unit else row.title
            yield f"| {title} | {' | '.join(cells)} | {'' if ratio is None else harness.number(ratio)} |"

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


def written(text: str, *, missing: list[str] | None = None) -> str:
    """The text of a page with its tables as the results give them.

    Raises `NotMeasured` for a table that the results do not have; with ``missing`` it stays, and the reason is added.
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


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    arguments = parser.parse_args()
    status = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        missing: list[str] = []
        new = written(text, missing=missing)
        for table in missing:
            print(f"{page.relative_to(ROOT)} keeps its table {table}")
            status = 1
        if new != text and arguments.write:
            page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(ROOT)} is written")
        elif new != text:
            print(f"{page.relative_to(ROOT)} differs from the results")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
