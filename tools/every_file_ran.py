"""Check that every test file ran: at least one of its tests passed or failed.

    python tools/every_file_ran.py REPORT...

Each REPORT is the JUnit file of a run of pytest or ctest. The test files are ``tests/**/test_*.py`` and
``tests/**/*_test.cpp``. A skipped test did not run. The exit code is 1 if a test file did not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent

# CI has no GPU. tools/gpu_check.py and tools/conformance.sh run these.
NEED_A_GPU = {"tests/e2e/test_cuda.py", "tests/conformance/test_cuda_suites.py"}


def missing(root: Path, reports: Iterable[Path]) -> list[str]:
    """Return the test files below ``root`` without a test that ran, as paths relative to it.

    Args:
        root: the folder of the repository, or of one like it.
        reports: JUnit files of pytest and ctest.
    """
    ran = set()
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            if case.find("skipped") is None:
                # pytest names a file, or a class in it, as "tests.unit.test_a.TestB". ctest names an executable
                # "a_test".
                parts = (case.get("classname") or "").split(".")
                ran |= {"/".join(parts[: length + 1]) for length in range(len(parts))}
                ran.add(case.get("name", ""))
    tests = root / "tests"
    python = {
        str(file.relative_to(root)): str(file.relative_to(root).with_suffix("")) for file in tests.rglob("test_*.py")
    }
    cpp = {str(file.relative_to(root)): file.stem for file in tests.rglob("*_test.cpp")}
    return sorted(file for file, name in {**python, **cpp}.items() if name not in ran and file not in NEED_A_GPU)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="a JUnit file of pytest or ctest")
    found = missing(ROOT, parser.parse_args().reports)
    for file in found:
        print(f"{file}: no test of this file ran")
    if not found:
        print("every test file ran")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
