"""Everything that needs a GPU: looks at the machine, tests, measures, and writes down what comes as it comes.

    python tools/gpu_check.py prepare FOLDER    here, before: what a machine without a network needs, 50 MiB
    python tools/gpu_check.py first             probe, tests, benchmarks: in less than 9 minutes
    python tools/gpu_check.py second            PyTorch's suites for GPUs, compute-sanitizer: likewise
    python tools/gpu_check.py first --steps probe
    python tools/gpu_check.py rehearse          the same way through CPU tests and one that hangs, in half a minute

The torch is the one of the Python that runs this, a CUDA build, which nothing here replaces. The environment,
.venv-gpu, sees what is installed beside that torch and adds what is missing, from FOLDER where --wheels names it. A
compiled extension in FOLDER is used if it can be imported, and otherwise one is built.

Each step runs whatever the others say, and leaves those after it their time. What it prints is in <step>.log, the
report in report.json, both in the folder --out ($OUT, or build/gpu-check): 8 files at most. The report is complete
after each step, and while one runs it says so. Of what hangs the logs have the stacks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import build_environment

ROOT = build_environment.ROOT
VENV = ROOT / ".venv-gpu"

# Of all steps of a command together, in seconds; a machine with a GPU is often lent by the minute.
ALL_S = 520.0
REHEARSAL_S = 240.0  # on a machine that is busy; 30 on one that is not
# What a run that is over is given to say its last words, and stacks are given to be written.
LAST_WORDS_S = 10.0
STACKS_S = 20.0

# What the tests and benchmarks need besides torch and UCX. (The extra `test` has launchers and tools as well.)
PACKAGES = ("expecttest", "numba", "numpy", "pytest>=9.0", "pytest-timeout", "pytest-xdist", "tqdm")
# What `prepare` downloads: the images of torch have the rest, more often than not.
CARRIED = ("expecttest", "iniconfig", "execnet", "pluggy", "pytest>=9.0", "pytest-timeout", "pytest-xdist")

# One test at a time may take this long; what a pytest-xdist prints of tests says which was under way.
PYTEST = ("-v", "--tb=short", "--timeout=45", "-p", "no:benchmark", "-p", "no:cacheprovider")


class Failed(Exception):
    """A step did not pass; the text says why, and `found` what it found all the same."""

    def __init__(self, why: str, found: dict[str, Any] | None = None) -> None:
        super().__init__(why)
        self.found = found


@dataclasses.dataclass(frozen=True)
class Step:
    run: Callable[[Check], dict[str, Any] | None]
    least_s: float  # is left to it by those before
    most_s: float


class Check:
    """The steps of one command; `run` runs programs for them."""

    def __init__(self, out: Path, *, all_s: float, wheels: Path | None = None, ucx: str = "libucx-cu13") -> None:
        self.out = out
        self.step = ""
        self.step_ends = 0.0
        self.report: dict[str, Any] = {"steps": {}}
        # Those who wait do so since the process began.
        self.ends = time.monotonic() - _age_s() + all_s
        self.python = VENV / "bin" / "python"
        self._wheels = wheels
        self._ucx = ucx

    @property
    def log(self) -> Path:
        return self.out / f"{self.step}.log"

    def seconds_left(self) -> float:
        return min(self.step_ends, self.ends) - time.monotonic()

    def write_report(self) -> None:
        """Whole or not at all: a command may be ended at any time."""
        new = self.out / ".report"
        new.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
        new.rename(self.out / "report.json")

    def do(self, steps: dict[str, Step]) -> bool:
        """Run all; whether all have passed."""
        names = list(steps)
        for index, name in enumerate(names):
            self.step = name
            self.log.unlink(missing_ok=True)
            later_s = sum(steps[later].least_s for later in names[index + 1 :])
            began = time.monotonic()
            self.step_ends = min(began + steps[name].most_s, self.ends - later_s)
            self.report["steps"][name] = {"passed": False, "why": "it was under way when the report was written"}
            self.write_report()
            entry: dict[str, Any] = {"passed": True}
            try:
                if self.seconds_left() <= 0:
                    raise Failed("no time was left for it")
                entry["found"] = steps[name].run(self)
            except Failed as failed:
                entry = {"passed": False, "why": str(failed), "found": failed.found}
            except Exception:  # a fault of this program must not cost the steps after it
                entry = {"passed": False, "why": traceback.format_exc()}
            entry["seconds"] = round(time.monotonic() - began, 1)
            self.report["steps"][name] = entry
            self.write_report()
            print(f"{name:12} {'passed' if entry['passed'] else 'FAILED'} in {entry['seconds']:.0f} s", flush=True)
            print("\n".join(f"    {line}" for line in _summary(entry)), flush=True)
        is_clean = all(entry["passed"] for entry in self.report["steps"].values())
        print(f"the report is {self.out / 'report.json'}, {'all passed' if is_clean else 'not all passed'}", flush=True)
        return is_clean

    def run(
        self,
        *command: str | Path,
        at_most_s: float | None = None,
        since: Callable[[], bool] | None = None,
        must_pass: bool = True,
        **environment: str,
    ) -> str:
        """What the command prints, also into the step's log. Failed where it does not end well, or not in time.

        It has the time of its step, and at most `at_most_s` from its start, or from the moment when `since` is true.
        Of what is too late the stacks are written first. Then pytest gets the chance to write its results.
        """
        began = time.monotonic()
        last = began + self.seconds_left() - LAST_WORDS_S
        if last <= began:
            raise Failed(f"no time was left for {_line(command)}")
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {_line(command)}{''.join(f' {name}={value}' for name, value in environment.items())}\n")
            log.flush()
            begin = log.tell()
            try:
                process = subprocess.Popen(
                    [str(part) for part in command],
                    cwd=ROOT,
                    env={**os.environ, "PATH": ":".join(map(str, self._programs())), **_QUIET, **environment},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except (FileNotFoundError, PermissionError):
                log.write("it is not there\n")
                raise Failed(f"there is no {command[0]}") from None
            why = None
            try:
                while since is not None and process.poll() is None and time.monotonic() < last and not since():
                    time.sleep(0.1)
                ready = began if since is None else time.monotonic()
                process.wait(max(0.0, min(last, ready + (at_most_s or 1e9)) - time.monotonic()))
            except subprocess.TimeoutExpired:
                why = f"was ended after {time.monotonic() - began:.0f} s"
                write_stacks(process.pid, log.fileno(), min(STACKS_S, max(1.0, self.seconds_left())))
                end_session(process, self.seconds_left())
            else:
                end_session(process)  # what it has left behind
                if process.returncode != 0:
                    why = f"exit code {process.returncode}"
        with self.log.open(encoding="utf-8", errors="replace") as log:
            log.seek(begin)
            printed = log.read()
        if why and must_pass:
            raise Failed(f"{why}: {_line(command)}; see {self.log.name}")
        return printed

    def _programs(self) -> Sequence[Path | str]:
        # Also those that came with the packages beside torch, and with CUDA.
        return [
            self.python.parent,
            Path(sys.executable).parent,
            os.environ["PATH"],
            "/usr/local/cuda/bin",
            "/usr/local/nvidia/bin",
        ]

    # ---- Steps ---------------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, Any]:
        """A virtual environment over the packages of this Python, which may itself be of one, its pip included."""
        self.run(sys.executable, "-m", "venv", "--without-pip", VENV)
        purelib = self.run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        # Not the folders alone: they have .pth files themselves. The package is not installed: it is found beside this.
        beside = [f"import site; site.addsitedir({path!r})\n" for path in sys.path if path.endswith("-packages")]
        Path(purelib, "beside.pth").write_text(f"{''.join(beside)}{ROOT}\n", encoding="utf-8")
        cuda = self.run(self.python, "-c", "import torch; print(torch.version.cuda)").split(".")[0].strip()
        wanted = [self._ucx, *PACKAGES, *([] if cuda == "None" else [f"rmm-cu{cuda}"])]
        without = {}
        try:
            self.install(*wanted)
        except Failed:
            for package in wanted:  # one that is not there must not cost the others
                try:
                    self.install(package)
                except Failed as missing:
                    without[package] = str(missing)
        found = {"cuda": cuda, "without": without}
        if self._ucx in without:
            raise Failed(f"there is no UCX: {without[self._ucx]}", found)
        return found

    def install(self, *packages: str) -> None:
        offline = ["--no-index", "--find-links", str(self._wheels)] if self._wheels else []
        self.run(self.python, "-m", "pip", "install", "--disable-pip-version-check", *offline, *packages, at_most_s=60)

    def extension(self) -> dict[str, Any]:
        """The one that was carried, if it works with this torch; else one is built."""
        carried = sorted(self._wheels.glob(f"_C{EXTENSION_SUFFIXES[0]}")) if self._wheels else []
        for file in [*carried, *(self._wheels.glob("_build_info.py") if carried and self._wheels else [])]:
            shutil.copy(file, ROOT / "torch_ucx_rpc" / file.name)
        test = ["-c", "import torch_ucx_rpc; print(torch_ucx_rpc._C.ucx_library())"]
        found: dict[str, Any] = {"carried": [file.name for file in carried]}
        if carried:
            try:
                return {**found, "library": self.run(self.python, *test, at_most_s=60).strip()}
            except Failed as unusable:
                found["unusable"] = str(unusable)
        for package in build_environment.requirements("build"):
            self.install(package)
        self.run(self.python, "setup.py", "--quiet", "build_ext", "--inplace")
        return {**found, "library": self.run(self.python, *test, at_most_s=60).strip()}

    def probe(self) -> dict[str, Any]:
        """What no test says: the machine, what UCX finds there, and how an echo of tensors travels in several ways."""
        ucx = self.run(self.python, "-c", "import libucx, os; print(os.path.dirname(libucx.__file__))").strip()
        programs, library = Path(ucx, "bin"), {"LD_LIBRARY_PATH": f"{ucx}/lib"}
        for command in (
            [
                "nvidia-smi",
                "--query-gpu=name,memory.total,driver_version,compute_mode,mig.mode.current",
                "--format=csv",
            ],
            ["nvidia-smi", "nvlink", "--status"],
            ["nvidia-smi", "topo", "-m"],
            ["nvidia-smi", "-q"],
            [
                "sh",
                "-c",
                "g++ --version | head -1; gdb --version | head -1; command -v cuda-gdb compute-sanitizer nsys",
            ],
            ["sh", "-c", "df -h /dev/shm /tmp; cat /proc/sys/kernel/yama/ptrace_scope; nproc; ulimit -n -l; id -u"],
            [self.python, "-m", "pip", "list", "--format=freeze"],
        ):
            with contextlib.suppress(Failed):
                self.run(*command, at_most_s=8)
        with contextlib.suppress(Failed):
            self.run(programs / "ucx_info", "-v", "-d", at_most_s=10, **library)
        echo = [self.python, ROOT / "tools" / "gpu_probe.py"]
        found: dict[str, Any] = {}
        for name, seconds, setting in (
            ("echo", 30, {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"}),
            ("echo without cuda_ipc", 15, {"UCX_TLS": "^cuda_ipc"}),
            ("echo without UCX's cache of memory types", 15, {"UCX_MEMTYPE_CACHE": "n"}),
            ("echo with UCX's pipelines", 15, {"UCX_RNDV_PIPELINE_ERROR_HANDLING": "y"}),
        ):
            with contextlib.suppress(Failed):
                found[name] = _figures(self.run(*echo, at_most_s=seconds, must_pass=False, **setting))
        with contextlib.suppress(Failed):
            found["ucx_perftest"] = _figures(self.run(self.python, "-c", _PERFTEST, at_most_s=30, must_pass=False))
        if {"ended": [0, 0]} not in found.get("echo", []):
            raise Failed(f"the echo has failed; see {self.log.name}", found)
        return found

    def tests(self) -> dict[str, Any]:
        """This project's tests that need a GPU."""
        return self.pytest("-n", "4", "tests/e2e/test_cuda.py", "tests/e2e/test_arrays.py", "-m", "gpu")

    def benchmarks(self) -> dict[str, Any]:
        """The echo of CUDA tensors against TensorPipe, and UCX's own benchmark."""
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder, "rounds.json")
            command = [self.python, "-m", "benchmarks", "device_tensors", "--rounds", "2", "--json", record]
            table = self.run(*command).strip().splitlines()
            return {"table": table, **json.loads(record.read_text(encoding="utf-8"))}

    def conformance(self) -> dict[str, Any]:
        """PyTorch's suites for GPUs."""
        # What tests/conformance/page.py reads.
        report = f"--conformance-report={self.out / 'conformance.json'}"
        return self.pytest("-n", "4", "--cuda", report, "tests/conformance/test_cuda_suites.py")

    def sanitizer(self) -> dict[str, Any]:
        """A job under compute-sanitizer, the workers included."""
        test = [*PYTEST, "tests/e2e/test_cuda.py", "-k", "memory_is_not_reused and torch and shared"]
        printed = self.run(
            "compute-sanitizer",
            "--target-processes=all",
            "--report-api-errors=no",  # UCX asks CUDA about memory of all kinds, and is told that it is of another
            *(self.python, "-m", "pytest", *test),
        )
        errors = [int(found) for found in re.findall(r"ERROR SUMMARY: (\d+) error", printed)]
        if not errors or sum(errors) != 0:
            raise Failed(f"compute-sanitizer found errors in its processes: {errors}")
        return {"processes": len(errors), "errors": 0}

    # ---- Rehearsed without a GPU ------------------------------------------------------------------------------------

    def few_tests(self) -> dict[str, Any]:
        return self.pytest("-n", "2", "tests/unit/test_perftest_output.py")

    def one_hangs(self) -> dict[str, Any]:
        """One test passes, one hangs where no exception reaches it. Passes if that is what is found."""
        with tempfile.TemporaryDirectory(dir=self.out) as folder:
            Path(folder, "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
            test = Path(folder, "test_hanging.py")
            test.write_text(_HANGING, encoding="utf-8")

            def is_hanging() -> bool:
                printed = self.log.read_text(encoding="utf-8", errors="replace")
                return test.with_suffix(".hangs").exists() and "::test_passes" in printed and " PASSED " in printed

            try:
                # However long a busy machine takes to get there.
                self.pytest("-n", "2", "--rootdir", folder, test, at_most_s=1, since=is_hanging)
            except Failed as failed:
                found = failed.found or {}
                log = self.log.read_text(encoding="utf-8", errors="replace")
                unfinished = found.get("unfinished", [])
                if found.get("passed") != 1 or len(unfinished) != 1 or "in the_test_that_hangs" not in log:
                    raise Failed(f"the hang has cost the results or the stacks: {found}", found) from None
                return {"of which the stacks are there": failed.args[0], **found}
        raise Failed("a test that hangs has passed")

    # ---- pytest -----------------------------------------------------------------------------------------------------

    def pytest(self, *arguments: str | Path, **limits: Any) -> dict[str, Any]:
        """How the tests fared. Failed if any did, or none ran, or not all could."""
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder, "results.xml")
            failure, began = None, self.log.stat().st_size if self.log.exists() else 0
            try:
                self.run(self.python, "-m", "pytest", *PYTEST, f"--junitxml={results}", *arguments, **limits)
            except Failed as failed:
                failure = str(failed)
            with self.log.open(encoding="utf-8", errors="replace") as log:
                log.seek(began)
                found = outcome(results, log.read())
        if failure or found["failed"] or not found["passed"]:
            raise Failed(failure or "no test has passed", found)
        return found


