"""Metadata stands once, and what the package requires is what its environments install."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]

# Where conda-forge calls a requirement otherwise than PyPI does.
CONDA_NAMES = {
    "torch": "pytorch",
    "libucx-cu12": "ucx",
    "libucx-cu13": "ucx",
    "rmm-cu12": "rmm",
    "rmm-cu13": "rmm",
    "clang-tidy": "clang-tools",
    "build": "python-build",
    # Conda has it with its command line.
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
    # The build writes it there, from setup.cfg.
    files.remove(ROOT / "torch_ucx_rpc" / "_build_info.py")
    quoted = re.compile(rf"""["'=\s]{re.escape(version)}["'\s)]""")
    assert [str(file) for file in files if quoted.search(file.read_text(encoding="utf-8"))] == []


def test_setup_cfg_has_metadata_only(setup_cfg):
    # setuptools adds a section to the one of a source distribution.
    assert {section.split(".")[0] for section in setup_cfg.sections()} - {"egg_info"} == {"metadata", "options"}


def test_pyproject_has_the_build_system_and_tools_only():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    tables = re.findall(r"^\[+([A-Za-z-]+)", text, flags=re.MULTILINE)
    assert set(tables) == {"build-system", "tool"}
    assert "[tool.setuptools" not in text


def test_setup_py_says_only_how_to_build():
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (call,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "setup"
    )
    assert {keyword.arg for keyword in call.keywords} == {"ext_modules", "cmdclass"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="3.10 has no tomllib to compare with")
def test_what_the_build_requires_is_read_as_pip_reads_it(build_environment):
    import tomllib

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert build_environment.requirements("build") == pyproject["build-system"]["requires"]


def test_torch_can_import_setuptools_after_the_requirements_were_read():
    # A process that has imported pip cannot, before Python 3.12: setuptools leaves distutils to pip then.
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import build_environment\n"
        "assert build_environment.requirements('build')\n"
        "import setuptools"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_conda_environment_covers_what_setup_cfg_requires(build_environment, conda_environment):
    conda = {name_of(line) for line in conda_environment["dependencies"] if isinstance(line, str)}
    groups = ["build", "install", *build_environment.setup_cfg()["options.extras_require"]]
    required = {name_of(line) for group in groups for line in build_environment.requirements(group)}
    assert {CONDA_NAMES.get(name, name) for name in required} - conda == set()


def test_conda_environment_has_the_channels_its_names_need(conda_environment):
    assert conda_environment["name"] == "torch_ucx_rpc"
    assert conda_environment["channels"][:2] == ["rapidsai", "conda-forge"]
    names = {name_of(line) for line in conda_environment["dependencies"]}
    assert {"pytorch", "ucx", "rmm", "numba", "compilers"} <= names
    # It asks for an older UCX.
    assert "ucxx" not in names


def bounds_of(line: str) -> set[str]:
    """The bounds in a line such as "pytorch >=2.11,<3", and in "ruff=0.17.5", which is conda's "==" for any build."""
    return {bound.replace("==", "=") for bound in re.findall(r"[<>=!~]+[\w.*]+", line.replace(" ", ""))}


def test_the_conda_files_have_the_bounds_of_setup_cfg(build_environment, setup_cfg, conda_environment, conda_recipe):
    groups = ["build", "install", *setup_cfg["options.extras_require"]]
    lines = [line.partition(";")[0] for group in groups for line in build_environment.requirements(group)]
    lines.append(f"python{setup_cfg['options']['python_requires']}")
    lines.append(f"ucx>={build_environment.dotted(build_environment.OLDEST_UCX)}")
    wanted = {CONDA_NAMES.get(name_of(line), name_of(line)): bounds_of(line) for line in lines if bounds_of(line)}
    # The numbers of PyPI's clang-tidy are not LLVM's to the end.
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


def test_bounds_are_found_in_both_forms():
    assert bounds_of("pytorch >=2.11,<3") == {">=2.11", "<3"}
    assert bounds_of("ruff==0.17.5") == bounds_of("ruff=0.17.5") == {"=0.17.5"}
    assert bounds_of('${{ compiler("cxx") }}') == bounds_of("ninja") == set()


def imported_by_the_package() -> set[str]:
    """The names of other packages that modules of this one import, by a statement or by import_module."""
    names = set()
    for file in (ROOT / "torch_ucx_rpc").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
                # Other than a text it is the name of a module of this package.
                names |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    roots = {name.partition(".")[0] for name in names}
    return roots - sys.stdlib_module_names - {"torch_ucx_rpc", "_torch_ucx_rpc_autoload", "_torch_ucx_rpc_cli"}


def test_conda_environment_has_all_that_the_package_imports(conda_environment):
    imported = imported_by_the_package()
    assert {"torch", "mpi4py", "libucx"} <= imported
    names = {**CONDA_NAMES, "libucx": "ucx"}
    conda = {name_of(line) for line in conda_environment["dependencies"] if isinstance(line, str)}
    assert {names.get(name, name) for name in imported} - conda == set()


@pytest.fixture(scope="module")
def conda_recipe() -> dict:
    return yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text(encoding="utf-8"))


