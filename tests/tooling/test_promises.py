"""Each promise of the README and of docs/failure_model.md has a test that exists."""

from __future__ import annotations

import re

import pytest

from benchmarks.__main__ import BENCHMARKS
from tests.mutants._tests import executables_of, file_of
from tests.support.promises import PROMISES
from tests.verbs._trials import TRIALS

from ._tools import ROOT


def exists(test: str) -> bool:
    if test.startswith("tests/"):
        return (ROOT / test).exists()
    if test.startswith("benchmarks "):
        return test.removeprefix("benchmarks ") in BENCHMARKS
    if test.startswith("verbs "):
        return test.removeprefix("verbs ") in {trial.name for trial in TRIALS}
    return file_of(test, ROOT) is not None or bool(executables_of(test, ROOT))


def stands_in(words: str, text: str) -> bool:
    """Whether the text contains these words, with or without the links in it."""
    return words in text or words in re.sub(r"\]\([^)]*\)|\[(?=[^\]]*\]\()", "", text)


def statements(items: list[str], ends: str) -> list[str]:
    """Return the parts of list items that end with one of ``ends``."""
    parts = [part for item in items for part in re.split(rf"(?<=[{ends}])\s+(?!in )", " ".join(item.split()))]
    return [part for part in parts if re.search(r"\w{4}", part)]


def statements_of_the_readme() -> list[str]:
    """Read the statements from the list whose items begin with a bold head."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    points = re.findall(r"^- \*\*[^*]+\*\* (.*(?:\n  .*)*)", readme, re.MULTILINE)
    return statements(points, ".;:")


def sentences_that_promise() -> list[str]:
    """Read from the lists of docs/failure_model.md between the headings "Promises" and "Limits"."""
    page = (ROOT / "docs" / "failure_model.md").read_text(encoding="utf-8")
    section = page.partition("\n## Promises\n")[2].partition("\n## Limits\n")[0]
    return statements(re.findall(r"^- (.*(?:\n  .*)*)", section, re.MULTILINE), ".")


STATEMENTS = {"README.md": statements_of_the_readme(), "docs/failure_model.md": sentences_that_promise()}


@pytest.mark.parametrize("page", PROMISES)
def test_every_promise_stands_on_its_page_and_its_tests_exist(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    for words, tests in PROMISES[page].items():
        assert stands_in(words, text), f"{page} lacks {words!r}: fix tests/support/promises.py"
        missing = [test for test in tests if not exists(test)]
        assert tests, f"{words!r} has no test"
        assert not missing, f"{words!r} names tests that there are not: {missing}"


@pytest.mark.parametrize("page", STATEMENTS)
def test_every_sentence_that_promises_has_a_test(page: str) -> None:
    untested = [one for one in STATEMENTS[page] if not any(stands_in(words, one) for words in PROMISES[page])]
    assert STATEMENTS[page], f"{page} has no list of promises"
    assert not untested, "say in tests/support/promises.py which tests hold these"


def test_an_unknown_test_name_is_noticed() -> None:
    assert all(map(exists, ("test_an_unknown_test_name_is_noticed", "CallTableTest", "verbs killed")))
    assert not exists("test_that_nobody_has_written")
    assert not exists("NobodysTest")
    assert not exists("benchmarks nobody")