def outcome(results: Path, printed: str) -> dict[str, Any]:
    """How many tests passed, which were skipped or failed, and why; from what pytest printed if it wrote no results."""
    failed: dict[str, str] = {}
    skipped: list[str] = []
    passed = 0
    lines = _ENDING.findall(printed)
    endings = {(second_name or name): (how or second_how) for how, name, second_name, second_how in lines}
    # Of those that pytest has named when they began; where it was ended, they are the ones to look at.
    unfinished = {"unfinished": sorted(begun)} if (begun := set(_BEGINNING.findall(printed)) - set(endings)) else {}
    try:
        cases = list(ElementTree.parse(results).getroot().iter("testcase"))
    except (FileNotFoundError, ElementTree.ParseError):
        failed = {name: "see the log" for name, how in endings.items() if how in {"FAILED", "ERROR"}}
        skipped = [name for name, how in endings.items() if how == "SKIPPED"]
        passed = sum(how == "PASSED" for how in endings.values())
        found = {"passed": passed, "failed": failed, "skipped": skipped, **unfinished}
        return {**found, "incomplete": "pytest has written no results"}
    for case in cases:
        name = f"{case.get('classname')}.{case.get('name')}"
        fault = case.find("failure") if case.find("failure") is not None else case.find("error")
        if fault is not None:
            failed[name] = f"{fault.get('message')}\n{(fault.text or '')[-4000:]}"
        elif (skip := case.find("skipped")) is not None:
            skipped.append(f"{name}: {skip.get('message')}")
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": skipped, **unfinished}


