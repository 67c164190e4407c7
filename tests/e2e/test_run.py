"""``python -m torch_ucx_rpc run`` on one machine, as a user sees it. ``launchers/`` tests several machines."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from _torch_ucx_rpc_cli import ExitCode, main
from tests.support.workers import run_program
from torch_ucx_rpc._cli.run import _rendezvous as launcher_rendezvous

PROGRAMS = Path(__file__).resolve().parents[1] / "launchers" / "programs"

COMMAND = [sys.executable, "-m", "torch_ucx_rpc", "run"]
ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run(*arguments: object, timeout: float = 90, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=timeout, check=False, **options)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """An empty file for a program of the test."""
    return tmp_path / "script.py"


# ---- The surroundings of a worker ------------------------------------------------------------------------------------


def test_workers_call_each_other_under_the_names_of_their_roles() -> None:
    done = run("--role", "ps=1", "--role", "trainer=2", PROGRAMS / "meet.py")
    assert done.returncode == 0, done.stderr
    for name, rank in {"ps0": 0, "trainer0": 1, "trainer1": 2}.items():
        assert re.search(
            rf'^\[{name}\] {{"name": "{name}", "rank": {rank}, "calls": \["ps0", ', done.stdout, re.MULTILINE
        )


# Importing torch 16 times takes most of the time: minutes on a slow machine.
@pytest.mark.field
def test_sixteen_workers_start_call_each_other_and_end() -> None:
    done = run("-n", 16, PROGRAMS / "meet.py", timeout=170)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(report) for report in re.findall(r'\{"name".*?\}', done.stdout)]
    names = sorted(f"worker{rank}" for rank in range(16))
    assert sorted(report["name"] for report in reports) == names
    assert [report["calls"] for report in reports] == [names] * 16


def test_role_and_index_are_in_the_environment() -> None:
    code = "import os; print(os.environ['ROLE_NAME'], os.environ['ROLE_RANK'], os.environ['ROLE_WORLD_SIZE'])"
    done = run("--role", "ps=1", "--role", "trainer=2", "-c", code)
    assert sorted(done.stdout.splitlines()) == ["[ps0] ps 0 1", "[trainer0] trainer 0 2", "[trainer1] trainer 1 2"]


def test_the_program_gets_its_arguments_as_they_are(script: Path) -> None:
    script.write_text("import sys; print(sys.argv)")
    words = ["-n", "3", "--role", "x", "$HOME", "${local_rank}", "$$", "a b", "--", "--n", "5"]
    assert run("-n", 1, script, *words).stdout == f"[worker0] {[str(script), *words]}\n"
    assert run("-n", 1, "-c", "import sys; print(sys.argv)", *words).stdout == f"[worker0] {['-c', *words]}\n"


def test_a_module_runs_as_python_runs_it() -> None:
    assert run("-n", 1, "-m", "torch_ucx_rpc", "--version").stdout.startswith("[worker0] torch_ucx_rpc ")


def test_a_tensorpipe_program_runs_on_ucx_unedited(script: Path) -> None:
    script.write_text(
        """
import os
import torch.distributed.rpc as rpc

