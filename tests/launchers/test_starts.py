"""In workers that are forked or started by exec, programs write and end as under plain Python. Nothing outlives the
launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from _torch_ucx_rpc_cli import ExitCode
from tests.support.workers import eventually

COMMAND = [sys.executable, "-m", "torch_ucx_rpc", "run"]
BY_EXEC = "torch_ucx_rpc run: each worker imports torch itself (--start exec), since "

both = pytest.mark.parametrize("start", ["fork", "exec"])


def run(*arguments: object, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return completed([*COMMAND, *map(str, arguments)], cwd, variables)


def completed(command: list[str], cwd: Path | None, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


# ---- What a program does ---------------------------------------------------------------------------------------------

# Each worker ends and writes as under plain Python.
ENDS = {
    "exception": "def f(): raise KeyError('the cause')\nf()",
    "exception of an import": "import torch\nimport nowhere_at_all",
    "syntax error": "import os\n1 +",
    "exit code": "import sys; sys.exit(7)",
    "exit with a text": "import sys; sys.exit('no reason')",
    "Ctrl-C": "import os, signal; os.kill(os.getpid(), signal.SIGINT); input()",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM); input()",
    "crash": "import faulthandler, os, signal, torch; faulthandler.enable(); os.kill(os.getpid(), signal.SIGSEGV)",
    "last moments": """
import atexit, threading, time, torch
from torch.utils.data import DataLoader

class Last:
    def __init__(self, name): self.name, self.itself = name, self
    def __del__(self): print("the end of", self.name)

kept = Last("an object in a cycle")
def function(): pass
written = open("last.txt", "w")
written.write("not flushed yet")
for number in range(3):
    atexit.register(print, "callback", number)
goes_on = threading.Event()
threading.Thread(target=lambda: (goes_on.wait(), time.sleep(0.3), print("the thread has ended"))).start()
print([batch.tolist() for batch in DataLoader(range(4), batch_size=2, num_workers=1)])
print("the last line")
goes_on.set()
""",
    "other processes": """
import multiprocessing, os, subprocess, sys

def square(number):
    return number * number, sys.argv[1:], os.environ.get("RANK") is not None

if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(method, pool.map(square, range(3)))
    print(subprocess.run([sys.executable, "-c", "print('by subprocess')"], capture_output=True, text=True).stdout)