def write_stacks(session: int, log: int, at_most_s: float) -> None:
    """Of the processes of a session, C++ stacks by a debugger, if there is one, into an open file."""
    debugger = shutil.which("gdb") or shutil.which("cuda-gdb")
    until = time.monotonic() + at_most_s
    for pid in _session(session):
        left = until - time.monotonic()
        if debugger is None or left <= 0:
            return
        os.write(log, f"\n--- stacks of process {pid} ---\n".encode())
        order = ["-ex", "set pagination off", "-ex", "thread apply all backtrace 20"]
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            subprocess.run(
                [debugger, "-p", str(pid), "-batch", "-nx", *order],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=left,
                check=False,
            )


def end_session(process: subprocess.Popen[Any], at_most_s: float = LAST_WORDS_S) -> None:
    """Ctrl-C, for pytest's results; SIGABRT, upon which Python writes its stacks; then nothing is left of it.

    A hanging process stays until SIGABRT. Then it ends at once, unless the machine is busy.
    """
    if process.poll() is None:  # else only what it has left behind is ended
        results_s = LAST_WORDS_S * 0.6
        _send(process.pid, signal.SIGINT)  # pytest-xdist tells its own
        _wait_until(lambda: process.poll() is not None, results_s)
        # One after the other, while the others stand still: they share the log, and would garble it.
        for pid in _session(process.pid):
            _send(pid, signal.SIGSTOP)
        until = time.monotonic() + min(STACKS_S, max(LAST_WORDS_S * 0.2, at_most_s - results_s))
        for pid in _session(process.pid):
            _send(pid, signal.SIGABRT)
            _send(pid, signal.SIGCONT)
            _wait_until(lambda pid=pid: pid not in _session(process.pid), until - time.monotonic())
    for pid in _session(process.pid):
        _send(pid, signal.SIGKILL)
    process.wait()
    # The others are not its children, and a killed process ends when it runs next. One that hangs in a driver does not.
    _wait_until(lambda: not _session(process.pid), LAST_WORDS_S * 0.2)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait_until(is_so: Callable[[], bool], at_most_s: float) -> None:
    until = time.monotonic() + at_most_s
    while not is_so() and time.monotonic() < until:
        time.sleep(0.02)