rank = int(os.environ["RANK"])
rpc.init_rpc(f"w{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
print(type(rpc.api._get_current_rpc_agent()).__name__)
rpc.shutdown()
"""
    )
    assert sorted(run("-n", 2, "--replace-tensorpipe", script).stdout.splitlines()) == [
        "[worker0] UcxRpcAgent",
        "[worker1] UcxRpcAgent",
    ]


# ---- Output ----------------------------------------------------------------------------------------------------------


def test_output_goes_to_files_when_that_is_asked_for(tmp_path: Path) -> None:
    done = run("-n", 2, "--log-dir", tmp_path / "logs", "-c", "import sys; print('out'); print('err', file=sys.stderr)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    written = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert written == {f"worker{rank}.std{kind}": f"{kind}\n" for rank in (0, 1) for kind in ("out", "err")}


def test_much_output_arrives_whole_and_in_lines() -> None:
    code = "import sys; [print('x' * 500) for _ in range(2000)]; sys.stdout.write('no newline')"
    done = run("-n", 2, "-c", code)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for rank in (0, 1):
        assert lines.count(f"[worker{rank}] {'x' * 500}") == 2000
        assert lines.count(f"[worker{rank}] no newline") == 1
    assert len(lines) == 4002


def test_unread_output_stops_no_worker(tmp_path: Path) -> None:
    code = f"import sys; [print('x' * 500) for _ in range(2000)]; open({str(tmp_path / 'done')!r}, 'w')"
    with subprocess.Popen([*COMMAND, "-n", "1", "-c", code], env=ENVIRON, stdout=subprocess.PIPE) as launcher:
        launcher.stdout.readline()
        launcher.stdout.close()
        launcher.wait(timeout=60)
    assert (tmp_path / "done").exists()


# ---- The end ---------------------------------------------------------------------------------------------------------

# Without the failure the other workers would stay for a minute.
FAIL = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    print(time.monotonic(), flush=True)
    {how}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("raise KeyError('the cause')", 1, "KeyError: 'the cause'"),
        ("sys.exit(7)", 7, r"worker1 \(pid \d+ on \S+\) ended with exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, r"worker1 \(pid \d+ on \S+\) ended with SIGKILL"),
        ("os.kill(os.getpid(), 40)", 168, r"worker1 \(pid \d+ on \S+\) ended with signal 40"),
    ],
)
def test_first_failure_ends_the_job_with_its_code_and_traceback(how: str, code: int, last: str) -> None:
    done = run("-n", 3, "-c", FAIL.format(how=how))
    [failed_at] = re.findall(r"^\[worker1\] ([\d.]+)$", done.stdout, re.MULTILINE)
    assert time.monotonic() - float(failed_at) < 30
    assert done.returncode == code
    assert re.search(last, done.stderr.splitlines()[-1])
    assert "worker1 (pid" in done.stderr


def test_worker_that_failed_first_is_named() -> None:
    done = run("-n", 3, PROGRAMS / "fail.py", "raise")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 'the cause'"
    assert "since worker1 (pid" in done.stderr
    # The others noticed the failure before they were ended.
    assert "[worker0] " in done.stderr


def test_a_killed_worker_is_named_and_its_callers_are_not() -> None:
    done = run("-n", 3, PROGRAMS / "fail.py", "kill")
    assert done.returncode == 128 + signal.SIGKILL
    assert re.search(r"since worker1 \(pid \d+ on \S+\) ended with SIGKILL", done.stderr.splitlines()[-1])


def test_slowly_ending_worker_is_named_and_not_its_victims(script: Path, tmp_path: Path) -> None:
    script.write_text(
        f"""
import atexit, os, pathlib, socket, time

said = pathlib.Path({str(tmp_path / "said")!r})

def leave_and_take_long() -> None:
    # The traceback has been written, and this is what the agent's goodbye is for the others.
    unsaid = said.with_suffix(".unsaid")
    unsaid.write_text(f"worker 'worker1' (rank 1, pid {{os.getpid()}} on {{socket.gethostname()}}) has shut down")
    unsaid.rename(said)
    time.sleep(6)

if os.environ["RANK"] == "1":
    atexit.register(leave_and_take_long)
    raise KeyError("the cause")
while not said.exists():
    time.sleep(0.01)
time.sleep(1)  # the launcher reads what worker1 has written
raise RuntimeError(said.read_text())
"""
    )
    done = run("-n", 2, script)
    assert done.returncode == 1
    assert "since worker1 (pid" in done.stderr
    assert done.stderr.splitlines()[-1] == "KeyError: 'the cause'"


def test_worker_that_only_logs_exceptions_does_not_delay_the_end(script: Path, tmp_path: Path) -> None:
    script.write_text(
        f"""
import os, pathlib, sys, time, traceback

logs = pathlib.Path({str(tmp_path / "logs")!r})
if os.environ["RANK"] == "0":
    while not logs.exists():
        time.sleep(0.01)
    sys.exit(7)
for _ in range(300):
    try:
        raise KeyError("nothing to worry about")
    except KeyError:
        traceback.print_exc()
    logs.touch()
    time.sleep(0.1)
print("through")
"""
    )
    done = run("-n", 2, script)
    assert done.returncode == 7
    assert "since worker0 (pid" in done.stderr
    assert "through" not in done.stdout


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a launcher with two workers that wait for ever; return it and the workers' pids."""
    code = "import os, time; print(os.getpid()); time.sleep(600)"
    command = [*COMMAND, "-n", "2", *arguments, "-c", code]
    # A shell's background programs ignore Ctrl-C, and their children inherit that.
    with subprocess.Popen(
        command,
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as launcher:
        try:
            yield launcher, [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        finally:
            launcher.kill()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_ctrl_c_and_sigterm_end_all(number: signal.Signals) -> None:
    with running() as (launcher, pids):
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number
    assert number.name in errors.splitlines()[-1]
    assert [pid for pid in pids if is_running(pid)] == []


def test_a_worker_killed_from_outside_ends_the_job() -> None:
    with running() as (launcher, pids):
        os.kill(pids[1], signal.SIGKILL)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 137
    assert f"(pid {pids[1]} on " in errors
    assert [pid for pid in pids if is_running(pid)] == []


# ---- Restarts --------------------------------------------------------------------------------------------------------


def test_a_failed_job_is_restarted_and_the_group_forms_again(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    done = run("--role", "worker=2", "--max-restarts", 2, "--log-dir", logs, PROGRAMS / "fail_once.py")
    assert done.returncode == 0, done.stderr
    [line] = done.stderr.splitlines()
    assert re.fullmatch(
        r"torch_ucx_rpc run: restart 1 of 2 of all workers, since worker1 \(pid \d+ on \S+\) ended with exit code 1",
        line,
    )
    # A later attempt appends to the files.
    assert "KeyError: 'the cause'" in (logs / "worker1.stderr").read_text()
    for rank in (0, 1):
        assert (logs / f"worker{rank}.stdout").read_text() == f"{rank} is through, in attempt 1\n"


def test_one_machine_meets_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError(f"sleeps for {seconds} s")

    handler = launcher_rendezvous(argparse.Namespace(nnodes=1))
    monkeypatch.setattr(time, "sleep", sleep)
    # The first attempt and a restart.
    for _ in range(2):
        meeting = handler.next_rendezvous()
        assert (meeting.rank, meeting.world_size, handler.num_nodes_waiting()) == (0, 1, 0)


def test_the_launcher_asks_no_resolver_for_its_own_name() -> None:
    code = """
import argparse
from torch_ucx_rpc._cli.run import _rendezvous
_rendezvous(argparse.Namespace(nnodes=1))
from torch_ucx_rpc._native import _C
print(_C.name_lookups_spared())
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRON, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 0


def test_when_no_restart_is_left_the_last_failure_is_reported() -> None:
    code = """
import os, sys, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if os.environ["RANK"] == attempt:
    sys.exit(f"the cause of attempt {attempt} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}")
time.sleep(60)
"""
    done = run("-n", 2, "--max-restarts", 1, "-c", code)
    assert done.returncode == 1
    assert "restart 1 of 1 of all workers, since worker0 (pid" in done.stderr
    assert "the others were ended, since worker1 (pid" in done.stderr
    assert done.stderr.splitlines()[-1] == "the cause of attempt 1 of 1"
    # The output ends with the traceback of that worker in that attempt.
    assert done.stderr.count("the cause of attempt 0") == 1


def test_ctrl_c_causes_no_restart() -> None:
    with running("--max-restarts", "3") as (launcher, pids):
        launcher.send_signal(signal.SIGINT)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGINT
    assert "restart" not in errors
    assert [pid for pid in pids if is_running(pid)] == []


# ---- Automatic counts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", ["auto", "cpu"])
def test_automatic_worker_counts_equal_torchruns(devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import determine_local_world_size

    monkeypatch.setitem(ENVIRON, "CUDA_VISIBLE_DEVICES", "")
    done = run("-n", devices, "-c", "import os; print(os.environ['WORLD_SIZE'])")
    count = determine_local_world_size("cpu")
    assert sorted(done.stdout.splitlines()) == sorted(f"[worker{rank}] {count}" for rank in range(count))


def test_without_a_gpu_workers_per_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRON, "CUDA_VISIBLE_DEVICES", "")
    done = run("-n", "gpu", "-c", "pass")
    assert done.returncode == ExitCode.WRONG_ARGUMENTS
    assert "--nproc gpu: Cuda is not available." in done.stderr


# ---- Wrong arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("", "no program: give a script, -m <module> or -c <code>"),
        ("-n 2 nowhere.py", "there is no script nowhere.py"),
        ("-n 2 -m", "-m needs a module"),
        ("-c pass", "how many workers? -n N, or --role NAME=COUNT"),
        ("-n 0 -c pass", "0 is not a number from 1 on"),
        ("-n two -c pass", "two is neither a number nor one of auto, cpu, gpu"),
        ("-n 2 --max-restarts -1 -c pass", "-1 is not a number from 0 on"),
        ("--role ps -c pass", "'ps' is not like trainer=8"),
        ("--role ps=1 --role ps=2 -c pass", "each role once"),
        ("--role a/b=1 -c pass", "--role a/b: a worker cannot have that name, only letters, digits, _, - and :"),
        ("--role größe=1 -c pass", "--role größe: a worker cannot have that name"),
        (f"--role {'a' * 101}=1 -c pass", "at most 100 of them"),
        (
            "--role default=2 -c pass",
            "--role default: torchrun uses this name for workers without a role; choose another name",
        ),
        ("--role default_role=2 -c pass", "torchrun uses this name for workers without a role"),
        ("--role worker1=1 --role worker=11 -c pass", "of worker1 and of worker would both be worker10: rename one"),
        ("-n 3 --role ps=2 -c pass", "-n 3, and the roles are for 2 workers"),
        ("-n 2 --rdzv a:1 -c pass", "--rdzv and --node-rank are for several machines"),
        ("-n 2 --nnodes 2 -c pass", "--nnodes 2 needs --rdzv HOST:PORT, the same on all machines, and --node-rank"),
        ("-n 2 --nnodes 2 --node-rank 2 --rdzv a:1 -c pass", "machines are counted from 0, so this is up to 1"),
        ("-n 2 --nnodes 2 --node-rank 0 --rdzv a -c pass", "'a' is not like host0:29500"),
        ("--role ps=3 --nnodes 2 --node-rank 0 --rdzv a:1 -c pass", "3 workers cannot be divided evenly"),
    ],
)
def test_wrong_arguments_are_explained(arguments: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments.split()])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


def test_error_without_a_temporary_folder_says_where_it_looked() -> None:
    program = """
        import tempfile
        from _torch_ucx_rpc_cli import main
        tempfile.tempdir = "/nowhere"
        raise SystemExit(main(["run", "-n", "1", "-c", "pass"]))
        """
    [done] = run_program(program)
    assert done.returncode == ExitCode.NOT_STARTED
    assert re.fullmatch(
        "torch_ucx_rpc run: there is no place for the pipes of workers' output: .*/nowhere.*\n", done.stderr
    ), done.stderr


def test_the_meeting_place_must_be_on_the_first_machine() -> None:
    done = run("-n", 1, "--nnodes", 2, "--node-rank", 0, "--rdzv", "192.0.2.77:29500", "-c", "pass")
    assert done.returncode == ExitCode.NOT_STARTED
    assert "--rdzv 192.0.2.77:29500 must be an address of this machine" in done.stderr
