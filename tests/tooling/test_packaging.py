"""Metadata stands once, and environments install exactly the package's requirements."""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]

# Requirements with another name on conda-forge than on PyPI.
CONDA_NAMES = {
    "torch": "pytorch",
    "libucx-cu12": "ucx",
    "libucx-cu13": "ucx",
    "rmm-cu12": "rmm",
    "rmm-cu13": "rmm",
    "clang-tidy": "clang-tools",
    "build": "python-build",
    # Conda's package brings its command line.
    "griffelib": "griffe",
}


@pytest.fixture(scope="module")
def build_environment() -> ModuleType:
    """tools/build_environment.py, which reads the requirements for the Makefile as well."""
    spec = importlib.util.spec_from_file_location("build_environment", ROOT / "tools" / "build_environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


@pytest.fixture(scope="module")
def conda_environment() -> dict:
    return yaml.safe_load((ROOT / "conda-env.yml").read_text(encoding="utf-8"))


def name_of(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9_.-]+", requirement).group().lower()


def test_installed_version_is_the_one_of_setup_cfg(setup_cfg):
    version, _, torch_minor = importlib.metadata.version("torch_ucx_rpc").partition("+")
    assert version == setup_cfg["metadata"]["version"]
    # A wheel's version also names its torch.
    assert re.fullmatch(r"(torch\d+\.\d+)?", torch_minor)


def test_version_stands_only_in_setup_cfg(setup_cfg):
    version = setup_cfg["metadata"]["version"]
    files = [ROOT / name for name in ("pyproject.toml", "setup.py", "CMakeLists.txt", "Makefile", "conda-env.yml")]
    files += [ROOT / "CITATION.cff", *(ROOT / "tools").glob("*.py"), *(ROOT / ".github").rglob("*.yml")]
    files += [path for path in (ROOT / "torch_ucx_rpc").rglob("*") if path.suffix in {".py", ".pyi", ".h", ".cpp"}]
    # The build writes the version there, from setup.cfg.
    files.remove(ROOT / "torch_ucx_rpc" / "_build_info.py")
    quoted = re.compile(rf"""["'=\s]{re.escape(version)}["'\s)]""")
    assert [str(file) for file in files if quoted.search(file.read_text(encoding="utf-8"))] == []


def test_conda_environment_covers_the_requirements(build_environment, conda_environment):
    conda = {name_of(line) for line in conda_environment["dependencies"] if isinstance(line, str)}
    groups = ["build", "install", *build_environment.setup_cfg()["options.extras_require"]]
    required = {name_of(line) for group in groups for line in build_environment.requirements(group)}
    assert {CONDA_NAMES.get(name, name) for name in required} - conda == set()


def bounds_of(line: str) -> set[str]:
    """The bounds in a line such as "pytorch >=2.11,<3", and in "ruff=0.17.5", which is conda's "==" for any build."""
    return {bound.replace("==", "=") for bound in re.findall(r"[<>=!~]+[\w.*]+", line.replace(" ", ""))}


def test_the_conda_files_have_the_bounds_of_setup_cfg(build_environment, setup_cfg, conda_environment, conda_recipe):
    groups = ["build", "install", *setup_cfg["options.extras_require"]]
    lines = [line.partition(";")[0] for group in groups for line in build_environment.requirements(group)]
    lines.append(f"python{setup_cfg['options']['python_requires']}")
    lines.append(f"ucx>={build_environment.dotted(build_environment.OLDEST_UCX)}")
    wanted = {CONDA_NAMES.get(name_of(line), name_of(line)): bounds_of(line) for line in lines if bounds_of(line)}
    # The last part of PyPI's version of clang-tidy is not LLVM's.
    wanted["clang-tools"] = {"=19.1"}
    assert {"torch>=2.11", "clang-tidy==19.1.0.1"} <= set(lines)

    environment = {name_of(line): bounds_of(line) for line in conda_environment["dependencies"]}
    assert {name: bounds for name, bounds in wanted.items() if not bounds <= environment[name]} == {}
    pythons = re.findall(r":: Python :: 3\.(\d+)", setup_cfg["metadata"]["classifiers"])
    assert f"<3.{max(map(int, pythons)) + 1}" in environment["python"]

    requirements = conda_recipe["requirements"]
    plain = [line for line in requirements["build"] + requirements["host"] if not line.startswith("${{")]
    recipe = {name_of(line): bounds_of(line) for line in plain}
    # The variants that conda builds for have the version of Python, and the recipe says which to skip.
    oldest = setup_cfg["options"]["python_requires"].removeprefix(">=")
    assert f'match(python, "<{oldest}")' in conda_recipe["build"]["skip"]
    assert recipe.pop("python") == set()
    assert {"pytorch", "ucx", "setuptools", "cmake"} <= set(recipe)
    assert {name: bounds for name, bounds in recipe.items() if name in wanted and bounds != wanted[name]} == {}


@pytest.fixture(scope="module")
def conda_recipe() -> dict:
    return yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text(encoding="utf-8"))


def test_conda_recipe_agrees_with_setup_cfg(conda_recipe, setup_cfg):
    metadata = setup_cfg["metadata"]
    assert conda_recipe["context"]["version"] == metadata["version"]
    assert conda_recipe["package"] == {"name": metadata["name"], "version": "${{ version }}"}
    about = conda_recipe["about"]
    assert (about["summary"], about["license"]) == (metadata["description"], metadata["license_expression"])
    assert about["license_file"] == metadata["license_files"]
    assert (ROOT / "recipe" / conda_recipe["source"]["path"]).samefile(ROOT)


@pytest.mark.parametrize(
    ("version", "suits"), [("2.10.1", False), ("2.11.0", True), ("2.13.0+cpu", True), ("2.14.0a0+git1234", True)]
)
def test_a_torch_that_is_too_old_is_refused(build_environment, monkeypatch, version, suits):
    monkeypatch.setattr(build_environment, "oldest_torch", lambda: (2, 11))
    if suits:
        build_environment.check_torch_version(version)
    else:
        with pytest.raises(build_environment.Missing, match=f"torch {re.escape(version)} is too old"):
            build_environment.check_torch_version(version)


def test_without_ucx_the_build_names_the_package(build_environment, monkeypatch):
    for place in ("ucx_of_wheel", "ucx_of_conda", "ucx_of_system"):
        monkeypatch.setattr(build_environment, place, lambda: None)
    with pytest.raises(build_environment.Missing, match="no UCX to build against: pip install libucx-cu12"):
        build_environment.ucx_facts("")
    with pytest.raises(build_environment.Missing, match="set it to wheel or system"):
        build_environment.ucx_facts("verbs")
