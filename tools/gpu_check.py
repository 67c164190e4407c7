"""Everything that needs a GPU: probes the machine, tests, measures, and records each result at once.

    python tools/gpu_check.py prepare FOLDER    here, first: 50 MiB for a machine without a network
    python tools/gpu_check.py first             probe, tests, benchmarks: in less than 9 minutes
    python tools/gpu_check.py second            PyTorch's suites for GPUs, compute-sanitizer: likewise
    python tools/gpu_check.py first --steps probe
    python tools/gpu_check.py rehearse          the same procedure with CPU tests and one that hangs, in half a minute
    python tools/gpu_check.py rehearse-all      all steps without a GPU, with CPU tests instead of GPU tests

This program uses the torch of the Python that runs it, a CUDA build, and never replaces it. The environment,
.venv-gpu, sees the packages beside that torch and adds missing ones, from FOLDER if --wheels names it. The compiled
extension in FOLDER is used if it can be imported. Otherwise one is built.

The results are in the folder --out ($OUT, or build/gpu-check): small files, at most 8 of `first` or of `second`.
supervisor.py describes them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import build_environment
from gpu_carried import BUILT, commit, prepare, write_metadata
from supervisor import PYTEST, ROOT, WITHOUT_OTHERS, Failed, Step, Supervisor, libraries

VENV = ROOT / ".venv-gpu"

# The limit of all steps of a command, in seconds: a machine with a GPU is often lent by the minute.
ALL_S = 520.0
# The limit of a rehearsal on a busy machine. The short rehearsal takes 30 s on an idle machine.
REHEARSAL_S = 240.0
WHOLE_REHEARSAL_S = 3000.0

# Tests that run at a time; most have two processes.
AT_ONCE = str(min(8, max(2, (os.cpu_count() or 2) // 2)))

# Needs of the tests and benchmarks besides torch and UCX. (The extra `test` has launchers and tools as well.)
PACKAGES = ("expecttest", "numba", "numpy", "pytest>=9.0", "pytest-timeout", "pytest-xdist", "tqdm")


class Check(Supervisor):
    """The steps."""

    def __init__(
        self,
        out: Path,
        *,
        all_s: float = ALL_S,
        python: Path = VENV / "bin" / "python",
        wheels: Path | None = None,
        ucx: str = "libucx-cu13",
    ) -> None:
        super().__init__(out, all_s=all_s, python=python)
        self.wheels = wheels
        self._ucx = ucx

    def environment(self) -> dict[str, Any]:
        """Make a virtual environment that sees the packages of this Python, including pip. This Python may itself be in
        a virtual environment."""
        self.run(sys.executable, "-m", "venv", "--without-pip", VENV)
        purelib = self.ask(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        # addsitedir also reads the folders' own .pth files. The package is not installed: the path finds it in ROOT.
        beside = [f"import site; site.addsitedir({path!r})\n" for path in sys.path if path.endswith("-packages")]
        Path(purelib, "beside.pth").write_text(f"{''.join(beside)}{ROOT}\n", encoding="utf-8")
        write_metadata(Path(purelib))
        cuda = self.ask(self.python, "-c", "import torch; print(torch.version.cuda)").split(".")[0]
        wanted = [self._ucx, *PACKAGES, *([] if cuda == "None" else [f"rmm-cu{cuda}"])]
        without = {}
        try:
            self.install(*wanted)
        except Failed:
            for package in wanted:  # one missing package must not prevent the others
                try:
                    self.install(package)
                except Failed as missing:
                    without[package] = str(missing)
        found = {"cuda": cuda, "without": without}
        if self._ucx in without:
            raise Failed(f"there is no UCX: {without[self._ucx]}", found)
        return found

    def install(self, *packages: str) -> None:
        offline = ["--no-index", "--find-links", str(self.wheels)] if self.wheels else []
        self.run(self.python, "-m", "pip", "install", "--disable-pip-version-check", *offline, *packages, at_most_s=60)

    def extension(self) -> dict[str, Any]:
        """Use the extension from FOLDER if it works with this torch; otherwise build it."""
        carried = sorted(self.wheels.glob(f"_C{EXTENSION_SUFFIXES[0]}")) if self.wheels else []
        beside = [self.wheels / name for name in BUILT] if carried and self.wheels else []
        for file in [*carried, *(file for file in beside if file.exists())]:
            shutil.copy(file, ROOT / "torch_ucx_rpc" / file.name)
        test = ["-c", "import torch_ucx_rpc; print(torch_ucx_rpc._C.ucx_library())"]
        found: dict[str, Any] = {"carried": [file.name for file in carried]}
        if carried:
            try:
                return {**found, "library": self.ask(self.python, *test, at_most_s=60)}
            except Failed as unusable:
                found["unusable"] = str(unusable)
        self.build()
        return {**found, "library": self.ask(self.python, *test, at_most_s=60)}

    def build(self) -> None:
        for package in build_environment.requirements("build"):
            with contextlib.suppress(Failed):  # the machine may have it already; else the build's error names it
                self.install(package)
        self.run(self.python, "setup.py", "--quiet", "build_ext", "--inplace")

    def probe(self) -> dict[str, Any]:
        """Find facts that no test shows: the machine, what UCX finds there, and how an echo of tensors travels in
        several ways."""
        for command in _LOOK:
            with contextlib.suppress(Failed):
                self.run(*command, at_most_s=8)
        found: dict[str, Any] = {}
        with contextlib.suppress(Failed):
            self.run(self.python, "-m", "pip", "list", "--format=freeze", at_most_s=20)
        with contextlib.suppress(Failed):
            found["torch"] = figures(self.run(self.python, "-c", _TORCH, at_most_s=30, must_pass=False))
        with contextlib.suppress(Failed):
            ucx = self.ask(self.python, "-c", "import libucx, os; print(os.path.dirname(libucx.__file__))")
            program = Path(ucx, "bin", "ucx_info")
            self.run(program, "-v", "-d", at_most_s=10, LD_LIBRARY_PATH=libraries(Path(ucx, "lib")))
        echo = [self.python, ROOT / "tools" / "gpu_probe.py"]
        for name, seconds, setting in (
            ("echo", 30, {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"}),
            ("echo without cuda_ipc", 15, {"UCX_TLS": "^cuda_ipc"}),
            ("echo without UCX's cache of memory types", 15, {"UCX_MEMTYPE_CACHE": "n"}),
            ("echo with UCX's pipelines", 15, {"UCX_RNDV_PIPELINE_ERROR_HANDLING": "y"}),
        ):
            with contextlib.suppress(Failed):
                # All of `run`'s own keywords are passed, so the setting becomes an environment variable.
                found[name] = figures(self.run(*echo, at_most_s=seconds, since=None, must_pass=False, **setting))
        with contextlib.suppress(Failed):
            found["ucx_perftest"] = figures(self.run(self.python, "-c", _PERFTEST, at_most_s=30, must_pass=False))
        if {"ended": [0, 0]} not in found.get("echo", []):
            raise Failed(f"the echo has failed; see {self.log.name}", found)
        return found

    def tests(self) -> dict[str, Any]:
        """Run this project's tests that need a GPU."""
        return self.pytest("-n", AT_ONCE, "tests/e2e/test_cuda.py", "tests/e2e/test_arrays.py", "-m", "gpu")

    def benchmarks(self, name: str = "device_tensors", rounds: int = 2) -> dict[str, Any]:
        """Compare the echo of CUDA tensors with TensorPipe, and run UCX's own benchmark. Fail if a bound is missed."""
        failure = None
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder, "rounds.json")
            command = [str(self.python), "-m", "benchmarks", name, "--rounds", str(rounds), "--json", str(record)]
            try:
                self.run(*command)
            except Failed as failed:
                failure = str(failed)
            found = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        # Each round is in the log, even if a later one fails.
        printed = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        found["table"] = [line for line in printed if line.startswith(("|", "MISSED", "FAILED", "measured "))]
        if failure:
            raise Failed(failure, found)
        return found

    def conformance(self) -> dict[str, Any]:
        """Run PyTorch's suites for GPUs."""
        return self.suites("-n", AT_ONCE, "--cuda", "tests/conformance/test_cuda_suites.py")

    def suites(self, *arguments: str) -> dict[str, Any]:
        """Run some of PyTorch's suites, with a report for tests/conformance/page.py."""
        return self.pytest(f"--conformance-report={self.out / 'conformance.json'}", *arguments)

    def sanitizer(self) -> dict[str, Any]:
        """Run a job and its workers under compute-sanitizer."""
        test = [*PYTEST, "tests/e2e/test_cuda.py", "-k", "memory_is_not_reused and torch and shared"]
        printed = self.run(
            "compute-sanitizer",
            "--target-processes=all",
            "--report-api-errors=no",  # UCX asks CUDA about any memory, and gets an error if it is not CUDA's
            *(str(self.python), "-m", "pytest", *test),
            **WITHOUT_OTHERS,
        )
        errors = [int(found) for found in re.findall(r"ERROR SUMMARY: (\d+) error", printed)]
        if not errors or sum(errors) != 0:
            raise Failed(f"compute-sanitizer found errors in its processes: {errors}")
        return {"processes": len(errors), "errors": 0}

    # ---- Rehearsed without a GPU ------------------------------------------------------------------------------------

    def few_tests(self) -> dict[str, Any]:
        return self.pytest("-n", "2", "tests/unit/test_latencies.py")

    def cpu_tests(self) -> dict[str, Any]:
        """Run CPU tests instead of those for GPUs. test_cuda.py is collected too."""
        files = [f"tests/e2e/test_{name}.py" for name in ("calls", "cuda", "rrefs", "tensors")]
        return self.pytest("-n", "2", *files)

    def cpu_benchmark(self) -> dict[str, Any]:
        """Run a benchmark instead of the one for GPUs. Missed bounds do not count, since a busy machine misses them."""
        try:
            return self.benchmarks("small_calls", 1)
        except Failed as failed:
            table = (failed.found or {}).get("table", [])
            if not table or any(line.startswith("FAILED") for line in table):
                raise
            return {"table": table}

    def stub(self) -> dict[str, Any]:
        """Run UCX and our agents with device memory on the driver of tests/cuda_stub. Compile them if needed."""
        self.build()
        directory = self.ask(self.python, ROOT / "tools" / "build_environment.py", "directory")
        self.run("cmake", "-DTORCH_UCX_RPC_TESTS=ON", directory)
        self.run("cmake", "--build", directory, "--target", "device_lanes_test", "device_agents_test")
        tests = ["--output-on-failure", "--no-tests=error", "--tests-regex", "^device_(lanes|agents)_"]
        printed = self.run("ctest", "--test-dir", directory, *tests)
        return {"stub": [line for line in printed.splitlines() if "tests passed" in line]}

    def cpu_suites(self) -> dict[str, Any]:
        return self.suites("-n", "2", "tests/conformance/test_generic.py", "-k", "test_add or test_py_built_in or rref")

    def one_hangs(self) -> dict[str, Any]:
        """Run a test that passes, and one that hangs where no exception reaches it. Pass if the report says so."""
        with tempfile.TemporaryDirectory(dir=self.out) as folder:
            Path(folder, "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
            test = Path(folder, "test_hanging.py")
            test.write_text(_HANGING, encoding="utf-8")

            def is_hanging() -> bool:
                printed = self.log.read_text(encoding="utf-8", errors="replace")
                return test.with_suffix(".hangs").exists() and "::test_passes" in printed and " PASSED " in printed

            try:
                # The start has no limit, since a busy machine takes long until the test hangs.
                self.pytest("-n", "2", "--rootdir", folder, test, at_most_s=1, since=is_hanging)
            except Failed as failed:
                found = failed.found or {}
                log = self.log.read_text(encoding="utf-8", errors="replace")
                unfinished = found.get("unfinished", [])
                if found.get("passed") != 1 or len(unfinished) != 1 or "in the_test_that_hangs" not in log:
                    raise Failed(f"the hang has cost the results or the stacks: {found}", found) from None
                return {"of which the stacks are there": failed.args[0], **found}
        raise Failed("a test that hangs has passed")


def figures(printed: str) -> list[Any]:
    """Return the JSON that tools/gpu_probe.py prints. A line may mix output of its processes and UCX's log."""
    found, at, decoder = [], 0, json.JSONDecoder()
    while (at := printed.find('{"', at)) >= 0:
        try:
            value, at = decoder.raw_decode(printed, at)
            found.append(value)
        except json.JSONDecodeError:
            at += 1  # cut in two by another process
    return found


# Commands of `probe` that show facts about the machine.
_LOOK = (
    ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_mode,mig.mode.current", "--format=csv"),
    ("nvidia-smi", "nvlink", "--status"),
    ("nvidia-smi", "topo", "-m"),
    ("nvidia-smi", "-q"),
    (
        "sh",
        "-c",
        "uname -r; g++ --version | head -1; gdb --version | head -1; command -v cuda-gdb compute-sanitizer nsys make; "
        "echo LD_LIBRARY_PATH=$LD_LIBRARY_PATH; ldconfig -p | grep -E 'libcuda.so|libnvidia-ml'",
    ),
    (
        "sh",
        "-c",
        "df -h /dev/shm /tmp; cat /proc/sys/kernel/yama/ptrace_scope; nproc; free -g; ulimit -n -l; id -u; ipcs -l",
    ),
)

_TORCH = """
import json, torch
print(json.dumps({"available": torch.cuda.is_available(), "devices": torch.cuda.device_count()}), flush=True)
properties = torch.cuda.get_device_properties(0)
print(json.dumps({"name": properties.name, "capability": torch.cuda.get_device_capability(0),
                  "allocator": torch.cuda.get_allocator_backend(), "properties": str(properties)}))
"""

_PERFTEST = """
import json
import torch
from benchmarks.large_tensors import ucx_perftest

for memory in ("host", "cuda") if torch.cuda.is_available() else ("host",):
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

# The steps of each command.
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
REHEARSALS: dict[str, dict[str, Step]] = {
    "rehearse": {
        "tests": Step(Check.few_tests, 20, 120),
        "hang": Step(Check.one_hangs, 60, 120),
    },
    "rehearse-all": {
        "environment": Step(Check.environment, 30, 300),
        "extension": Step(Check.extension, 15, 900),
        "probe": Step(Check.probe, 60, 240),
        "tests": Step(Check.cpu_tests, 90, 600),
        "stub": Step(Check.stub, 90, 1200),
        "benchmarks": Step(Check.cpu_benchmark, 90, 300),
        "conformance": Step(Check.cpu_suites, 90, 600),
    },
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
        "commit": carried.read_text(encoding="utf-8").strip() if carried.exists() else commit(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["prepare", *COMMANDS, *REHEARSALS])
    parser.add_argument("folder", nargs="?", type=Path, help="the folder for prepare")
    parser.add_argument("--steps", nargs="+", default=[], help="run only these steps")
    parser.add_argument("--seconds", type=float, help=f"of all steps together (default of first and second: {ALL_S:g})")
    parser.add_argument("--wheels", type=Path, help="the folder that prepare has made")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "build" / "gpu-check"))
    parser.add_argument("--ucx", default="libucx-cu13", help="the wheel with UCX (default: libucx-cu13)")
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        if arguments.folder is None:
            parser.error("prepare needs a folder")
        return prepare(arguments.folder, arguments.ucx)

    # A signal must end the children too, since each has its own session.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments.out.mkdir(parents=True, exist_ok=True)
    steps = (COMMANDS | REHEARSALS)[arguments.command]
    if unknown := set(arguments.steps) - set(steps):
        parser.error(f"{arguments.command} has no step {', '.join(unknown)}, but {', '.join(steps)}")
    is_short = arguments.command == "rehearse"
    default_s = REHEARSAL_S if is_short else ALL_S if arguments.command in COMMANDS else WHOLE_REHEARSAL_S
    check = Check(
        arguments.out.resolve(),
        all_s=arguments.seconds or default_s,
        python=Path(sys.executable) if is_short else VENV / "bin" / "python",
        wheels=arguments.wheels.resolve() if arguments.wheels else None,
        ucx=arguments.ucx,
    )
    if is_short:
        check.report["circumstances"] = {"rehearsed with": sys.version.split()[0], "commit": commit()}
    else:
        check.report["circumstances"] = circumstances(check.wheels)
        print(json.dumps(check.report["circumstances"], indent=1), flush=True)
    return 0 if check.do({name: step for name, step in steps.items() if name in (arguments.steps or steps)}) else 1


if __name__ == "__main__":
    sys.exit(main())
