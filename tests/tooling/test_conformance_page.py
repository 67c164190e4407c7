"""docs/conformance.md agrees with the stored results and with torch's suites."""

from __future__ import annotations

import ast

import pytest

from tests.conformance import _results, page
from tests.conformance._equivalents import EQUIVALENTS

from ._tools import ROOT

SUITES, RESULTS = _results.stored()
TESTS = {f"{suite}.{test}" for suites in SUITES["lists"].values() for suite, tests in suites.items() for test in tests}
UCX = {"backend": "UCX", "environment": {}, "cores": 2, "gpus": 0}


def report(**outcomes: list[str]) -> dict:
    """The report of one run of a suite with these tests."""
    return {
        "configuration": UCX,
        "versions": {"torch": "2.13.0+cpu", "ucx": "1.22.0"},
        "started": "2026-01-01T00:00:00Z",
        "seconds": 1,
        "complete": True,
        "outcomes": {"RpcTest": outcomes},
    }


def condensed(*reports: dict) -> dict:
    return _results.condensed(list(reports), {"GENERIC_TESTS": {"RpcTest": ["test_a", "test_b"]}})


def test_the_page_matches_the_results():
    assert page.PAGE.read_text(encoding="utf-8") == page.page(SUITES, RESULTS), (
        "run: python -m tests.conformance.page render"
    )


def test_the_page_is_about_the_suites_of_this_torch():
    from tests.conformance import _suites

    if _suites.installed_release() != SUITES["torch"]:
        pytest.skip(f"the page is about torch {SUITES['torch']}")
    assert _suites.installed_suites() == SUITES["lists"], "run: tools/conformance.sh"


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: _results.file_name(result["configuration"]))
def test_every_result_is_of_whole_suites_of_that_torch(result):
    # A machine with a GPU may have another torch, whose suites must have the same tests.
    assert result["versions"]["torch"].partition("+")[0] == SUITES["torch"] or result["configuration"]["gpus"]
    sizes = {suite: len(tests) for suites in SUITES["lists"].values() for suite, tests in suites.items()}
    left_out = [test for test, how in result["not passed"].items() if how == "not collected"]
    for suite, counts in result["suites"].items():
        assert counts["collected"] + sum(test.startswith(f"{suite}.") for test in left_out) == sizes[suite]
    assert set(left_out) <= set(EQUIVALENTS)
    assert set(result["not passed"]) <= TESTS


@pytest.mark.parametrize("name", EQUIVALENTS)
def test_each_equivalent_of_a_test_of_torch_exists(name):
    assert name in TESTS
    file, *path = EQUIVALENTS[name]["equivalent"].partition("[")[0].split("::")
    node: ast.AST = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for part in path:
        node = next((child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part), None)
        assert node is not None, f"{file} has no {part}"
    assert path


def test_of_several_runs_the_worst_counts():
    result = condensed(
        report(test_a=["passed", ""], test_b=["passed", ""]),
        report(test_a=["failed", "RuntimeError: no"], test_b=["skipped", "no GPU"]),
        report(test_a=["skipped", ""], test_b=["passed", ""]),
    )
    assert result["suites"]["RpcTest"] == {"collected": 2, "passed": 0, "skipped": 1, "failed": 1}
    assert result["not passed"] == {
        "RpcTest.test_a": "failed in 1 of 3 runs: RuntimeError: no",
        "RpcTest.test_b": "skipped in 1 of 3 runs: no GPU",
    }
