"""What tools/gpu_check.py keeps when time is up, or tests hang: it has one chance, on a machine that is lent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import gpu_carried  # noqa: E402  (found through the line above)
import gpu_check  # noqa: E402
import pytest_outcome  # noqa: E402
import supervisor  # noqa: E402
from gpu_check import Check, Failed, Step, figures  # noqa: E402
from sessions import LAST_WORDS_S  # noqa: E402


def check_with(tmp_path: Path, all_s: float = 60) -> Check:
    return Check(tmp_path, all_s=all_s + supervisor.age_s(), python=Path(sys.executable))


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


# Machines that are lent give back 8 files, of 16 MiB each.
def test_each_command_writes_few_files() -> None:
    for steps in gpu_check.COMMANDS.values():
        logs, report_and_its_next, suites = len(steps), 2, 1
        assert logs + report_and_its_next + suites <= 8


def test_long_logs_keep_their_beginning_and_their_end(tmp_path: Path) -> None:
    program = "print('the beginning'); [print('x' * 2**20) for _ in range(20)]; print('the end')"
    check = check_with(tmp_path)
    assert check.do({"talks": Step(lambda check: check.run(sys.executable, "-c", program) and None, 1, 60)})
    log = (tmp_path / "talks.log").read_text()
    assert "the beginning" in log[:1000]
    assert log.endswith("the end\n")
    assert "bytes are left out here" in log
    assert len(log) < 16 * 2**20


def test_the_commands_end_before_their_machine_does() -> None:
    for steps in gpu_check.COMMANDS.values():
        assert sum(step.least_s for step in steps.values()) <= gpu_check.ALL_S
        assert gpu_check.ALL_S + LAST_WORDS_S + supervisor.STACKS_S < 600


def test_programs_find_the_driver_where_containers_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/libraries")
    check = check_with(tmp_path)
    seen = []
    program = "import os; print('a warning'); print(os.environ['LD_LIBRARY_PATH'])"
    assert check.do({"asks": Step(lambda check: seen.append(check.ask(sys.executable, "-c", program)), 1, 30)})
    assert seen == ["/opt/libraries:/usr/local/nvidia/lib64:/usr/local/nvidia/lib"]
    assert supervisor.libraries("/ucx/lib") == f"/ucx/lib:{seen[0]}"


# The package is not installed on a machine that is lent, and asks for its own version.
def test_the_package_has_its_metadata_where_it_is_not_installed(tmp_path: Path) -> None:
    gpu_carried.write_metadata(tmp_path)
    program = """
        import importlib.metadata as metadata
        print(metadata.version("torch_ucx_rpc"))
        print(*(point.value for point in metadata.entry_points(group="torch.backends") if "ucx" in point.name))
    """
    asked = subprocess.run(
        [sys.executable, "-S", "-c", "\n".join(line.strip() for line in program.splitlines())],
        env={"PYTHONPATH": str(tmp_path)},
        # A build leaves metadata in the repository's root, where it would be found first.
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    version = gpu_carried.build_environment.setup_cfg()["metadata"]["version"]
    assert asked.stdout.split() == [version, "_torch_ucx_rpc_autoload:autoload"]


def test_whoever_ends_it_ends_its_programs_too(tmp_path: Path) -> None:
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


# Those that an image happens to have: pytest-benchmark ends a run under pytest-xdist whose warnings are errors.
def test_plug_ins_that_happen_to_be_there_are_not_loaded(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    package = tmp_path / "packages" / "harmful-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: harmful\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[pytest11]\nharmful = harmful\n")
    (package.parent / "harmful.py").write_text("raise RuntimeError('the plug-in was loaded')\n")
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {"PYTHONPATH": ":".join([str(package.parent), *filter(None, sys.path)])}
    run_pytest = ["-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path / "test_one.py")]
    loaded = subprocess.run(
        [sys.executable, *run_pytest], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert "the plug-in was loaded" in loaded.stderr + loaded.stdout
    check = check_with(tmp_path)
    arguments = ("-n", "2", "--rootdir", str(tmp_path), str(tmp_path / "test_one.py"))
    step = Step(lambda check: check.pytest(*arguments, **environment), 1, 60)
    assert check.do({"tests": step}), (tmp_path / "tests.log").read_text()
    assert check.report["steps"]["tests"]["found"]["passed"] == 1


def test_a_benchmark_that_fails_keeps_what_it_has_measured(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__main__.py").write_text(
        "import sys\nprint('measured device_tensors, UCX: {}', file=sys.stderr)\nprint('| a | table |')\nsys.exit(1)\n"
    )
    check = check_with(tmp_path)
    check.python = tmp_path / "python"
    check.python.write_text(f'#!/bin/sh\ncd {tmp_path} && PYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    check.python.chmod(0o755)
    assert not check.do({"benchmarks": Step(Check.benchmarks, 1, 60)})
    found = check.report["steps"]["benchmarks"]
    assert "exit code 1" in found["why"]
    assert found["found"]["table"] == ["measured device_tensors, UCX: {}", "| a | table |"]


def test_figures_are_found_where_processes_share_a_line() -> None:
    printed = (
        '[1.5] UCX INFO {a}\n{"echo": "gpu", "us": 3}{"ended": [0, 0]}[2.0] UCX INFO\n{"cut\n{"debug": {"lanes": 1}}\n'
    )
    assert figures(printed) == [{"echo": "gpu", "us": 3}, {"ended": [0, 0]}, {"debug": {"lanes": 1}}]


def test_a_step_leaves_those_after_it_their_time(tmp_path: Path) -> None:
    left = {}

    def note(check: Check) -> None:
        left[check.step] = check.seconds_left()

    check_with(tmp_path, 100).do(
        {"greedy": Step(note, 1, 1000), "modest": Step(note, 40, 1000), "last": Step(note, 30, 20)}
    )
    assert 28 < left["greedy"] <= 30
    assert 68 < left["modest"] <= 70
    assert 18 < left["last"] <= 20


def test_what_goes_wrong_costs_no_other_step(tmp_path: Path) -> None:
    def fail(check: Check) -> None:
        raise Failed("it has failed", {"a figure": 1})

    def break_down(check: Check) -> None:
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


def test_the_report_says_what_was_under_way(tmp_path: Path) -> None:
    def look(check: Check) -> None:
        assert "under way" in json.loads((tmp_path / "report.json").read_text())["steps"]["looks"]["why"]

    assert check_with(tmp_path).do({"looks": Step(look, 1, 9)})


def test_programs_that_are_missing_fail_by_name(tmp_path: Path) -> None:
    check = check_with(tmp_path)
    check.do({"runs": Step(lambda check: check.run("no-such-program"), 1, 30)})
    assert check.report["steps"]["runs"]["why"] == "there is no no-such-program"


def test_the_time_of_a_program_can_begin_when_it_is_ready(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = f"import pathlib, time; time.sleep(1.5); pathlib.Path({str(ready)!r}).touch(); time.sleep(1000)"
    check = check_with(tmp_path)
    assert not check.do(
        {
            "slow": Step(
                lambda check: check.run(sys.executable, "-c", program, at_most_s=0.1, since=ready.exists), 1, 60
            ),
        }
    )
    assert ready.exists()
    assert check.report["steps"]["slow"]["why"].startswith("was ended after ")


def test_a_program_that_is_never_ready_has_the_time_of_its_step(tmp_path: Path) -> None:
    check = check_with(tmp_path)
    program = "import time; time.sleep(1000)"
    step = Step(
        lambda check: check.run(sys.executable, "-c", program, at_most_s=1000, since=lambda: False),
        1,
        LAST_WORDS_S + 0.5,
    )
    assert not check.do({"waits": step})
    assert check.report["steps"]["waits"]["why"].startswith("was ended after ")


def test_what_a_program_leaves_behind_is_ended(tmp_path: Path) -> None:
    child = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']).pid)"
    )
    check = check_with(tmp_path)
    pid = None

    def leave(check: Check) -> None:
        nonlocal pid
        pid = int(check.run(sys.executable, "-c", child))

    assert check.do({"leaves": Step(leave, 1, 30)})
    assert pid is not None
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize(
    "printed",
    [
        # pytest -v, by itself and under pytest-xdist
        "tests/a.py::test_one PASSED\n"
        "tests/a.py::test_two FAILED\n"
        "tests/a.py::test_three SKIPPED (why)\n"
        "tests/a.py::test_x ",
        "tests/a.py::test_one \n"
        "[gw1] [ 10%] PASSED tests/a.py::test_one \n"
        "tests/a.py::test_x \n"
        "tests/a.py::test_two \n"
        "tests/a.py::test_three \n"
        "[gw0] [ 20%] FAILED tests/a.py::test_two \n"
        "[gw0] [ 30%] SKIPPED tests/a.py::test_three ",
    ],
)
def test_without_results_the_log_tells(tmp_path: Path, printed: str) -> None:
    found = pytest_outcome.outcome(tmp_path / "none.xml", printed)
    assert found["passed"] == 1
    assert list(found["failed"]) == ["tests/a.py::test_two"]
    assert found["skipped"] == ["tests/a.py::test_three"]
    assert found["unfinished"] == ["tests/a.py::test_x"]
