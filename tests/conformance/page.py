"""docs/conformance.md, from stored results.

    python tests/conformance/page.py record REPORT...    stores the runs of one configuration, and renders
    python tests/conformance/page.py render              renders what is stored

The reports are those of ``pytest tests/conformance --conformance-report FILE``; `make conformance` does all of it. The
page follows from the results and from _equivalents.py alone, not from the machine it is rendered on.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Iterable, Iterator
from pathlib import Path

from _equivalents import EQUIVALENTS
from _results import COUNTED, Data, amount, record, stored

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "conformance.md"


def page(suites: Data, results: list[Data]) -> str:
    return "\n".join(lines_of_page(suites, results)) + "\n"


def lines_of_page(suites: Data, results: list[Data]) -> Iterator[str]:
    lists = suites["lists"]
    yield from INTRODUCTION.format(torch=suites["torch"]).splitlines()
    yield from table(("configuration", "torch", "UCX", "runs", *COUNTED, "date", "commit"), map(run_row, results))
    yield from ("", "## Suite by suite")
    for listed, explanation in LISTS_ON_THE_PAGE.items():
        yield from ("", f"### {listed}", "", *explanation.splitlines(), "")
        yield from side_by_side(lists[listed], results)
    yield from ("", "## Not passed", "")
    yield from exceptions(results) or ["Nothing of what was run."]
    for listed, fate in FATES.items():
        on_ucx = first_that_ran(lists[listed], results, "UCX")
        yield from ("", f"## {listed}, test by test", "")
        fates = {suite: {test: fate(on_ucx, suite, test) for test in tests} for suite, tests in lists[listed].items()}
        yield from one_by_one(fates)


def side_by_side(suites: Data, results: list[Data]) -> Iterator[str]:
    header = ("suite", "tests", "**UCX** collected", *COUNTED[1:], "**TensorPipe** collected", *COUNTED[1:])
    pair = [first_that_ran(suites, results, backend) for backend in ("UCX", "TENSORPIPE")]
    rows = [
        (suite, len(tests), *(count for result in pair for count in counts(result, suite)))
        for suite, tests in suites.items()
    ]
    totals = map(add, list(zip(*rows, strict=True))[1:])
    return table(header, [*rows, ("**all**", *totals)])


def exceptions(results: list[Data]) -> list[str]:
    expected = [(test, "not collected") for test in EQUIVALENTS]
    tests = collections.defaultdict(list)
    for result in results:
        for test, how in result["not passed"].items():
            if (test, how) not in expected:
                tests[f"- {describe(result['configuration'])}, {how}:"].append(f"`{test}`")
    return ["\n  ".join([where_and_how, *names]) for where_and_how, names in tests.items()]


def one_by_one(fates: dict[str, dict[str, tuple[str, str]]]) -> Iterator[str]:
    kinds = collections.Counter(kind for of_suite in fates.values() for kind, _ in of_suite.values())
    yield "; ".join(f"{number} {kind}" for kind, number in kinds.items()) + "."
    for suite, of_suite in fates.items():
        yield from ("", f"### {suite}", "")
        yield from table(("test", "on UCX"), ((f"`{test}`", text) for test, (_, text) in of_suite.items()))


INTRODUCTION = """\
<!-- Over 1,500 words: written by `make conformance`, with a row for each test. -->
# Conformance

Every wheel of torch contains suites that test RPC agents. Here they run, unedited, on UCX and on TensorPipe, PyTorch's
own agent. `make conformance` runs them and writes this page from
[tests/conformance/results](../tests/conformance/results). The suites are those of torch {torch}.

A test counts as passed if it ran to its end and passed in each of the runs. Skipped tests, tests that are covered by a
test of this project, and tests that need absent GPUs are counted as such. A dash stands for a suite that was not run.

A test of this project that covers one of torch's must exist, by its name. No check compares the assertions of the two.

## Differences from torch's own runs

For both backends:

- The processes come from a fork server that has imported torch, instead of importing it each.
- No DistributedDataParallel is destroyed before its process ends. Its destruction deadlocks in torch, whatever the
  agent: `~Reducer` holds the GIL and waits, in `std::thread::join` below `~ProcessGroupGloo`, for Gloo's thread; that
  thread waits for the GIL, in `take_gil` below the destructor of an `AsyncAllreduceWork`, to release a tensor.
  `DdpComparisonTest.test_ddp_comparison` can still hang by it: 3 of 10 runs did on a machine busy with other work. The
  faster the RPC part, the likelier it is. A hang with these two stacks says nothing of the agent.
- `TORCH_DIST_INIT_BARRIER=1` makes `init_process_group` return when it is done on every rank. DdpUnderDistAutogradTest
  takes that for granted: with trainers that are 50 ms late it fails on TensorPipe too.
- A test may take 150 s instead of torch's 300 (`DISTRIBUTED_TESTS_DEFAULT_TIMEOUT`).
- A test that hangs prints the stacks of all its processes, C++ included, instead of torch's Python stacks.