""",
    "frames": "import inspect, traceback\nprint(len(inspect.stack()))\ntraceback.print_stack()",
    "warning": "import warnings; warnings.warn('here', stacklevel=3)",
    "input": "import sys; print(repr(sys.stdin.read()))",
    "flags": "import faulthandler, sys; print(sys.flags, sys._xoptions, sys.warnoptions, faulthandler.is_enabled())",
    "preloaded library": "print(any('libm.so.6' in line for line in open('/proc/self/maps')))",
}
SET = {
    "flags": {"PYTHONDEVMODE": "1", "PYTHONOPTIMIZE": "1", "PYTHONWARNINGS": "error::UserWarning"},
    "preloaded library": {"LD_PRELOAD": "libm.so.6"},
}


def taken_files(folder: Path) -> dict[str, str]:
    """Return the text files that a program has written, and remove them."""
    taken = {file.name: file.read_text() for file in folder.glob("*.txt")}
    for name in taken:
        (folder / name).unlink()
    return taken


def assert_same_as_python(program: list[str], cwd: Path, **variables: str) -> None:
    """Run ``program`` under Python, in a forked worker, and in a worker started by exec, and compare."""
    python = completed([sys.executable, *program], cwd, {**variables, "RANK": "0"})
    files = taken_files(cwd)
    pids = re.compile(r"pid \d+|0x[0-9a-f]+")
    for start in ("fork", "exec"):
        worker = run("-n", 1, "--start", start, *program, cwd=cwd, **variables)
        for stream in ("stdout", "stderr"):
            said = re.findall(r"^\[worker0\] (.*)$", getattr(worker, stream), re.MULTILINE)
            assert [pids.sub("", line) for line in said] == [
                pids.sub("", line) for line in getattr(python, stream).splitlines()
            ], f"{start}: {worker.stderr}"
        expected = python.returncode if python.returncode >= 0 else 128 - python.returncode
        assert (worker.returncode, taken_files(cwd)) == (expected, files), start


@pytest.mark.parametrize("program", ENDS)
def test_program_writes_and_ends_as_under_python(program: str, script: Path) -> None:
    script.write_text(ENDS[program])
    # The path is relative.
    assert_same_as_python([script.name, "a b", "--c"], script.parent, **SET.get(program, {}))


@pytest.mark.parametrize(
    "program",
    [
        ["-m", "parts.part", "x"],
        ["-m", "parts"],
        ["parts", "x"],
        ["-c", "{}", "x"],
        ["-m", "pdb", "-c", "c", "parts/part.py"],
    ],
    ids=["module", "package", "folder", "code", "debugger"],
)
def test_every_kind_of_program_runs_as_under_python(program: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; me = sys.modules['__main__'].__dict__;"
        "print(sys.argv, sys.path[0], me.get('__file__'), getattr(me['__spec__'], 'name', None), me['__package__'])"
    )
    (tmp_path / "parts").mkdir()
    for name in ("__init__", "part", "__main__"):
        (tmp_path / "parts" / f"{name}.py").write_text("" if name == "__init__" else code)
    assert_same_as_python([word.format(code) for word in program], tmp_path)


def test_users_sitecustomize_is_imported(script: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys; sys.mark = 'of the site'")
    script.write_text("import sys; print(sys.mark, sys.modules['sitecustomize'].__file__)")
    assert_same_as_python([str(script)], tmp_path, PYTHONPATH=str(tmp_path / "site"))


@both
def test_variable_replaces_tensorpipe(start: str, script: Path) -> None:
    script.write_text(
        "import os, torch.distributed.rpc as rpc\n"
        "rpc.init_rpc('w', rank=0, world_size=1)\n"
        "print(type(rpc.api._get_current_rpc_agent()).__name__)\n"
        "rpc.shutdown()\n"
    )
    done = run("-n", 1, "--start", start, "--replace-tensorpipe", script)
    assert done.stdout == "[worker0] UcxRpcAgent\n", done.stderr


# ---- Whose death ends whom -------------------------------------------------------------------------------------------


def is_running(pid: int) -> bool:
    try:
        # A zombie has ended.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@both
def test_killed_launcher_ends_its_workers(start: str) -> None:
    code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid()); time.sleep(600)"
    with subprocess.Popen(
        [*COMMAND, "-n", "2", "--max-restarts", "1", "--start", start, "-c", code], stdout=subprocess.PIPE, text=True
    ) as launcher:
        pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        assert len(children) == 3
        launcher.kill()
    eventually(lambda: not any(map(is_running, [*pids, *map(int, children)])), "workers and starter have ended")


@both
@pytest.mark.parametrize("dies", ["starter", "helper"])
def test_a_job_restarts_after_the_death_of_the_starter(dies: str, start: str, script: Path) -> None:
    script.write_text(
        """
import os, pathlib, signal, sys
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]

def children(pid):
    return {int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}