def test_conda_recipe_says_of_the_package_what_setup_cfg_says(conda_recipe, setup_cfg):
    metadata = setup_cfg["metadata"]
    assert conda_recipe["context"]["version"] == metadata["version"]
    assert conda_recipe["package"] == {"name": metadata["name"], "version": "${{ version }}"}
    about = conda_recipe["about"]
    assert (about["summary"], about["license"]) == (metadata["description"], metadata["license_expression"])
    assert about["license_file"] == metadata["license_files"]
    assert (ROOT / "recipe" / conda_recipe["source"]["path"]).samefile(ROOT)


def test_conda_recipe_requires_what_the_package_requires(conda_recipe, build_environment):
    def conda(group: str) -> set[str]:
        """Requirements of setup.cfg or pyproject.toml, with their versions, under conda's names."""
        lines = [line.replace(" ", "") for line in build_environment.requirements(group)]
        return {line.replace(name_of(line), CONDA_NAMES.get(name_of(line), name_of(line)), 1) for line in lines}

    requirements = conda_recipe["requirements"]
    without_spaces = {section: {line.replace(" ", "") for line in lines} for section, lines in requirements.items()}
    assert conda("build") | conda("install") <= without_spaces["build"] | without_spaces["host"]
    pinned = {re.sub(r".*pin_compatible\(\"(\w+)\".*", r"\1", line) for line in requirements["run"]}
    assert pinned == {name_of(line) for line in conda("install")} | {"python", "ucx"}
    # UCX of the wheels would have no InfiniBand.
    assert conda_recipe["build"]["script"]["env"] == {"TORCH_UCX_RPC_UCX": "system"}


def test_license_is_bsd_3_clause(setup_cfg):
    text = " ".join((ROOT / "LICENSE").read_text(encoding="utf-8").split())
    assert setup_cfg["metadata"]["license_expression"] == "BSD-3-Clause"
    assert setup_cfg["metadata"]["license_files"] == "LICENSE"
    assert re.match(r"BSD 3-Clause License Copyright \(c\) \d{4}, torch_ucx_rpc contributors", text)
    for clause in (
        "1. Redistributions of source code must retain the above copyright notice",
        "2. Redistributions in binary form must reproduce the above copyright notice",
        "3. Neither the name of the copyright holder nor the names of its contributors may be used to endorse",
    ):
        assert clause in text


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


def test_a_compiler_that_is_not_one_is_named(build_environment, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(build_environment.Missing, match=r"false cannot compile a C\+\+20 program .* install GCC 12"):
        build_environment.check_compiler()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build_environment.Missing, match="there is no compiler 'no-such-compiler'"):
        build_environment.check_compiler()


def test_a_prefix_with_the_headers_of_ucx_and_no_library_is_not_condas(build_environment, monkeypatch, tmp_path):
    header = tmp_path / "include" / "ucp" / "api" / "ucp.h"
    header.parent.mkdir(parents=True)
    header.touch()
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    assert build_environment.ucx_of_conda() is None
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libucp.so").touch()
    assert build_environment.ucx_of_conda() == (tmp_path / "include", tmp_path / "lib")


def test_without_ucx_the_build_says_what_to_install(build_environment, monkeypatch):
    for place in ("ucx_of_wheel", "ucx_of_conda", "ucx_of_system"):
        monkeypatch.setattr(build_environment, place, lambda: None)
    with pytest.raises(build_environment.Missing, match="no UCX to build against: pip install libucx-cu12"):
        build_environment.ucx_facts("")
    with pytest.raises(build_environment.Missing, match="set it to wheel or system"):
        build_environment.ucx_facts("verbs")
