"""Metadata is in one place, and environments install exactly the package's requirements."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from ._tools import ROOT, SETUP_CFG, build_environment

# Requirements with another name on conda-forge than on PyPI.
CONDA_NAMES = {
    "torch": "pytorch",
    "libucx-cu12": "ucx",
    "libucx-cu13": "ucx",
    "rmm-cu12": "rmm",
    "rmm-cu13": "rmm",
    "clang-tidy": "clang-tools",
    "build": "python-build",
    # Conda's package contains the command line.
    "griffelib": "griffe",
}


@pytest.fixture(scope="module")
def conda_environment() -> dict:
    return yaml.safe_load((ROOT / "conda-env.yml").read_text(encoding="utf-8"))


def name_of(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9_.-]+", requirement).group().lower()


def test_installed_version_is_the_one_of_setup_cfg():
    version, _, torch_minor = importlib.metadata.version("torch_ucx_rpc").partition("+")
    assert version == SETUP_CFG["metadata"]["version"]
    # A wheel's version also names its torch.
    assert re.fullmatch(r"(torch\d+\.\d+)?", torch_minor)


def test_version_stands_only_in_setup_cfg():
    version = SETUP_CFG["metadata"]["version"]
    files = [ROOT / name for name in ("pyproject.toml", "setup.py", "CMakeLists.txt", "Makefile", "conda-env.yml")]
    files += [ROOT / "CITATION.cff", *(ROOT / "tools").glob("*.py"), *(ROOT / ".github").rglob("*.yml")]
    files += [path for path in (ROOT / "torch_ucx_rpc").rglob("*") if path.suffix in {".py", ".pyi", ".h", ".cpp"}]
    # The build writes the version there, from setup.cfg.
    files.remove(ROOT / "torch_ucx_rpc" / "_build_info.py")
    quoted = re.compile(rf"""["'=\s]{re.escape(version)}["'\s)]""")
    assert [str(file) for file in files if quoted.search(file.read_text(encoding="utf-8"))] == []


def test_conda_environment_covers_the_requirements(conda_environment):
    conda = {name_of(line) for line in conda_environment["dependencies"] if isinstance(line, str)}
    groups = ["build", "install", *SETUP_CFG["options.extras_require"]]
    required = {name_of(line) for group in groups for line in build_environment.requirements(group)}
    assert {CONDA_NAMES.get(name, name) for name in required} - conda == set()


def bounds_of(line: str) -> set[str]:
    """The bounds in a line such as "pytorch >=2.11,<3", and in "ruff=0.17.5", which is conda's "==" for any build."""
    return {bound.replace("==", "=") for bound in re.findall(r"[<>=!~]+[\w.*]+", line.replace(" ", ""))}


def test_the_conda_files_have_the_bounds_of_setup_cfg(conda_environment, conda_recipe):
    groups = ["build", "install", *SETUP_CFG["options.extras_require"]]
    lines = [line.partition(";")[0] for group in groups for line in build_environment.requirements(group)]
    lines.append(f"python{SETUP_CFG['options']['python_requires']}")
    lines.append(f"ucx>={build_environment.dotted(build_environment.OLDEST_UCX)}")
    wanted = {CONDA_NAMES.get(name_of(line), name_of(line)): bounds_of(line) for line in lines if bounds_of(line)}
    # The last part of PyPI's version of clang-tidy is not LLVM's.
    wanted["clang-tools"] = {"=19.1"}
    assert {"torch>=2.11", "clang-tidy==19.1.0.1"} <= set(lines)

    environment = {name_of(line): bounds_of(line) for line in conda_environment["dependencies"]}
    assert {name: bounds for name, bounds in wanted.items() if not bounds <= environment[name]} == {}
    pythons = re.findall(r":: Python :: 3\.(\d+)", SETUP_CFG["metadata"]["classifiers"])
    assert f"<3.{max(map(int, pythons)) + 1}" in environment["python"]

    requirements = conda_recipe["requirements"]
    plain = [line for line in requirements["build"] + requirements["host"] if not line.startswith("${{")]
    recipe = {name_of(line): bounds_of(line) for line in plain}
    # conda's variants choose the version of Python, and the recipe says which versions to skip.
    oldest = SETUP_CFG["options"]["python_requires"].removeprefix(">=")
    assert f'match(python, "<{oldest}")' in conda_recipe["build"]["skip"]
    assert recipe.pop("python") == set()
    assert {"pytorch", "ucx", "setuptools", "cmake"} <= set(recipe)
    assert {name: bounds for name, bounds in recipe.items() if name in wanted and bounds != wanted[name]} == {}


@pytest.fixture(scope="module")
def conda_recipe() -> dict:
    return yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text(encoding="utf-8"))


def test_conda_recipe_agrees_with_setup_cfg(conda_recipe):
    metadata = SETUP_CFG["metadata"]
    assert conda_recipe["context"]["version"] == metadata["version"]
    assert conda_recipe["package"] == {"name": metadata["name"], "version": "${{ version }}"}
    about = conda_recipe["about"]
    assert (about["summary"], about["license"]) == (metadata["description"], metadata["license_expression"])
    assert about["license_file"] == metadata["license_files"]
    assert (ROOT / "recipe" / conda_recipe["source"]["path"]).samefile(ROOT)


def test_a_torch_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(build_environment, "oldest_torch", lambda: (2, 11))
    for version in ("2.11.0", "2.13.0+cpu", "2.14.0a0+git1234"):
        build_environment.check_torch_version(version)
    with pytest.raises(build_environment.Missing, match=r"torch 2\.10\.1 is too old"):
        build_environment.check_torch_version("2.10.1")


def test_without_ucx_the_build_names_the_package(monkeypatch):
    for place in ("ucx_of_wheel", "ucx_of_conda", "ucx_of_system"):
        monkeypatch.setattr(build_environment, place, lambda: None)
    with pytest.raises(build_environment.Missing, match="no UCX to build against: pip install libucx-cu12"):
        build_environment.ucx_facts("")
    with pytest.raises(build_environment.Missing, match="set it to wheel or system"):
        build_environment.ucx_facts("verbs")


# ---- The source distribution -----------------------------------------------------------------------------------------


def files_of_git(*options: str) -> set[str]:
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", *options]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {file for file in listed.stdout.split("\0") if file and (ROOT / file).exists()}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no git checkout")
def test_the_source_distribution_has_the_tracked_files(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    listed = (tmp_path / "torch_ucx_rpc.egg-info" / "SOURCES.txt").read_text(encoding="utf-8").splitlines()
    packed = {file for file in listed if not file.startswith("/")}
    assert files_of_git() - packed == set()
    # A new file is packed even before git tracks it.
    assert packed - files_of_git("--cached", "--others", "--exclude-standard") == set()


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.field
def test_unpacked_sdist_has_the_builds_files_and_metadata(tmp_path: Path) -> None:
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path), cwd=ROOT)
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        # Python 3.11.2 has no extraction filters; 3.14 requires one.
        packed.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    [tree] = tmp_path.glob("torch_ucx_rpc-*/")
    # `make build` first runs this.
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
    # setuptools adds a section to the sdist's setup.cfg. Even so a wheel must be named for its torch.
    pinned = {**os.environ, "TORCH_UCX_RPC_PIN": "1"}
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "egg_info"], cwd=tree, env=pinned, capture_output=True, check=True
    )
    metadata = (tree / "torch_ucx_rpc.egg-info" / "PKG-INFO").read_text(encoding="utf-8")
    assert re.search(r"^Version: .*\+torch\d+\.\d+$", metadata, re.MULTILINE)
