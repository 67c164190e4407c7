"""The programs of these tests, and checks of their output."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

PYTHON = sys.executable
_PROGRAMS = Path(__file__).resolve().parent / "programs"
BESIDE_MPI, EXCHANGE, FAIL, FAIL_ONCE, LOST_MEMORY, MEET, WITHOUT = (
    str(_PROGRAMS / f"{name}.py")
    for name in ("beside_mpi", "exchange", "fail", "fail_once", "lost_memory", "meet", "without")
)

# Programs find the package at the same place as this process, installed or beside the tests.
PYTHON_PATH = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
ENVIRON = {**os.environ, **PYTHON_PATH}


def assert_all_called(output: str, names: list[str], on: list[str] | None = None) -> None:
    """Check that ``meet.py`` ran as these workers, by rank, on these hosts, and that each worker called all others."""
    reports = [json.loads(found) for found in re.findall(r'\{"name".*?\}', output)]
    reports.sort(key=lambda report: report["rank"])
    assert [report["name"] for report in reports] == names, output
    by_name = {report["name"]: report["on"] for report in reports}
    if on is not None:
        assert list(by_name.values()) == on
    for report in reports:
        assert report["calls"] == sorted(names)
        assert report["hosts"] == [by_name[name] for name in sorted(names)]
