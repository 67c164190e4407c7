"""The source distribution has the tracked files, and the build finds all its files in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Tracked files that a source distribution does not need: none so far.
LEFT_OUT: set[str] = set()

needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no git checkout")


def files_of_git(*options: str) -> set[str]:
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", *options]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {file for file in listed.stdout.split("\0") if file and (ROOT / file).exists()}


@needs_git
def test_the_source_distribution_has_the_tracked_files(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    listed = (tmp_path / "torch_ucx_rpc.egg-info" / "SOURCES.txt").read_text(encoding="utf-8").splitlines()
    packed = {file for file in listed if not file.startswith("/")}
    assert files_of_git() - packed == LEFT_OUT
    # A file that has just been written is packed before git tracks it.
    assert packed - files_of_git("--cached", "--others", "--exclude-standard") == set()


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.field
def test_unpacked_sdist_has_the_builds_files_and_metadata(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import build_environment
    finally:
        sys.path.remove(str(ROOT / "tools"))
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path), cwd=ROOT)
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        # Python 3.11.2 knows no filter; 3.14 wants one.
        packed.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    [tree] = tmp_path.glob("torch_ucx_rpc-*/")
    # `make build` asks this first.
    run(sys.executable, "tools/build_environment.py", "toolchain", "2.13.0", cwd=tree)
    cmake, ninja = build_environment.program("cmake"), build_environment.program("ninja")
    options = [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}", "-DTORCH_UCX_RPC_TESTS=ON"]
    ucx = f"-DTORCH_UCX_RPC_UCX={os.environ.get('TORCH_UCX_RPC_UCX', '')}"
    run(cmake, "-G", "Ninja", "-S", ".", "-B", "build", *options, ucx, cwd=tree)
    # Compiling takes minutes. This checks only that every source is there and would be compiled.
    commands = run(ninja, "-C", "build", "-t", "commands", cwd=tree)
    compiled = {path.resolve() for path in map(Path, re.findall(r" -c (\S+\.cpp)", commands))}
    assert all(path.exists() for path in compiled)
    sources = [*(ROOT / "torch_ucx_rpc" / "csrc").rglob("*.cpp"), *(ROOT / "tests" / "cpp").rglob("*_test.cpp")]
    assert {tree.resolve() / path.relative_to(ROOT) for path in sources} <= compiled
    # Its setup.cfg has a section of setuptools, which must not keep a wheel from being named for its torch.
    pinned = {**os.environ, "TORCH_UCX_RPC_PIN": "1"}
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "egg_info"], cwd=tree, env=pinned, capture_output=True, check=True
    )
    metadata = (tree / "torch_ucx_rpc.egg-info" / "PKG-INFO").read_text(encoding="utf-8")
    assert re.search(r"^Version: .*\+torch\d+\.\d+$", metadata, re.MULTILINE)
