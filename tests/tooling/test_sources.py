"""Sources: lines stay short, long files get a warning, names of tests are short."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from pathlib import Path

import pytest

from ._tools import ROOT

CSRC = ROOT / "torch_ucx_rpc" / "csrc"
CPP = {".h", ".cpp"}
PYTHON = {".py", ".pyi"}

LONGEST_LINE = 120
# Longer sources get a warning, and no error: a file may have many lines for one idea.
LONG_SOURCE = 600
LARGEST_SHARE = 1 / 4
# The name of a test says what holds, and its code how.
LONGEST_NAME = 60


def sources(*folders: Path) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in CPP | PYTHON and "__pycache__" not in path.parts
    )


SOURCES = sources(ROOT / "torch_ucx_rpc", ROOT / "tests")

TEST_NAME = re.compile(r"^\s*(?:def (test_\w+)|(?:TYPED_)?TEST(?:_F|_P)?\(\s*\w+\s*,\s*(\w+)\s*\))", re.MULTILINE)

URL = re.compile(r"https?://[^\s)>]+")


def is_too_wide(line: str) -> bool:
    """Whether a line is too wide. Web addresses do not count, since they cannot be broken."""
    return len(URL.sub("", line)) > LONGEST_LINE


def long_names(text: str) -> list[str]:
    return [name for names in TEST_NAME.findall(text) for name in names if len(name) > LONGEST_NAME]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_no_line_is_too_wide() -> None:
    wide = [f"{path}: {line}" for path in SOURCES for line in read(path).splitlines() if is_too_wide(line)]
    assert not wide, "\n" + "\n".join(wide)


def test_names_of_tests_are_short() -> None:
    assert [name for path in sources(ROOT / "tests") for name in long_names(read(path))] == []
    long = "x" * (LONGEST_NAME + 1)
    assert long_names(f"    def test_{long}():\nTEST_F(SuiteTest,\n       {long}) {{}}\n") == [f"test_{long}", long]


@pytest.mark.filterwarnings("default")
def test_long_sources_get_a_warning() -> None:
    for path in SOURCES:
        if (count := len(read(path).splitlines())) > LONG_SOURCE:
            warnings.warn(f"{path} has {count} lines: does it have one idea?", stacklevel=1)


def test_no_folder_of_csrc_outgrows_the_others() -> None:
    lines: Counter[str] = Counter()
    for path in sources(CSRC):
        lines[path.relative_to(CSRC).parts[0]] += len(read(path).splitlines())
    assert max(lines.values()) <= LARGEST_SHARE * lines.total(), lines.most_common()