For UCX alone:

- The fixture names `BackendType.UCX` where TensorPipe's names its own. For both backends a
  timeout must read "RPC ran for more than", and an error after a shutdown may read anything.
- FAULTY_AGENT_TESTS ask for `BackendType.FAULTY_TENSORPIPE` by name. The fixture overwrites the value of that member
  with the one of `FAULTY_UCX`, so that the name leads to this backend's faulty agent.
- TENSORPIPE_TESTS run after `torch_ucx_rpc.replace_tensorpipe()`, by which programs written for TensorPipe run on UCX.

## Runs

UCX chooses its transports itself, shared memory on one machine, unless a variable in the first column says otherwise.

"""

LISTS_ON_THE_PAGE = {
    "GENERIC_TESTS": "Tests for any agent.",
    "TENSORPIPE_TESTS": """\
Tests for TensorPipe's agent only. On UCX they run with UCX's options in the place of TensorPipe's. Tests of this
project cover the rest. [Test by test](#tensorpipe_tests-test-by-test).""",
    "FAULTY_AGENT_TESTS": "Tests with messages that get lost or come late.",
    "GENERIC_CUDA_TESTS": "Tests for any agent with GPUs. [Test by test](#generic_cuda_tests-test-by-test).",
    "TENSORPIPE_CUDA_TESTS": """\
Tests for TensorPipe's agent with GPUs: device maps and streams.
[Test by test](#tensorpipe_cuda_tests-test-by-test).""",
}


def run_row(result: Data) -> tuple:
    runs = result["runs"]
    totals = [sum(suite[name] for suite in result["suites"].values()) for name in COUNTED]
    clean = all({"passed", "skipped"}.issuperset(run["outcomes"]) for run in runs)
    dates = sorted({run["started"][:10] for run in runs})
    return (
        describe(result["configuration"]),
        result["versions"]["torch"],
        result["versions"].get("ucx", "-"),
        f"{len(runs)}, " + ("all clean" if clean else "not all clean"),
        *totals,
        " to ".join(dict.fromkeys((dates[0], dates[-1]))),
        result.get("commit", "not recorded"),
    )


def describe(configuration: Data) -> str:
    """UCX, UCX_TLS=tcp,self, 2 cores."""
    backend = {"UCX": "UCX", "TENSORPIPE": "TensorPipe"}[configuration["backend"]]
    variables = [f"`{name}={value}`" for name, value in configuration["environment"].items()]
    places = [amount(configuration, name) for name in ("cores", "gpus") if configuration[name]]
    return ", ".join([backend, *variables, *places])


def first_that_ran(suites: Iterable[str], results: list[Data], backend: str) -> Data | None:
    ran = (result for result in results if set(suites) & set(result["suites"]))
    return next((result for result in ran if result["configuration"]["backend"] == backend), None)


def counts(result: Data | None, suite: str) -> list:
    there = result is not None and suite in result["suites"]
    return [result["suites"][suite][name] if there else "-" for name in COUNTED]


def add(column: tuple) -> object:
    numbers = [number for number in column if number != "-"]
    return sum(numbers) if numbers else "-"


def fate_of_tensorpipe_test(on_ucx: Data | None, suite: str, test: str) -> tuple[str, str]:
    """What kind of fate, to be counted; and the whole of it."""
    return fate_where_run(on_ucx, suite, test, "passed with UCX's options in place of TensorPipe's", "not run")


def fate_of_cuda_test(on_ucx: Data | None, suite: str, test: str) -> tuple[str, str]:
    return fate_where_run(on_ucx, suite, test, "passed", "needs GPUs, not run here")


def fate_where_run(on_ucx: Data | None, suite: str, test: str, passed: str, otherwise: str) -> tuple[str, str]:
    if covered := EQUIVALENTS.get(f"{suite}.{test}"):
        ours = covered["equivalent"]
        text = f"covered by [{ours}](../{ours.partition('::')[0]}): {covered['reason']}"
        return "covered by a test of our own", text
    if on_ucx is None or suite not in on_ucx["suites"]:
        return otherwise, otherwise
    how = on_ucx["not passed"].get(f"{suite}.{test}", passed)
    return (passed, passed) if how == passed else (how.split(maxsplit=1)[0].rstrip(":"), how)


FATES = {
    "TENSORPIPE_TESTS": fate_of_tensorpipe_test,
    "GENERIC_CUDA_TESTS": fate_of_cuda_test,
    "TENSORPIPE_CUDA_TESTS": fate_of_cuda_test,
}


def table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    header = list(header)
    for row in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="store the runs of one configuration, and render")
    recording.add_argument("reports", nargs="+", type=Path)
    commands.add_parser("render", help="write docs/conformance.md from what is stored")
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.reports)
    PAGE.write_text(page(*stored()), encoding="utf-8")


if __name__ == "__main__":
    main()
