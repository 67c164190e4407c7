"""What a mutant is, and where its text stands."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

# Where mutants may be. Not in the tests, but for those programs among them that judge.
_FOLDERS = ("torch_ucx_rpc", "benchmarks", "tools", "tests/soak", "tests/verbs")
_TEST_IN_CPP = r"TEST(?:_F|_P)?\([^)]*\b{}\b"


class Useless(Exception):
    """A mutant of which nothing follows: the list is to be mended."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A bug. ``text`` becomes ``instead``, and each of ``tests`` must fail.

    Args:
        name (str): what is wrong then; begins with "cpp-" if it is in C++.
        text (str | re.Pattern): stands once in the sources. A pattern for a text that may read in more than one way.
        instead (str): what stands there then.
        tests (tuple[str, ...]): names of Python tests, of C++ tests or suites of them, or files
            ("tests/unit/test_native_op.py").
    """

    name: str
    text: str | re.Pattern[str]
    instead: str
    tests: tuple[str, ...]

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.text)) if isinstance(self.text, str) else self.text

    @property
    def is_cpp(self) -> bool:
        return self.name.startswith("cpp-")

    def place(self, root: Path) -> Path:
        """The one file below ``root`` in which the text stands."""
        found = [file for file in sources(root) for _ in self.pattern.finditer(_text_of(file))]
        if len(found) != 1:
            where = ", ".join(str(file.relative_to(root)) for file in found) or "nowhere"
            raise Useless(f"its text stands {where}, and must stand once: {self.pattern.pattern!r}")
        return found[0]


def sources(root: Path) -> Iterator[Path]:
    for folder in _FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".py", ".h", ".cpp"):
                yield file


def file_of(test: str, root: Path) -> Path | None:
    """Of a Python test, or of a file; None for one in C++."""
    if test.startswith("tests/"):
        return root / test if (root / test).is_file() else None
    defined = re.compile(rf"^\s*def {test}\(", re.MULTILINE)
    found = [file for file in sorted((root / "tests").rglob("test_*.py")) if defined.search(_text_of(file))]
    return found[0] if found else None


def executables_of(test: str, root: Path) -> list[str]:
    """With C++ tests of this name, or of a suite of this name."""
    defined = re.compile(_TEST_IN_CPP.format(re.escape(test)))
    files = sorted((root / "tests" / "cpp").rglob("*_test.cpp"))
    return [file.stem for file in files if defined.search(_text_of(file))]


def _text_of(file: Path) -> str:
    return _read(file, file.stat().st_mtime_ns)


@functools.cache
def _read(file: Path, changed_at: int) -> str:
    """Hundreds of mutants are looked for in hundreds of files."""
    return file.read_text(encoding="utf-8")
