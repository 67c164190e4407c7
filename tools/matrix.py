"""Builds and tests the project for one torch after the other, each in its own copy of the sources.

    python tools/matrix.py                         the oldest torch that setup.cfg allows, and PyPI's newest
    python tools/matrix.py 2.11.0 2.13.0           these
    python tools/matrix.py 2.14.1 --python 3.10 /opt/bin/python3.14     with each of these Pythons: on PATH, or a path

Each torch has a copy, since the extension is compiled into the source tree. The copies,
build/matrix/<version>-<python>, contain their environments and stay for the next run. Each takes several gigabytes,
since PyPI's torch is built with CUDA. `make clean` removes them. Make's output is in <version>-<python>.log beside
them.
"""

from __future__ import annotations

import argparse
import filecmp
import itertools
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import build_environment

ROOT = build_environment.ROOT
MATRIX = ROOT / "build" / "matrix"

# The closing lines of pytest and ctest.
CLOSING_LINE = re.compile(r"^=+ (\d+ (?:passed|failed).*?) in .*=+$|^(\d+% tests passed.*)$", re.MULTILINE)


def newest_torch() -> str:
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "torch"], stdout=subprocess.PIPE, text=True, check=True
    )
    found = re.search(r"\((\S+)\)", asked.stdout)
    if found is None:
        sys.exit(f"torch_ucx_rpc: pip index versions torch names no version: {asked.stdout!r}")
    return found[1]


def copy_sources(destination: Path) -> None:
    """Copy the files that git tracks or would track, committed or not. Earlier builds there stay."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    files = {Path(file) for file in listed.stdout.split("\0") if file and (ROOT / file).exists()}
    copied = destination / ".sources"
    for gone in {Path(line) for line in copied.read_text().splitlines()} - files if copied.exists() else ():
        (destination / gone).unlink(missing_ok=True)
    for file in files:
        # An unchanged file keeps its time, so it is not compiled again. A changed one is newer than its objects.
        copy = destination / file
        if not copy.exists() or not filecmp.cmp(ROOT / file, copy, shallow=False):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, copy)
    copied.write_text("".join(f"{file}\n" for file in sorted(files)))


def interpreter(python: str) -> str:
    """Return the path of an interpreter. ``python`` is a version on PATH, such as 3.12, or a path."""
    path = shutil.which(python if "/" in python else f"python{python}")
    if path is None:
        sys.exit(f"torch_ucx_rpc: there is no {python if '/' in python else f'python{python} on PATH'}")
    return path


def name_of(path: str) -> str:
    """Return the version that the interpreter reports, such as 3.12.1."""
    asked = [path, "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def run(version: str, python: str, verbs: str) -> tuple[bool, str]:
    """Run make. Return whether it succeeded, and the last lines of the tests."""
    name = f"{version}-{name_of(python)}"
    folder = MATRIX / name
    copy_sources(folder)
    log = MATRIX / f"{name}.log"
    print(f"torch {version}, {python}: make {verbs} in {folder}, output in {log}", flush=True)
    with log.open("w") as output:
        made = subprocess.run(
            [
                *("make", "--no-print-directory", "--keep-going", *verbs.split()),
                *(f"TORCH={version}", f"PYTHON={python}", "VENV=.venv"),
            ],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    closing = ["".join(found) for found in CLOSING_LINE.findall(log.read_text(errors="replace"))]
    return made.returncode == 0, "; ".join(closing) or "no test ran"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="versions of torch (default: the oldest and the newest)")
    parser.add_argument("--python", nargs="*", default=[], help="such as 3.12, or a path (default: this one)")
    parser.add_argument(
        "--verb",
        default="test-cpp test-python",
        help="targets of make (default: all C++ tests, and the Python tests of `make test`)",
    )
    arguments = parser.parse_args()
    versions = arguments.versions or [build_environment.dotted(build_environment.oldest_torch()) + ".0", newest_torch()]

    lines = []
    pythons = [interpreter(python) for python in arguments.python] or [getattr(sys, "_base_executable", sys.executable)]
    for version, python in itertools.product(versions, pythons):
        started = time.monotonic()
        passed, closing = run(version, python, arguments.verb)
        minutes = (time.monotonic() - started) / 60
        result = "passed" if passed else "FAILED"
        lines.append(f"{version:<14} Python {name_of(python):<8} {result}   {minutes:5.1f} min   {closing}")
        print(lines[-1], flush=True)
    print("", *lines, sep="\n")
    sys.exit(any("FAILED" in line for line in lines))


if __name__ == "__main__":
    main()