def _session(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            state, _, _, of = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[:4]
            if int(of) == session and state not in "ZX":
                found.append(int(stat.parent.name))
    return sorted(found)


def _age_s() -> float:
    """Of this process."""
    started = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return max(0.0, uptime - started / os.sysconf("SC_CLK_TCK"))


def _line(command: Sequence[str | Path]) -> str:
    return " ".join(map(str, command))


def _figures(printed: str) -> list[Any]:
    """The lines of JSON among what tools/gpu_probe.py prints."""
    return [json.loads(line) for line in printed.splitlines() if line.startswith('{"')]


# Of a test in what `pytest -v` prints: "NAME HOW", or under pytest-xdist "[gw0] [ 50%] HOW NAME".
_HOW = "(PASSED|FAILED|ERROR|SKIPPED)"
_ENDING = re.compile(rf"^(?:\[gw\d+\] \[ *\d+%\] )?(?:{_HOW} (\S+)|(\S+::\S+) {_HOW})", re.MULTILINE)

# What it prints when a test begins: the name, and on the same line how it ends if it is no pytest-xdist.
_BEGINNING = re.compile(r"^(\S+\.py::\S+)(?: |$)", re.MULTILINE)

# Python writes its stacks when it is aborted, and what it prints at once.
_QUIET = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}

