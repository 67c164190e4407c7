"""A mutant, and the place of its text."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

# Mutants change these folders. Among the tests, only the programs that judge have mutants.
_FOLDERS = ("torch_ucx_rpc", "benchmarks", "tools", "tests/soak", "tests/verbs")


class Useless(Exception):
    """A mutant that does not fit the sources: correct the list."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A bug. ``text`` becomes ``instead``, and each of ``tests`` must fail.

    Args:
        name (str): the fault; begins with "cpp-" if it is in C++.
        text (str | re.Pattern): occurs once in the sources. A pattern allows several forms of the text.
        instead (str): its replacement.
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
        """Return the only file below ``root`` that contains the text."""
        found = [file for file, text in _texts(root).items() for _ in self.pattern.finditer(text)]
        if len(found) != 1:
            where = ", ".join(str(file.relative_to(root)) for file in found) or "nowhere"
            raise Useless(f"its text stands {where}, and must stand once: {self.pattern.pattern!r}")
        return found[0]


def sources(root: Path) -> Iterator[Path]:
    for folder in _FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".py", ".h", ".cpp"):
                yield file


@functools.cache
def _texts(root: Path) -> dict[Path, str]:
    """Read all sources once for all mutants: each mutant is undone before the next."""
    return {file: file.read_text(encoding="utf-8") for file in sources(root)}
