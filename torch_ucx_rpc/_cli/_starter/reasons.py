"""The signs by which a worker could notice that it was forked, as far as they are known before the first start."""

from __future__ import annotations

import importlib.machinery
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

# These make Python, a profiler or the loader do something at the start of each process.
_AT_START = (
    *("PYTHONINSPECT", "PYTHONVERBOSE", "PYTHONPROFILEIMPORTTIME", "PYTHONPERFSUPPORT", "PYTHON_PERF_JIT_SUPPORT"),
    *("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "LD_AUDIT"),
)
# Libraries that a fork does not disturb. An unknown library may start a thread, or note its pid.
_HARMLESS_LIBRARIES = re.compile(r"lib(jemalloc|tcmalloc|mimalloc|iomp5|omp|gomp)\b[^/]*")

# The variables that torch, its libraries and this package read during their import.
_NAMES = r"(?:OMP|KMP|GOMP|MKL|OPENBLAS|BLIS|NUMEXPR|ATEN|TORCH|PYTORCH|UCX|TORCH_UCX_RPC)_[A-Z0-9_]+"
_SETS = re.compile(
    rf"""environ\[\s*["']({_NAMES})["']\s*\]\s*=[^=]"""
    rf"""|(?:setdefault|putenv)\(\s*["']({_NAMES})["']"""
    rf"""|environ(?:\.update\(|\s*\|=)[^)]*?\b({_NAMES})"""
)


def difference(program: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The sign by which a worker with this program could notice a fork; None if there is none."""
    for variable in _AT_START:
        if environ.get(variable):
            return f"{variable} is set"
    for library in re.split(r"[\s:]+", environ.get("LD_PRELOAD", "")):
        if library and not _HARMLESS_LIBRARIES.fullmatch(Path(library).name):
            return f"LD_PRELOAD has {library}"
    if not _is_binary(sys.executable):
        return f"{sys.executable} is a script, which may hide PYTHONPATH from Python"
    if sys.gettrace() is not None:
        return "a debugger follows this process"
    for name in ("sitecustomize", "usercustomize"):
        # Python has imported it at the start of this process, as it would in a worker.
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and Path(file).parent != Path(sysconfig.get_path("stdlib")):
            return f"Python would import {file} for each worker"
    if found := _SETS.search(_text(program)):
        name = next(filter(None, found.groups()))
        return f"the program sets {name}, which is read when torch is imported"
    return None


def _is_binary(file: str) -> bool:
    try:
        with Path(file).open("rb") as executable:
            return executable.read(4) == b"\x7fELF"
    except OSError:
        return False


def _text(program: Sequence[str]) -> str:
    """Return the source of the program's main module; empty if the module has no source, or none can be found."""
    first = program[0]
    if first == "-c":
        return program[1]
    file: str | None = first
    if first == "-m":
        file = _file_of(program[1])
    elif Path(first).is_dir():
        file = f"{first}/__main__.py"
    try:
        return Path(file or "").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _file_of(module: str) -> str | None:
    """The file that ``python -m`` runs. This imports no package to find it."""
    path: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    spec = None
    for part in module.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    if spec is not None and path is not None:
        spec = importlib.machinery.PathFinder.find_spec("__main__", path)
    return None if spec is None else spec.origin
