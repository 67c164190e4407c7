"""Prepare files for a GPU machine without a network, and write the metadata of an installation there."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import build_environment

ROOT = build_environment.ROOT

# The downloads of `prepare`. Most images with torch have the other packages.
CARRIED = ("expecttest", "iniconfig", "execnet", "pluggy", "pytest>=9.0", "pytest-timeout", "pytest-xdist")
# The files that the build leaves in the package, beside the extension.
BUILT = ("_build_info.py", "_torch_headers.txt")


def commit() -> str:
    with contextlib.suppress(OSError):
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        return found.stdout.strip() or "unknown"
    return "unknown"


def prepare(folder: Path, ucx: str) -> int:
    """Fill the folder for a machine without a network: UCX, RMM, pytest, this Python's extension, and the commit."""
    folder.mkdir(parents=True, exist_ok=True)
    cuda = ucx.rpartition("-cu")[2]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    for package in (ucx, f"rmm-cu{cuda}", f"librmm-cu{cuda}", "rapids-logger", *CARRIED):
        if subprocess.run([*pip, package], check=False).returncode != 0:
            print(f"gpu-check: pip has not found {package}, which is left out")
    extension = ROOT / "torch_ucx_rpc" / f"_C{EXTENSION_SUFFIXES[0]}"
    if extension.exists():
        for name in (extension.name, *BUILT):
            shutil.copy(extension.with_name(name), folder)
        subprocess.run(["strip", "--strip-debug", str(folder / extension.name)], check=False)
    else:
        print(f"gpu-check: there is no {extension.name}, without which gpu-check compiles for minutes: build it first")
    (folder / "COMMIT").write_text(f"{commit()}\n", encoding="utf-8")
    files = sorted(folder.iterdir())
    print("\n".join(f"{file.stat().st_size / 2**20:7.1f} MiB  {file.name}" for file in files))
    print(f"{sum(file.stat().st_size for file in files) / 2**20:7.1f} MiB in {folder}")
    return 0


def write_metadata(folder: Path) -> None:
    """Write this package's version and entry points, which the package looks up, as if it were installed there."""
    config = build_environment.setup_cfg()
    name, version = config["metadata"]["name"], config["metadata"]["version"]
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (metadata / "METADATA").write_text(text, encoding="utf-8")
    groups = [f"[{group}]\n{points.strip()}\n" for group, points in config["options.entry_points"].items()]
    (metadata / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
