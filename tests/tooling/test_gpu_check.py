"""tools/gpu_check.py runs once, on a borrowed machine: it keeps its results when time is up or tests hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ._tools import ROOT, tool

gpu_check, supervisor, pytest_outcome = tool("gpu_check"), tool("supervisor"), tool("pytest_outcome")
Failed, Step = gpu_check.Failed, gpu_check.Step


def check_with(tmp_path: Path, all_s: float = 60) -> Any:
    return gpu_check.Check(tmp_path, all_s=all_s + supervisor.age_s(), python=Path(sys.executable))


def test_a_rehearsal_finds_what_hangs_and_keeps_the_rest(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    ended = subprocess.run(
        [sys.executable, ROOT / "tools" / "gpu_check.py", "rehearse", "--steps", "hang", "--out", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "report.json").read_text())["steps"]["hang"]["found"]
    assert found["passed"] == 1
    assert [name.rpartition("::")[2] for name in found["unfinished"]] == ["test_hangs"]
    assert "in the_test_that_hangs" in (tmp_path / "hang.log").read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hang.log", "report.json"]


def test_programs_end_with_the_check(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(900)"
    supervised = f"""
import sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import gpu_check
from supervisor import Step
def sleep(check):
    check.run(sys.executable, "-c", {program!r}, {str(pid_file)!r})
gpu_check.REHEARSALS["rehearse"] = {{"sleeps": Step(sleep, 1, 100)}}
sys.argv = ["gpu_check.py", "rehearse", "--out", {str(tmp_path / "out")!r}]
sys.exit(gpu_check.main())
"""
    with subprocess.Popen([sys.executable, "-c", supervised], stdout=subprocess.DEVNULL) as running:
        while not pid_file.exists() or not pid_file.read_text():
            assert running.poll() is None
        pid = int(pid_file.read_text())
        running.terminate()
        assert running.wait() == 128 + signal.SIGTERM
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_step_leaves_later_steps_their_time(tmp_path: Path) -> None:
    left = {}

    def note(check: Any) -> None:
        left[check.step] = check.seconds_left()

    check_with(tmp_path, 100).do(
        {"greedy": Step(note, 1, 1000), "modest": Step(note, 40, 1000), "last": Step(note, 30, 20)}
    )
    assert 28 < left["greedy"] <= 30
    assert 68 < left["modest"] <= 70
    assert 18 < left["last"] <= 20


def test_a_failed_step_costs_no_other_step(tmp_path: Path) -> None:
    def fail(check: Any) -> None:
        raise Failed("it has failed", {"a figure": 1})

    def break_down(check: Any) -> None:
        raise ValueError("a fault of the program")

    check = check_with(tmp_path)
    assert not check.do(
        {"fails": Step(fail, 1, 9), "breaks": Step(break_down, 1, 9), "works": Step(lambda _: None, 1, 9)}
    )
    steps = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert [step["passed"] for step in steps.values()] == [False, False, True]
    assert steps["fails"]["why"] == "it has failed"
    assert steps["fails"]["found"] == {"a figure": 1}
    assert "ValueError: a fault of the program" in steps["breaks"]["why"]


def test_without_results_the_log_of_xdist_is_judged(tmp_path: Path) -> None:
    printed = (
        "tests/a.py::test_one \n"
        "[gw1] [ 10%] PASSED tests/a.py::test_one \n"
        "tests/a.py::test_x \n"
        "tests/a.py::test_two \n"
        "tests/a.py::test_three \n"
        "[gw0] [ 20%] FAILED tests/a.py::test_two \n"
        "[gw0] [ 30%] SKIPPED tests/a.py::test_three "
    )
    found = pytest_outcome.outcome(tmp_path / "none.xml", printed)
    assert found["passed"] == 1
    assert list(found["failed"]) == ["tests/a.py::test_two"]
    assert found["skipped"] == ["tests/a.py::test_three"]
    assert found["unfinished"] == ["tests/a.py::test_x"]
