"""Sources: lines stay short, long files get a warning, names of tests are short."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
CSRC = ROOT / "torch_ucx_rpc" / "csrc"
CPP = {".h", ".cpp"}
PYTHON = {".py", ".pyi"}

LONGEST_LINE = 120
# Longer sources get a warning. The ideas of a file limit its length, not its lines.
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
    """Addresses do not count: they cannot be broken."""
    return len(URL.sub("", line)) > LONGEST_LINE


def wide(text: str) -> list[str]:
    return [f"{number}: {line}" for number, line in enumerate(text.splitlines(), start=1) if is_too_wide(line)]


def long_names(text: str) -> list[str]:
    return [name for names in TEST_NAME.findall(text) for name in names if len(name) > LONGEST_NAME]


def long_sources(lines: dict[str, int]) -> list[str]:
    return [f"{file} has {count} lines: does it have one idea?" for file, count in lines.items() if count > LONG_SOURCE]


def lines_by_folder(lines: dict[str, int]) -> Counter[str]:
    """Files relative to csrc. transport counts with its subfolders."""
    folders: Counter[str] = Counter()
    for file, count in lines.items():
        folders[file.split("/")[0] if "/" in file else "."] += count
    return folders


def too_large(lines: dict[str, int]) -> list[str]:
    most = sum(lines.values()) * LARGEST_SHARE
    return [folder for folder, count in lines_by_folder(lines).items() if count > most]


def assert_none(found: dict[Path, list[str]]) -> None:
    message = [f"{path.relative_to(ROOT)}: {finding}" for path, findings in found.items() for finding in findings]
    assert not message, "\n" + "\n".join(message)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def lines_of_csrc() -> dict[str, int]:
    return {path.relative_to(CSRC).as_posix(): len(read(path).splitlines()) for path in sources(CSRC)}


def test_no_line_is_too_wide() -> None:
    assert_none({path: wide(read(path)) for path in SOURCES})


def test_names_of_tests_are_short() -> None:
    assert_none({path: long_names(read(path)) for path in sources(ROOT / "tests")})


@pytest.mark.filterwarnings("default")
def test_long_sources_get_a_warning() -> None:
    package = ROOT / "torch_ucx_rpc"
    lines = {str(path.relative_to(ROOT)): len(read(path).splitlines()) for path in sources(package)}
    for finding in long_sources(lines):
        warnings.warn(finding, stacklevel=1)


def test_no_folder_outgrows_the_others() -> None:
    lines = lines_of_csrc()
    assert not too_large(lines), lines_by_folder(lines).most_common()


def test_a_long_name_is_found() -> None:
    short, long = "x" * LONGEST_NAME, "test_" + "x" * LONGEST_NAME
    assert long_names(f"    def {long}():\ndef test_x(): pass\n") == [long]
    assert long_names(f"TEST(SuiteTest, {short}) {{}}\nTEST_F(SuiteTest,\n       {long}) {{}}\n") == [long]


def test_a_long_source_is_found() -> None:
    assert long_sources({"a.h": 600, "b.cpp": 601}) == ["b.cpp has 601 lines: does it have one idea?"]
