"""The place of a test, by its name."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

_TEST_IN_CPP = re.compile(r"^\s*(?:TYPED_)?TEST(?:_F|_P)?\(\s*(\w+)\s*,\s*(\w+)\s*\)", re.MULTILINE)


def file_of(test: str, root: Path) -> Path | None:
    """Return the file of a Python test, by the test's name or by a path such as "tests/unit/test_native_op.py". Return
    None if there is no such test."""
    if test.startswith("tests/"):
        return root / test if (root / test).is_file() else None
    return _python_tests(root).get(test)


def executables_of(test: str, root: Path) -> list[str]:
    """Return the executables with a C++ test or suite of this name. The name lacks the prefix of an instantiation."""
    return _cpp_tests(root).get(test, [])


@functools.cache
def _python_tests(root: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.setdefault(node.name, file)
    return found


@functools.cache
def _cpp_tests(root: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for file in sorted((root / "tests" / "cpp").rglob("*_test.cpp")):
        tests = _TEST_IN_CPP.findall(file.read_text(encoding="utf-8"))
        for name in {name for names in tests for name in names}:
            found.setdefault(name, []).append(file.stem)
    return found
