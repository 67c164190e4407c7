"""The copy of the sources, its build, and its tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ._mutant import Useless, sources
from ._tests import executables_of, file_of

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build" / "mutants"
LIMIT_S = 900


def refresh() -> None:
    """Copy the files that git knows, uncommitted changes included, and the built files beside them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    built = [str(file.relative_to(ROOT)) for file in (ROOT / "torch_ucx_rpc").glob("*.so")]
    built += ["torch_ucx_rpc/_build_info.py"]
    wanted = {name for name in (*listed, *built) if (ROOT / name).is_file()}
    for name in sorted(wanted):
        file, target = ROOT / name, COPY / name
        # The build compares the times of files.
        if target.exists() and target.read_bytes() == file.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    # Drop files of an earlier copy: a test that has moved would be found twice.
    for file in [*sources(COPY), *(COPY / "tests").rglob("*.py")]:
        if str(file.relative_to(COPY)) not in wanted:
            file.unlink(missing_ok=True)


def build_for(tests: Iterable[str]) -> None:
    """Build the C++ for these tests: the extension for Python tests, and executables for the others."""
    executables: set[str] = set()
    needs_extension = False
    for test in tests:
        if file_of(test, COPY):
            needs_extension = True
        else:
            executables.update(executables_of(test, COPY))
    if needs_extension:
        _build([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"])
    if executables:
        _build_executables(sorted(executables))


def _build_executables(names: Sequence[str]) -> None:
    """Build these tests in the extension's build folder, so that they share its objects."""
    folder = _build_folder()
    cache = folder / "CMakeCache.txt"
    if not cache.exists() or "TORCH_UCX_RPC_TESTS:BOOL=ON" not in cache.read_text(encoding="utf-8"):
        options = ["-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", "-DTORCH_UCX_RPC_TESTS=ON"]
        _build(["cmake", *options, "-S", ".", "-B", str(folder)])
    _build(["cmake", "--build", str(folder), "--target", *names])


def _build_folder() -> Path:
    command = [sys.executable, "tools/build_environment.py", "directory"]
    found = subprocess.run(command, cwd=COPY, capture_output=True, text=True, check=True).stdout.strip()
    return COPY / found


def _build(command: Sequence[str]) -> None:
    done = subprocess.run(command, cwd=COPY, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        # No test can catch a bug that does not compile.
        raise Useless(f"it does not compile: {(done.stdout + done.stderr)[-2000:]}")


def passes(test: str) -> bool:
    """Whether the test passes in the copy, with the present build."""
    if file := file_of(test, COPY):
        chosen = [] if test.startswith("tests/") else ["-k", test]
        return _runs([sys.executable, "-m", "pytest", "-q", "-x", str(file), *chosen])
    names = executables_of(test, COPY)
    if not names:
        raise Useless(f"there is no test {test}")
    folder = _build_folder() / "tests"
    return all(_runs([str(folder / name), f"--gtest_filter=*{test}*"]) for name in names)


def _runs(command: Sequence[str]) -> bool:
    environment = {**os.environ, "PYTHONPATH": str(COPY)}
    try:
        done = subprocess.run(
            command, cwd=COPY, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False
    # 5: pytest has found no test. GoogleTest says so in words. If it skips all tests it says "[  PASSED  ] 0 tests."
    if done.returncode == 5 or "Running 0 tests" in done.stdout:
        raise Useless(f"there is no such test: {' '.join(command)}")
    if done.returncode == 0 and not re.search(r"\b[1-9]\d* (passed|tests?\.)", done.stdout):
        raise Useless(f"it is skipped here: {' '.join(command)}")
    return done.returncode == 0
