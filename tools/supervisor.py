"""Runs steps one after the other, each within its time, and keeps their output and findings at once.

Each step runs, even if another has failed, and leaves later steps their time. The output of its programs is in
<step>.log, and the report in report.json, in one folder. The files are few and small, since a lent machine may return
no more. The report is written before and after each step, and names a step that is running. The logs have the stacks of
hung processes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import build_environment
import sessions
from pytest_outcome import outcome
from sessions import LAST_WORDS_S, STACKS_S

ROOT = build_environment.ROOT

# The bytes kept of the beginning and of the end of a longer log.
LOG_BEGINS = 2 * 2**20
LOG_ENDS = 6 * 2**20

# With these variables Python writes its stacks when it is aborted, and its output at once.
_QUIET = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}

# Containers with NVIDIA's driver, and machines with CUDA, have programs and libraries here that may be on no path.
_PROGRAMS = ("/usr/local/cuda/bin", "/usr/local/nvidia/bin")
_LIBRARIES = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib")


class WithoutOthers(TypedDict):
    """A part of an environment, with named keys: type checkers take keys of a plain dict for other arguments of
    `run`."""

    PYTEST_DISABLE_PLUGIN_AUTOLOAD: str


# The limit of one test. The output of pytest-xdist shows which test was running. Other plug-ins of the machine are not
# loaded: their warnings would be errors. Plug-ins are named by module: pytest-xdist's processes know no other names.
PLUGINS = ("-p", "xdist.plugin", "-p", "pytest_timeout")
PYTEST = (*PLUGINS, "-v", "--tb=short", "--timeout=45", "-p", "no:cacheprovider")
WITHOUT_OTHERS: WithoutOthers = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


class Failed(Exception):
    """A step did not pass. The text says why, and `found` has its findings so far."""

    def __init__(self, why: str, found: dict[str, Any] | None = None) -> None:
        super().__init__(why)
        self.found = found


@dataclasses.dataclass(frozen=True)
class Step:
    run: Callable[[Any], dict[str, Any] | None]  # with the Supervisor
    least_s: float  # earlier steps leave it this time
    most_s: float


class Supervisor:
    """Runs the steps of one command; `run` and `pytest` run programs for the steps."""

    def __init__(self, out: Path, *, all_s: float, python: Path) -> None:
        self.out = out
        self.python = python
        self.step = ""
        self.step_ends = 0.0
        self.report: dict[str, Any] = {"steps": {}}
        # The time counts from the start of the process, like the time for which the machine is lent.
        self.ends = time.monotonic() - age_s() + all_s

    @property
    def log(self) -> Path:
        return self.out / f"{self.step}.log"

    def seconds_left(self) -> float:
        return min(self.step_ends, self.ends) - time.monotonic()

    def write_report(self) -> None:
        """Write the report atomically: this command may be ended at any time."""
        new = self.out / ".report"
        new.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
        new.rename(self.out / "report.json")

    def do(self, steps: dict[str, Step]) -> bool:
        """Run all steps, and return whether all have passed."""
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
            except Exception:  # a fault in a step must not prevent later steps
                entry = {"passed": False, "why": traceback.format_exc()}
            entry["seconds"] = round(time.monotonic() - began, 1)
            self.report["steps"][name] = entry
            self.write_report()
            _shorten(self.log)
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
        """Run the command, and return its output, which also goes to the step's log. Raise Failed if it fails or is
        late.

        The command has the time of its step, and at most `at_most_s` from its start, or from the moment when `since` is
        true. If it is late, its stacks are written first. Then pytest can still write its results.
        """
        began = time.monotonic()
        last = began + self.seconds_left() - LAST_WORDS_S
        if last <= began:
            raise Failed(f"no time was left for {_line(command)}")
        path = os.pathsep.join(
            [str(self.python.parent), str(Path(sys.executable).parent), os.environ["PATH"], *_PROGRAMS]
        )
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {_line(command)}{''.join(f' {name}={value}' for name, value in environment.items())}\n")
            log.flush()
            begin = log.tell()
            try:
                process = subprocess.Popen(
                    [str(part) for part in command],
                    cwd=ROOT,
                    env={**os.environ, "PATH": path, "LD_LIBRARY_PATH": libraries(), **_QUIET, **environment},
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
                sessions.write_stacks(process.pid, log.fileno(), min(STACKS_S, max(1.0, self.seconds_left())), path)
                sessions.end(process, self.seconds_left())
            except BaseException:  # this program must end
                sessions.kill(process)
                raise
            else:
                sessions.end(process)  # end what the command has left
                if process.returncode != 0:
                    why = f"exit code {process.returncode}"
        with self.log.open(encoding="utf-8", errors="replace") as log:
            log.seek(begin)
            printed = log.read()
        if why and must_pass:
            raise Failed(f"{why}: {_line(command)}; see {self.log.name}")
        return printed

    def ask(self, *command: str | Path, **limits: Any) -> str:
        """Return the last line of the command's output: warnings come before it."""
        return self.run(*command, **limits).strip().rpartition("\n")[2]

    def pytest(self, *arguments: str | Path, **limits: Any) -> dict[str, Any]:
        """Run pytest, and return the outcomes of the tests. Raise Failed if a test failed, none ran, or some could not
        run."""
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder, "results.xml")
            failure, began = None, self.log.stat().st_size if self.log.exists() else 0
            command = [self.python, "-m", "pytest", *PYTEST, f"--junitxml={results}", *arguments]
            try:
                self.run(*command, **WITHOUT_OTHERS, **limits)
            except Failed as failed:
                failure = str(failed)
            with self.log.open(encoding="utf-8", errors="replace") as log:
                log.seek(began)
                found = outcome(results, log.read())
        if failure or found["failed"] or not found["passed"]:
            raise Failed(failure or "no test has passed", found)
        return found


def libraries(*first: Path | str) -> str:
    """Return an LD_LIBRARY_PATH with these folders, this process's folders, and those of NVIDIA's driver."""
    present = os.environ.get("LD_LIBRARY_PATH", "")
    return os.pathsep.join([*map(str, first), *filter(None, present.split(os.pathsep)), *_LIBRARIES])


def age_s() -> float:
    """Return the age of this process in seconds."""
    started = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return max(0.0, uptime - started / os.sysconf("SC_CLK_TCK"))


def _shorten(log: Path) -> None:
    if not log.exists() or log.stat().st_size <= LOG_BEGINS + LOG_ENDS:
        return
    with log.open("rb") as file:
        begin = file.read(LOG_BEGINS)
        file.seek(-LOG_ENDS, os.SEEK_END)
        end = file.read()
    left_out = log.stat().st_size - len(begin) - len(end)
    log.write_bytes(begin + f"\n--- {left_out} bytes are left out here ---\n".encode() + end)


def _line(command: Sequence[str | Path]) -> str:
    return " ".join(map(str, command))


def _summary(entry: dict[str, Any]) -> list[str]:
    found = entry.get("found") or {}
    lines = [entry["why"]] if "why" in entry else []
    if "table" in found:
        return lines + [line for line in found["table"] if line.startswith("|")]
    if isinstance(found.get("passed"), int):
        lines.append(f"{found['passed']} passed, {len(found['skipped'])} skipped, {len(found['failed'])} failed")
        return lines + [f"{name}: {why.splitlines()[0] if why else ''}" for name, why in found["failed"].items()]
    return lines + ([json.dumps(found)[:2000]] if found else [])