def has_ended(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True

if attempt == "0":
    [starter] = children(os.getppid()) - {os.getpid()}
    # The helper of the restart exists already. The starter may not have reaped the helper that started this worker.
    while not (helpers := {child for child in children(starter) if not has_ended(child)}):
        pass
    [helper] = helpers
    os.kill(starter if sys.argv[1] == "starter" else helper, signal.SIGKILL)
    while not has_ended(starter):
        pass
    sys.exit(3)
print("attempt", attempt)
"""
    )
    done = run("-n", 1, "--start", start, "--max-restarts", 1, script, dies)
    assert (done.returncode, done.stdout) == (0, "[worker0] attempt 1\n"), done.stderr


@both
@pytest.mark.parametrize("restarts", [0, 1])
def test_starter_stays_while_restarts_are_left(restarts: int, start: str) -> None:
    code = f"""
import os, time
while len(open("/proc/%d/task/%d/children" % (os.getppid(), os.getppid())).read().split()) != {1 + restarts}:
    time.sleep(0.01)
"""
    done = run("-n", 1, "--max-restarts", restarts, "--start", start, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")


# ---- Where a worker could tell the difference ------------------------------------------------------------------------

HOW = "import sys; print('forked' if 'torch' in sys.modules else 'not forked')"


def test_workers_are_forked_by_default(script: Path) -> None:
    script.write_text(HOW)
    done = run("-n", 2, script)
    assert sorted(done.stdout.splitlines()) == ["[worker0] forked", "[worker1] forked"]
    assert done.stderr == ""


REASONS = {
    "variable of Python": ({"PYTHONPROFILEIMPORTTIME": "1"}, "", "PYTHONPROFILEIMPORTTIME is set"),
    "preloaded library": ({"LD_PRELOAD": "libm.so.6"}, "", "LD_PRELOAD has libm.so.6"),
    "site": ({"PYTHONPATH": "{folder}/site"}, "", "Python would import {folder}/site/sitecustomize.py for each worker"),
    "variable of torch": (
        {},
        "import os; os.environ['OMP_NUM_THREADS'] = '1'",
        "the program sets OMP_NUM_THREADS, which is read when torch is imported",
    ),
    "shadow": ({}, "# beside calendar.py", "{folder}/calendar.py would be imported in the place of another module"),
}


@pytest.mark.parametrize("case", REASONS)
def test_worker_that_could_notice_a_fork_is_not_forked(case: str, script: Path, tmp_path: Path) -> None:
    variables, line, reason = REASONS[case]
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").touch()
    if case == "shadow":
        (tmp_path / "calendar.py").touch()
    script.write_text(f"{HOW}\n{line}")
    variables = {name: value.format(folder=tmp_path) for name, value in variables.items()}
    done = run("-n", 2, script, **variables)
    assert sorted(done.stdout.splitlines()) == ["[worker0] not forked", "[worker1] not forked"], done.stderr
    assert done.stderr.count(BY_EXEC + reason.format(folder=tmp_path)) == done.stderr.count(BY_EXEC) == 1


PRELOADED = {
    "thread": (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "threads, 1 of",
    ),
    "file": ("kept = open(__file__)", r"has left \S+/heavy.py open"),
    "error": ("1 / 0", "heavy cannot be imported: ZeroDivisionError: division by zero"),
    "crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "has ended with SIGSEGV"),
}


@pytest.mark.parametrize("case", PRELOADED)
def test_preload_that_leaves_traces_prevents_forks(case: str, tmp_path: Path) -> None:
    code, reason = PRELOADED[case]
    (tmp_path / "heavy.py").write_text(code)
    done = run("-n", 1, "--preload", "heavy", "-c", HOW, PYTHONPATH=str(tmp_path))
    assert done.stdout == "[worker0] not forked\n"
    assert re.search(re.escape(BY_EXEC) + f".*{reason}", done.stderr), done.stderr


def test_impossible_fork_is_an_error_if_it_was_demanded(tmp_path: Path) -> None:
    done = run("-n", 1, "--start", "fork", "--preload", "no_such_module", "-c", HOW)
    assert (done.returncode, done.stdout) == (ExitCode.NOT_STARTED, "")
    assert "could not all be started: no_such_module cannot be imported: ModuleNotFoundError" in done.stderr


def test_preloaded_module_is_imported_once(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text("import sys; sys.stderr.write('x' * 200_000 + '\\nimported\\n')")
    code = "import sys; print('heavy' in sys.modules); import heavy"
    done = run("-n", 2, "--preload", "heavy", "-c", code, PYTHONPATH=str(tmp_path))
    assert sorted(done.stdout.splitlines()) == ["[worker0] True", "[worker1] True"]
    assert done.stderr == "x" * 200_000 + "\nimported\n"
