"""What CI expects of a run of tests is enforced: the number that pass, and which may be skipped."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "setup.cfg").exists())
PROGRAM = ROOT / "tools" / "check_tests.py"

MAY_SKIP = {r".*test_cuda\b.*": "needs a GPU|needs rmm"}


@pytest.fixture(scope="module")
def check_tests() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_tests", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(*cases: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")


def case(name: str, inside: str = "") -> str:
    return f'<testcase classname="tests.e2e.{name.partition(" ")[0]}" name="{name}">{inside}</testcase>'


PASSED = case("test_calls one")


@pytest.mark.parametrize(
    ("cases", "problem"),
    [
        ((PASSED, PASSED), ""),
        ((PASSED,), "1 tests passed, fewer than the 2"),
        ((PASSED, PASSED, case("test_cuda x", '<skipped message="needs a GPU"/>')), ""),
        ((PASSED, PASSED, case("test_cuda x", '<skipped message="not today"/>')), "test_cuda x was skipped"),
        ((PASSED, PASSED, case("test_calls x", '<skipped message="needs a GPU"/>')), "test_calls x was skipped"),
        ((PASSED, PASSED, case("test_calls x", '<failure message="no"/>')), "test_calls x failed"),
        ((), "0 tests passed"),
    ],
)
def test_what_is_missing_or_skipped_is_told(check_tests: ModuleType, cases: tuple[str, ...], problem: str) -> None:
    found = list(check_tests.problems(report(*cases), 2, MAY_SKIP))
    assert len(found) == bool(problem)
    assert problem in "".join(found)


def test_how_a_test_failed_is_told(check_tests: ModuleType) -> None:
    source = "\n".join(f"line {number}" for number in range(1000))
    text = f"{source}\nE   assert 1 == 2\nE    +  where 1 = one()\n\ntest_calls.py:7: AssertionError\n"
    failure = case("test_calls x", f'<failure message="E">{text}</failure><error message="x">at the end</error>')
    (found,) = check_tests.problems(report(failure), 0, {})
    lines = [line.strip() for line in found.splitlines()]
    assert lines[0].endswith("test_calls x failed")
    assert lines[1:] == [
        "E   assert 1 == 2",
        "E    +  where 1 = one()",
        "test_calls.py:7: AssertionError",
        "at the end",
    ]


def test_of_a_long_error_the_beginning_and_the_end_are_told(check_tests: ModuleType) -> None:
    error = "\n".join(f"E   process {number}" for number in range(1000))
    (found,) = check_tests.problems(report(case("test_calls x", f'<failure message="E">{error}</failure>')), 0, {})
    lines = [line.strip() for line in found.splitlines()]
    assert lines[0].endswith("test_calls x failed")
    assert lines[1] == "E   process 0"
    assert lines[-1] == "E   process 999"
    assert 50 < len(lines) < 100


def test_how_a_cpp_test_failed_is_told(check_tests: ModuleType) -> None:
    failure = case(
        "TimerTest.Fires", '<failure message="Failed"/><system-out>Expected: 1\n  Which is: 2\n</system-out>'
    )
    (found,) = check_tests.problems(report(failure), 0, {})
    assert found.splitlines()[1:] == ["    Expected: 1", "      Which is: 2"]


def test_every_run_of_ci_has_a_floor_and_patterns_that_are_some(check_tests: ModuleType) -> None:
    import re

    expected = check_tests.read_expectations()
    at_least = {"ctest": 700, "light": 200, "sanitize": 200, "pytest": 1500, "field": 60}
    at_least |= {"conformance": 400, "libraries": 40, "examples": 20}
    assert set(expected["floors"]) == set(at_least)
    assert all(int(expected["floors"][name]) > least for name, least in at_least.items())
    for name in expected["floors"]:
        for pattern, reason in expected[f"skipped {name}"].items():
            re.compile(pattern)
            re.compile(reason)


def test_a_run_without_a_report_is_a_failure(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "pytest", str(tmp_path / "missing.xml")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "there is no report of it" in ended.stdout
