"""The record of a run of benchmarks, as JSON: every round, the machine, the versions, the commit.

The file is written after each benchmark, so a program that ends early leaves the earlier results. tables.py and plot.py
read it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks import harness, jobs

RESULTS = Path(__file__).parent / "results"


class Record:
    """A file to which results are added.

    With ``keeps_others`` the file keeps its results of other benchmarks. Each result has the time and the commit of its
    measurement.
    """

    def __init__(self, file: Path, *, keeps_others: bool = False) -> None:
        self._file = file
        before = json.loads(file.read_text(encoding="utf-8")) if keeps_others and file.exists() else {}
        self._kept: dict[str, Any] = {
            "circumstances": circumstances(),
            "configuration": configuration(),
            "lanes": before.get("lanes", {}),
            "measured": before.get("measured", {}),
            "rounds": before.get("rounds", {}),
            "failures": before.get("failures", {}),
        }

    def add(self, name: str, result: harness.Result, load_before: float, seconds: float) -> None:
        self._kept["lanes"] |= jobs.LANES
        self._kept["measured"][name] = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit(),
            "seconds": round(seconds),
            "load before and after": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        }
        self._kept["rounds"][name] = result.rounds
        self._kept["failures"].pop(name, None)
        if result.failures:
            self._kept["failures"][name] = result.failures
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._kept, indent=1) + "\n", encoding="utf-8")
        new.replace(self._file)


def circumstances() -> dict[str, Any]:
    """Return facts about the machine, and the versions: without these a figure means nothing."""
    import torch

    import torch_ucx_rpc
    from torch_ucx_rpc import _native

    processor = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": processor[1] if processor else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ucx": ".".join(map(str, loaded.version)) if (loaded := _native.loaded_ucx()) else "",
        "torch_ucx_rpc": torch_ucx_rpc.__version__,
        **({"gpu": _gpu()} if torch.cuda.is_available() else {}),
    }


def _gpu() -> str:
    """Return the GPU's name and driver, and how processes share it: in turns, or through NVIDIA's Multi-Process
    Service."""
    named = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    shared = "MPS" if "CUDA_MPS_PIPE_DIRECTORY" in os.environ else "time slices"
    return f"{named[0] if named else 'unknown'}, shared by {shared}"


def commit() -> str:
    """Return the commit of this checkout, with "-dirty" if the package or the benchmarks differ from it.

    A copy without the repository may have the commit in the variable COMMIT.
    """
    if named := os.environ.get("COMMIT"):
        return named
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    sources = (":/torch_ucx_rpc", ":/benchmarks", ":!/benchmarks/results")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", "--", *sources)
    return f"{head}-dirty" if changed else head


def _output(*command: str) -> str:
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return found.stdout.strip()


def configuration() -> dict[str, dict[str, Any]]:
    """Return the settings of each transport, by its name."""
    return {
        transport.name: {"backend": transport.backend, **transport.environment, **transport.options}
        for transport in jobs.TRANSPORTS
    }