_PERFTEST = """
import json
from benchmarks.large_tensors import ucx_perftest

for memory in ("host", "cuda"):
    for test in ("ucp_am_bw", "ucp_am_lat"):
        for size in (4 * 2**10, 2**20, 64 * 2**20):
            speed = ucx_perftest(size, 20, test, lanes="all", memory=memory)
            print(json.dumps({"memory": memory, "test": test, "bytes": size, "GiB/s": speed}), flush=True)
"""

_HANGING = """
import ctypes
from pathlib import Path

def test_passes():
    pass

def the_test_that_hangs():
    Path(__file__).with_suffix(".hangs").touch()
    ctypes.PyDLL(None).sleep(1000)  # with the GIL held: no signal handler of Python's runs

def test_hangs():
    the_test_that_hangs()
"""

COMMANDS: dict[str, dict[str, Step]] = {
    "first": {
        "environment": Step(Check.environment, 30, 100),
        "extension": Step(Check.extension, 15, 240),
        "probe": Step(Check.probe, 60, 110),
        "tests": Step(Check.tests, 90, 200),
        "benchmarks": Step(Check.benchmarks, 90, 200),
    },
    "second": {
        "environment": Step(Check.environment, 30, 100),
        "extension": Step(Check.extension, 15, 240),
        "conformance": Step(Check.conformance, 200, 360),
        "sanitizer": Step(Check.sanitizer, 60, 120),
    },
}
REHEARSAL: dict[str, Step] = {
    "tests": Step(Check.few_tests, 20, 120),
    "hang": Step(Check.one_hangs, 60, 120),
}


