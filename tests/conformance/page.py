"""docs/conformance.md, from stored results.

    python -m tests.conformance.page record REPORT...    stores the runs of one configuration, and renders
    python -m tests.conformance.page render              renders the stored results

``pytest tests/conformance --conformance-report FILE`` writes a report. tools/conformance.sh does all of this.
The page depends only on the results and on _equivalents.py, not on the machine that renders it.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Iterable, Iterator
from pathlib import Path

from ._equivalents import EQUIVALENTS
from ._results import Data, amount, record, stored

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "conformance.md"

HEADER = ("configuration", "torch", "runs", "passed", "skipped", "failed", "why not passed", "date")

INTRODUCTION = """\
# Conformance

torch {torch} contains {suites} suites with {tests} tests of RPC agents, {gpu} of them for GPUs. They run here,
unedited, on UCX and on TensorPipe. A test counts as passed if it passed in every run. {covered} tests demand TensorPipe
itself, and [tests of this project](../tests/conformance/_equivalents.py) stand in for them.

"""

CONCLUSION = """\

[The data](../tests/conformance/results) name each test that did not pass, and the commits. The runs differ from torch's
own in [a few ways](../tests/conformance/README.md).

To run the suites yourself:

```sh
make test-conformance                                # on UCX
make test-conformance BACKEND=TENSORPIPE
tools/conformance.sh --runs 3                        # and write this page
```
"""


def page(suites: Data, results: list[Data]) -> str:
    tests = [test for suites_of_list in suites["lists"].values() for tests in suites_of_list.values() for test in tests]
    number = sum(map(len, suites["lists"].values()))
    gpu = sum(len(tests) for name, some in suites["lists"].items() if "CUDA" in name for tests in some.values())
    introduction = INTRODUCTION.format(
        torch=suites["torch"], suites=number, tests=len(tests), gpu=gpu, covered=len(EQUIVALENTS)
    )
    return introduction + "\n".join(table(HEADER, map(row, results))) + "\n" + CONCLUSION


def row(result: Data) -> tuple:
    runs = result["runs"]
    passed, skipped, failed = (
        sum(suite[outcome] for suite in result["suites"].values()) for outcome in ("passed", "skipped", "failed")
    )
    dates = sorted({run["started"][:10] for run in runs})
    return (
        describe(result["configuration"]),
        result["versions"]["torch"],
        len(runs),
        passed,
        skipped,
        failed,
        "; ".join(reasons(result)),
        " to ".join(dict.fromkeys((dates[0], dates[-1]))),
    )


def reasons(result: Data) -> Iterator[str]:
    """Return the reasons of skips and failures, with the number of tests. Tests of this project cover the rest."""
    counted = collections.Counter(
        how.removeprefix("skipped: ") for test, how in result["not passed"].items() if test not in EQUIVALENTS
    )
    return (f"{number}: {reason}" for reason, number in counted.items())


def describe(configuration: Data) -> str:
    """Return a text such as "UCX, UCX_TLS=tcp,self, 2 cores"."""
    backend = {"UCX": "UCX", "TENSORPIPE": "TensorPipe"}[configuration["backend"]]
    variables = [f"`{name}={value}`" for name, value in configuration["environment"].items()]
    places = [amount(configuration, name) for name in ("cores", "gpus") if configuration[name]]
    return ", ".join([backend, *variables, *places])


def table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    header = list(header)
    for row in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="store the runs of one configuration, and render")
    recording.add_argument("reports", nargs="+", type=Path)
    commands.add_parser("render", help="write docs/conformance.md from the stored results")
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.reports)
    PAGE.write_text(page(*stored()), encoding="utf-8")


if __name__ == "__main__":
    main()
