"""Each promise of the README and of docs/failure_model.md has a test, which exists, and fails with some mutant."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutants._all import MUTANTS
from mutants._tests import executables_of, file_of
from promises import PROMISES, UNTRIED

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "setup.cfg").exists())
FAILURE_MODEL = ROOT / "docs" / "failure_model.md"


@functools.cache
def benchmarks() -> frozenset[str]:
    program = ast.parse((ROOT / "benchmarks" / "__main__.py").read_text(encoding="utf-8"))
    [table] = [
        node.value
        for node in program.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BENCHMARKS"
    ]
    assert isinstance(table, ast.Dict)
    return frozenset(ast.literal_eval(key) for key in table.keys if key is not None)


@functools.cache
def trials() -> frozenset[str]:
    program = ast.parse((ROOT / "tests" / "verbs" / "_trials.py").read_text(encoding="utf-8"))
    functions = [node for node in program.body if isinstance(node, ast.FunctionDef)]
    return frozenset(node.name for node in functions if "_trial" in map(ast.unparse, node.decorator_list))


def exists(test: str) -> bool:
    if test.startswith("tests/"):
        return (ROOT / test).exists()
    if test.startswith("benchmarks "):
        return test.removeprefix("benchmarks ") in benchmarks()
    if test.startswith("make verbs "):
        return test.removeprefix("make verbs ") in trials()
    return file_of(test, ROOT) is not None or bool(executables_of(test, ROOT))


def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def rows_of_promises() -> Iterator[tuple[str, str]]:
    """The two cells of each row of the tables that are headed "promise" and "test"."""
    lines = FAILURE_MODEL.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if re.fullmatch(r"\|\s*promise\s*\|\s*test\s*\|", line):
            for row in itertools.takewhile(lambda line: line.startswith("|"), lines[number + 2 :]):
                promise, test = re.split(r"(?<!\\)\|", row.strip().strip("|"))
                yield promise.strip(), test.strip()


PROMISED = list(rows_of_promises())


def statements_of_the_readme() -> list[str]:
    """Of the list with bold heads: its sentences, and what semicolons part."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    points = re.findall(r"^- \*\*[^*]+\*\* (.*(?:\n  .*)*)", readme, re.MULTILINE)
    assert points, "the README has no list of points that begin with a bold head"
    statements = [part for point in points for part in re.split(r"(?<=[.;:])\s+(?!in )", " ".join(point.split()))]
    return [statement for statement in statements if re.search(r"\w{4}", statement)]


def names_in(cell: str) -> list[str]:
    return [name for name in re.findall(r"`([\w./ ]+)`", cell) if not name.startswith("python -m")]


@pytest.mark.parametrize(("promise", "cell"), PROMISED, ids=[promise[:60] for promise, _ in PROMISED])
def test_every_promise_of_the_failure_model_names_a_test(promise: str, cell: str) -> None:
    named = names_in(cell)
    assert named or "the same" in cell or "PyTorch's suites" in cell, f"{promise} names no test"
    missing = [name for name in named if not exists(name)]
    assert not missing, f"{promise} names tests that there are not: {missing}"


def test_the_failure_model_has_its_tables() -> None:
    assert len(PROMISED) > 40
    promise, cell = PROMISED[0]
    assert "the same" not in cell, f"{promise} is the first, and names the test of the one before"


@pytest.mark.parametrize("page", PROMISES)
def test_every_promise_stands_on_its_page_and_its_tests_exist(page: str) -> None:
    text = text_of(page)
    for words, tests in PROMISES[page].items():
        plain = re.sub(r"\]\([^)]*\)|\[(?=[^\]]*\]\()", "", text)
        assert words in text or words in plain, f"{page} does not say {words!r}: mend tests/support/promises.py"
        missing = [test for test in tests if not exists(test)]
        assert tests, f"{words!r} has no test"
        assert not missing, f"{words!r} names tests that there are not: {missing}"


def test_every_statement_of_the_readme_has_a_test() -> None:
    untested = []
    for statement in statements_of_the_readme():
        plain = re.sub(r"\]\([^)]*\)|\[(?=[^\]]*\]\()", "", statement)
        if not any(words in statement or words in plain for words in PROMISES["README.md"]):
            untested.append(statement)
    assert not untested, "say in tests/support/promises.py which tests hold these"


def test_every_test_of_a_promise_has_a_mutant_or_a_reason() -> None:
    named = {test for _, cell in PROMISED for test in names_in(cell)}
    named |= {test for page in PROMISES.values() for tests in page.values() for test in tests}
    tried = {test for mutant in MUTANTS for test in mutant.tests}
    programs = {test for test in named if test.startswith(("make verbs ", "benchmarks "))}
    assert named - tried - programs - UNTRIED.keys() == set(), "write a mutant in tests/mutants that takes it out"
    assert UNTRIED.keys() & tried == set(), "these are tried"
    assert UNTRIED.keys() <= named, "no promise names these"


def test_a_name_of_no_test_is_noticed() -> None:
    assert exists("test_a_name_of_no_test_is_noticed")
    assert exists("CallTableTest")
    assert not exists("test_that_nobody_has_written")
    assert not exists("NobodysTest")
    assert not exists("benchmarks nobody")
    assert exists("make verbs killed")
    assert not exists("make verbs nobody")
    assert not exists("tests/nobody")
