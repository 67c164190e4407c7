"""Includes of csrc go one way, from layer to layer (csrc/README.md), and so do imports of the Python package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "torch_ucx_rpc" / "csrc"

# ---- C++ -------------------------------------------------------------------------------------------------------------

# The headers of ours that the files of a layer may include: whole folders, or single files. The deepest folder that has
# rules counts.
BELOW_TRANSPORT = {"base", "wire", "memory"}
BELOW_RUNTIME = BELOW_TRANSPORT | {"transport/transport.h"}
MAY_INCLUDE = {
    "base": {"base"},
    "wire": {"wire", "base"},
    "memory": {"memory", "base"},
    "transport": BELOW_RUNTIME,
    "transport/ucp": {"transport/ucp"} | BELOW_RUNTIME,
    "runtime": {"runtime"} | BELOW_RUNTIME,
    "peers": {"peers", "runtime"} | BELOW_RUNTIME,
    "messaging": {"messaging", "peers", "runtime"} | BELOW_RUNTIME,
    "torch_glue": {"torch_glue", "base"},
    "tensors": {"tensors", "torch_glue", "messaging", "peers", "runtime"} | BELOW_RUNTIME,
    "rpc": {"rpc", "tensors", "torch_glue", "messaging", "peers", "runtime"} | BELOW_RUNTIME,
    "native_op": {"native_op"},
    # These files also create the agent's transport.
    "bindings": {"bindings", "native_op", "rpc", "tensors", "torch_glue", "messaging", "peers", "runtime", "transport"}
    | BELOW_TRANSPORT,
}

# First part of an include path -> the folders that may include it. c10 is for all.
ABOVE_MESSAGING = {"tensors", "torch_glue", "rpc", "native_op", "bindings"}
RESERVED = {
    "torch": ABOVE_MESSAGING,
    "ATen": ABOVE_MESSAGING,
    "ucp": {"transport/ucp"},
    "ucs": {"transport/ucp"},
    "uct": {"transport/ucp"},
    "pybind11": {"bindings"},
    "Python.h": {"bindings"},
}

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"(?P<ours>[^"]+)"|<(?P<theirs>[^>]+)>)')
# Folders without their own C++ tests: the Python tests cover them.
TESTED_FROM_PYTHON = {"bindings", "native_op"}


def layer_of(file: str) -> str:
    """The deepest folder with rules; empty for a file that no rule guards."""
    return next((str(folder) for folder in PurePosixPath(file).parents if str(folder) in MAY_INCLUDE), "")


def forbidden(file: str, text: str, headers: set[str]) -> Iterator[str]:
    """Return each include in ``text`` of ``file``, a path relative to csrc, that a layer's rules forbid."""
    layer = layer_of(file)
    for number, line in enumerate(text.splitlines(), start=1):
        if not (found := INCLUDE.match(line)):
            continue
        if ours := found["ours"]:
            above = {ours, *map(str, PurePosixPath(ours).parents)}
            is_allowed = ours in headers and above & MAY_INCLUDE[layer]
        else:
            theirs = found["theirs"]
            is_allowed = theirs not in headers and layer in RESERVED.get(theirs.split("/")[0], {layer})
        if not is_allowed:
            yield f"{file}:{number} may not say {line.strip()}"


@pytest.fixture(scope="module")
def csrc() -> dict[str, str]:
    """The text of each source, by its path relative to csrc."""
    files = [path for path in CSRC.rglob("*") if path.suffix in {".h", ".cpp"}]
    return {str(path.relative_to(CSRC)): path.read_text(encoding="utf-8") for path in files}


def test_includes_go_one_way(csrc: dict[str, str]) -> None:
    assert [broken for file, text in csrc.items() for broken in forbidden(file, text, csrc.keys())] == []


