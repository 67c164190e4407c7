"""Everything that needs a GPU, in one go: builds the package, tests and measures it, and writes a report.

    make gpu-check                              all of it, in less than 9 minutes
    make gpu-check WHEELS=wheels                without a network; what is not installed comes from that folder
    make gpu-check STEPS="tests benchmarks"     some of it

The torch is the one that PYTHON has, a CUDA build, which nothing here replaces. The environment, .venv-gpu, sees what
is installed beside that torch and adds what is missing. Each step runs whatever the others say, until the time is
over; what it prints is in build/gpu-check/<step>.log. The report, build/gpu-check.json, says of each step whether it
passed, how long it took, and what it found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build_environment

ROOT = build_environment.ROOT
VENV = ROOT / ".venv-gpu"
PYTHON = VENV / "bin" / "python"
# Also those that came with the packages beside torch.
PROGRAMS = [VENV / "bin", Path(sys.executable).parent, os.environ["PATH"]]
OUTPUT = ROOT / "build" / "gpu-check"
REPORT = ROOT / "build" / "gpu-check.json"

# Of all steps together, in seconds; a machine with a GPU is often lent by the minute.
ALL_S = 520.0

# What the tests and benchmarks here need besides torch and UCX. (The extra `test` has launchers and tools as well.)
PACKAGES = ("expecttest", "numba", "numpy", "pytest", "pytest-timeout", "pytest-xdist", "tqdm")


class Failed(Exception):
    """A step did not pass; the text says why."""


class Check:
    def __init__(self, wheels: Path | None, ucx: str) -> None:
        self._wheels = wheels
        self._ucx = ucx
        self._began = time.monotonic()
        self.step = ""

    def seconds_left(self) -> float:
        return ALL_S - (time.monotonic() - self._began)

    def run(self, *command: str | Path, at_most_s: float, **environment: str) -> str:
        """What the command prints, also into the step's log. Failed where it does not end well, or not in time."""
        limit = min(at_most_s, self.seconds_left())
        if limit <= 0:
            raise Failed("no time was left for it")
        log = OUTPUT / f"{self.step}.log"
        with log.open("a", encoding="utf-8") as output:
            begin = output.tell()
            try:
                process = subprocess.Popen(
                    [str(part) for part in command],
                    cwd=ROOT,
                    env={**os.environ, "PATH": ":".join(map(str, PROGRAMS)), **environment},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except FileNotFoundError:
                raise Failed(f"there is no {command[0]}") from None
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise Failed(f"was ended after {limit:.0f} s: {' '.join(map(str, command))}; see {log}") from None
        with log.open(encoding="utf-8", errors="replace") as output:
            output.seek(begin)
            printed = output.read()
        if process.returncode != 0:
            raise Failed(f"exit code {process.returncode} of {' '.join(map(str, command))}; see {log}")
        return printed

    # ---- Steps ---------------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, Any]:
        """A virtual environment over the packages of this Python, which may itself be of one, its pip included."""
        self.run(sys.executable, "-m", "venv", "--without-pip", VENV, at_most_s=60)
        purelib = self.run(PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", at_most_s=10).strip()
        # Not the folders alone: they have .pth files themselves.
        beside = [f"import site; site.addsitedir({path!r})\n" for path in sys.path if path.endswith("-packages")]
        Path(purelib, "beside.pth").write_text("".join(beside), encoding="utf-8")
        offline = ["--no-index", "--find-links", str(self._wheels)] if self._wheels else []
        cuda = self.run(PYTHON, "-c", "import torch; print(torch.version.cuda)", at_most_s=60).split(".")[0].strip()
        rmm = [] if cuda == "None" else [f"rmm-cu{cuda}"]
        required = [*build_environment.requirements("build"), *PACKAGES, self._ucx]
        self.run(PYTHON, "-m", "pip", "install", *offline, *required, at_most_s=120)
        found: dict[str, Any] = {"cuda": cuda}
        for package in rmm:
            try:
                self.run(PYTHON, "-m", "pip", "install", *offline, package, at_most_s=60)
            except Failed as missing:
                found["without"] = f"{package}: {missing}"
        return found

    def build(self) -> None:
        self.run(PYTHON, "setup.py", "--quiet", "build_ext", "--inplace", at_most_s=240)
        self.run(PYTHON, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--editable", ".", at_most_s=60)

    def conformance(self) -> dict[str, Any]:
        """PyTorch's suites for GPUs."""
        report = OUTPUT / "conformance-suites.json"  # what tests/conformance/page.py reads
        return self._pytest(
            "tests/conformance/test_cuda_suites.py", "--cuda", f"--conformance-report={report}", at_most_s=240
        )

    def tests(self) -> dict[str, Any]:
        """This project's tests that need a GPU."""
        return self._pytest("tests/e2e/test_cuda.py", "tests/e2e/test_arrays.py", "-m", "gpu", at_most_s=150)

    def sanitizer(self) -> dict[str, Any]:
        """A job under compute-sanitizer, the workers included."""
        printed = self.run(
            "compute-sanitizer",
            "--target-processes=all",
            # UCX asks CUDA about memory of all kinds, and is told that it is of another.
            "--report-api-errors=no",
            PYTHON,
            *(
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:xdist",
                "tests/e2e/test_cuda.py",
                "-k",
                "memory_is_not_reused and torch and shared",
            ),
            at_most_s=120,
        )
        errors = [int(found) for found in re.findall(r"ERROR SUMMARY: (\d+) error", printed)]
        if not errors or sum(errors) != 0:
            raise Failed(f"compute-sanitizer found errors in its processes: {errors}")
        return {"processes": len(errors), "errors": 0}

    def benchmarks(self) -> dict[str, Any]:
        """The echo of CUDA tensors against TensorPipe."""
        record = OUTPUT / "benchmarks.json"
        table = self.run(PYTHON, "-m", "benchmarks", "device_tensors", "--json", record, at_most_s=150)
        return {"table": table.strip().splitlines(), **json.loads(record.read_text(encoding="utf-8"))}

    def _pytest(self, *arguments: str, at_most_s: float) -> dict[str, Any]:
        results = OUTPUT / f"{self.step}.xml"
        results.unlink(missing_ok=True)
        failure = None
        try:
            # Each test has processes of its own, with a context on the GPU each.
            self.run(
                PYTHON,
                "-m",
                "pytest",
                "-q",
                "-rfE",
                "-n",
                "4",
                f"--junitxml={results}",
                *arguments,
                at_most_s=at_most_s,
            )
        except Failed as failed:
            failure = str(failed)
        if not results.exists():
            raise Failed(failure or "pytest has written no results")
        return _outcome(results, failure)


def _outcome(results: Path, failure: str | None) -> dict[str, Any]:
    """How many tests passed, were skipped and why, and which failed. Failed if any did, or none ran."""
    cases = list(ElementTree.parse(results).getroot().iter("testcase"))
    names = {"failed": [], "skipped": []}
    for case in cases:
        name = f"{case.get('classname')}.{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            names["failed"].append(name)
        elif (skipped := case.find("skipped")) is not None:
            names["skipped"].append(f"{name}: {skipped.get('message')}")
    passed = len(cases) - len(names["failed"]) - len(names["skipped"])
    found = {"passed": passed, **names}
    if failure or names["failed"] or not passed:
        raise Failed(f"{failure or 'no test has run'}: {json.dumps(found)}")
    return found


STEPS: dict[str, Callable[[Check], dict[str, Any] | None]] = {
    "environment": Check.environment,
    "build": Check.build,
    "tests": Check.tests,
    "benchmarks": Check.benchmarks,
    "conformance": Check.conformance,
    "sanitizer": Check.sanitizer,
}


def circumstances() -> dict[str, str]:
    def output(*command: str) -> str:
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        except FileNotFoundError:
            return f"there is no {command[0]}"
        return found.stdout.strip()

    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "torch": output(sys.executable, "-c", "import torch; print(torch.__version__, 'CUDA', torch.version.cuda)"),
        "python": sys.version.split()[0],
        "commit": output("git", "rev-parse", "--short", "HEAD"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", choices=[*STEPS, []], metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--wheels", type=Path, help="a folder with the wheels that pip is to take")
    parser.add_argument("--ucx", default="libucx-cu13", help="the wheel with UCX (default: libucx-cu13)")
    parser.add_argument("--without-gpu", action="store_true", help="go on where torch finds none: to try this program")
    arguments = parser.parse_args()

    OUTPUT.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"circumstances": circumstances(), "steps": {}}
    asked = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.stdout.strip() in {"", "0"} and not arguments.without_gpu:
        print(f"gpu-check: torch of {sys.executable} finds no GPU: {asked.stderr.strip() or report['circumstances']}")
        return 1
    check = Check(arguments.wheels, arguments.ucx)
    is_clean = True
    for name in arguments.steps or STEPS:
        check.step = name
        (OUTPUT / f"{name}.log").unlink(missing_ok=True)
        began = time.monotonic()
        entry: dict[str, Any] = {"passed": True}
        try:
            entry["found"] = STEPS[name](check)
        except Failed as failed:
            entry = {"passed": False, "why": str(failed)}
        entry["seconds"] = round(time.monotonic() - began, 1)
        is_clean &= entry["passed"]
        report["steps"][name] = entry
        # After each step: what comes next may take the machine with it.
        REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"{name:12} {'passed' if entry['passed'] else 'FAILED'} in {entry['seconds']:.0f} s", flush=True)
        print("\n".join(f"    {line}" for line in _summary(entry)), flush=True)
    print(f"the report is {REPORT.relative_to(ROOT)}, {'all passed' if is_clean else 'not all passed'}")
    return 0 if is_clean else 1


def _summary(entry: dict[str, Any]) -> list[str]:
    found = entry.get("found") or {}
    if "table" in found:
        return [line for line in found["table"] if line.startswith("|")]
    if isinstance(found.get("passed"), int):
        return [f"{found['passed']} passed, {len(found['skipped'])} skipped"]
    return [entry["why"]] if "why" in entry else [json.dumps(found)] if found else []


if __name__ == "__main__":
    sys.exit(main())