def circumstances(wheels: Path | None) -> dict[str, str]:
    def output(*command: str) -> str:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
            return found.stdout.strip() or found.stderr.strip()
        return f"there is no {command[0]}"

    carried = wheels / "COMMIT" if wheels else ROOT / "COMMIT"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "gpu": output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "torch": output(sys.executable, "-c", "import torch; print(torch.__version__, 'CUDA', torch.version.cuda)"),
        "python": sys.version.split()[0],
        "commit": carried.read_text(encoding="utf-8").strip() if carried.exists() else _commit(),
    }


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    return found.stdout.strip() or "unknown"


def prepare(folder: Path, ucx: str) -> int:
    """For a machine without a network: UCX, RMM, pytest; the extension of this Python; which commit it is."""
    folder.mkdir(parents=True, exist_ok=True)
    cuda = ucx.rpartition("-cu")[2]
    for package in (ucx, f"rmm-cu{cuda}", f"librmm-cu{cuda}", "rapids-logger", *CARRIED):
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "-d",
            str(folder),
        ]
        if subprocess.run([*pip, package], check=False).returncode != 0:
            print(f"gpu-check: pip has not found {package}, which is left out")
    extension = ROOT / "torch_ucx_rpc" / f"_C{EXTENSION_SUFFIXES[0]}"
    if extension.exists():
        shutil.copy(extension, folder / extension.name)
        shutil.copy(extension.with_name("_build_info.py"), folder)
        subprocess.run(["strip", "--strip-debug", str(folder / extension.name)], check=False)
    else:
        print(f"gpu-check: there is no {extension.name}, without which gpu-check compiles for minutes: build it first")
    (folder / "COMMIT").write_text(f"{_commit()}\n", encoding="utf-8")
    files = sorted(folder.iterdir())
    print("\n".join(f"{file.stat().st_size / 2**20:7.1f} MiB  {file.name}" for file in files))
    print(f"{sum(file.stat().st_size for file in files) / 2**20:7.1f} MiB in {folder}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["prepare", *COMMANDS, "rehearse"])
    parser.add_argument("folder", nargs="?", type=Path, help="of prepare")
    parser.add_argument("--steps", nargs="+", default=[], help="only these")
    parser.add_argument("--wheels", type=Path, help="the folder that prepare has made")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "build" / "gpu-check"))
    parser.add_argument("--ucx", default="libucx-cu13", help="the wheel with UCX (default: libucx-cu13)")
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        if arguments.folder is None:
            parser.error("prepare needs a folder")
        return prepare(arguments.folder, arguments.ucx)

    arguments.out.mkdir(parents=True, exist_ok=True)
    is_rehearsal = arguments.command == "rehearse"
    steps = REHEARSAL if is_rehearsal else COMMANDS[arguments.command]
    if unknown := set(arguments.steps) - set(steps):
        parser.error(f"{arguments.command} has no step {', '.join(unknown)}, but {', '.join(steps)}")
    check = Check(
        arguments.out.resolve(),
        all_s=REHEARSAL_S if is_rehearsal else ALL_S,
        wheels=arguments.wheels.resolve() if arguments.wheels else None,
        ucx=arguments.ucx,
    )
    if is_rehearsal:
        check.python = Path(sys.executable)
        check.report["circumstances"] = {"rehearsed with": sys.version.split()[0], "commit": _commit()}
    else:
        check.report["circumstances"] = circumstances(check._wheels)
        print(json.dumps(check.report["circumstances"], indent=1), flush=True)
    return 0 if check.do({name: step for name, step in steps.items() if name in (arguments.steps or steps)}) else 1


def _summary(entry: dict[str, Any]) -> list[str]:
    found = entry.get("found") or {}
    lines = [entry["why"]] if "why" in entry else []
    if "table" in found:
        return lines + [line for line in found["table"] if line.startswith("|")]
    if isinstance(found.get("passed"), int):
        lines.append(f"{found['passed']} passed, {len(found['skipped'])} skipped, {len(found['failed'])} failed")
        return lines + [f"{name}: {why.splitlines()[0] if why else ''}" for name, why in found["failed"].items()]
    return lines + ([json.dumps(found)[:2000]] if found else [])


if __name__ == "__main__":
    sys.exit(main())