@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("base/a.h", '"wire/header.h"'),
        ("messaging/a.h", "<ATen/Tensor.h>"),
        ("transport/ucp/a.cpp", "<Python.h>"),
        ("rpc/a.cpp", '"transport/ucp/ucp_transport.h"'),
        ("rpc/a.cpp", "<ucp/api/ucp.h>"),
        ("rpc/a.cpp", '"agent.h"'),
        ("rpc/a.cpp", "<base/error.h>"),
    ],
)
def test_a_forbidden_include_is_found(csrc: dict[str, str], file: str, include: str) -> None:
    assert [*forbidden(file, f"#pragma once\n#include {include}\n", csrc.keys())] == [
        f"{file}:2 may not say #include {include}"
    ]


def test_layers_and_their_tests_have_the_same_folders(csrc: dict[str, str]) -> None:
    assert {layer_of(file) for file in csrc} == set(MAY_INCLUDE)
    tested = {path.parent.name for path in (ROOT / "tests" / "cpp").rglob("*_test.cpp")}
    assert {file.split("/")[0] for file in csrc} == tested | TESTED_FROM_PYTHON


# ---- Python ----------------------------------------------------------------------------------------------------------

PACKAGE = "torch_ucx_rpc"
# Modules that a process may import without the package.
BESIDE = ("_torch_ucx_rpc_autoload", "_torch_ucx_rpc_cli")
# Written by the build.
BUILT = {f"{PACKAGE}._build_info", f"{PACKAGE}._C"}

# The modules and folders of the package, lowest first. A module may import its own folder and whatever is listed before
# it. "" is the package's __init__.py.
ORDER = (
    "errors",
    "_arguments",
    "_version",
    "_build_info",
    "_C",
    "_native",
    "_threads",
    "_devices",
    "_options",
    "_bootstrap",
    "_agent",
    "_workers",
    "_observe",
    "_start",
    "_launch",
    "_native_op",
    "_torch",
    "testing",
    "channel",
    "services",
    "reduction",
    "checkpoint",
    "pipeline",
    "",
    *BESIDE,
    "_cli",
    "__main__",
)


def imports(module: str, text: str, modules: Iterable[str]) -> Iterator[str]:
    """The modules of ours that ``module`` imports: by any statement, also in a function or under TYPE_CHECKING."""
    known = {*modules, *BUILT}
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} is relative; imports of this package are absolute"
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [submodule if submodule in known else str(node.module) for submodule in submodules]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        yield from (name for name in names if name.split(".")[0] in (PACKAGE, *BESIDE))


def folder_of(module: str) -> str:
    return module if module in BESIDE else module.removeprefix(PACKAGE).removeprefix(".").partition(".")[0]


def upward(texts: dict[str, str]) -> list[str]:
    """Return each import of a folder that stands later in `ORDER`."""
    return [
        f"{module} imports {imported}"
        for module, text in texts.items()
        for imported in imports(module, text, texts)
        if ORDER.index(folder_of(imported)) > ORDER.index(folder_of(module))
    ]


@pytest.fixture
def modules() -> dict[str, str]:
    """The text of each Python module, by its full name."""
    files = {name: ROOT / f"{name}.py" for name in BESIDE}
    for file in (ROOT / PACKAGE).rglob("*.py"):
        files[".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = file
    return {name: file.read_text(encoding="utf-8") for name, file in files.items() if name not in BUILT}


def test_imports_go_one_way(modules: dict[str, str]) -> None:
    assert {folder_of(module) for module in [*modules, *BUILT]} == set(ORDER)
    assert upward(modules) == []


def test_import_upwards_is_found_wherever_it_stands(modules: dict[str, str]) -> None:
    statements = (
        "from torch_ucx_rpc import _agent",
        "import torch_ucx_rpc",
        "def late():\n    from torch_ucx_rpc import _agent",
        "import importlib\nimportlib.import_module('torch_ucx_rpc._agent')",
    )
    modules[f"{PACKAGE}._bootstrap.record"] += "\n" + "\n".join(statements) + "\n"
    assert len(upward(modules)) == len(statements)


def test_every_folder_maps_its_modules(modules: dict[str, str]) -> None:
    for folder, text in modules.items():
        inside = {name.removeprefix(f"{folder}.") for name in modules if name.startswith(f"{folder}.")}
        if inside and folder != PACKAGE:
            lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
            assert {line.split("``")[1] for line in lines if line.startswith("* ``")} == inside, folder
