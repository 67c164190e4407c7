"""Imports of the Python package go one way, and in no circle; ``test_layers`` says the same of the C++ sources.

All import statements count, also inside functions and under ``TYPE_CHECKING``. A package counts only if it is imported
itself, not when Python runs its ``__init__`` before one of its modules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "torch_ucx_rpc"
AUTOLOAD = "_torch_ucx_rpc_autoload"
COMMAND_LINE = "_torch_ucx_rpc_cli"

# From the ground up: the modules and folders of the package. A module may import its own folder, and what stands above
# its own line. "" is the package itself, that is, its __init__.py.
ORDER = (
    "errors",
    "_arguments",
    "_version",
    "_build_info",
    "_C",
    "_native",
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
    AUTOLOAD,
    COMMAND_LINE,
    "_cli",
    "__main__",
)
# Modules beside the package, which are imported where the package is not.
BESIDE = (AUTOLOAD, COMMAND_LINE)
# Compiled, not written in Python.
BUILT = {f"{PACKAGE}._build_info", f"{PACKAGE}._C"}


def sources() -> dict[str, str]:
    """The text of every module, by its full name."""
    files = {name: ROOT / f"{name}.py" for name in BESIDE}
    for file in (ROOT / PACKAGE).rglob("*.py"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        files[name.removesuffix(".__init__")] = file
    return {name: file.read_text(encoding="utf-8") for name, file in files.items() if name not in BUILT}


def imports(module: str, text: str, modules: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Line, and name, of each of ``modules`` that the text of ``module`` imports."""
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
        for name in names:
            if name.split(".")[0] in (PACKAGE, *BESIDE):
                assert name in known, f"{module}:{node.lineno} imports {name}, which does not exist"
                yield node.lineno, name


def folder_of(module: str) -> str:
    if module in BESIDE:
        return module
    return module.removeprefix(PACKAGE).removeprefix(".").partition(".")[0]


def upward(texts: dict[str, str]) -> list[str]:
    """Return a sentence for each import of a folder that stands later in `ORDER`."""
    return [
        f"{module}:{line} imports {imported}, and {folder_of(imported)!r} stands above {folder_of(module)!r}"
        for module, text in texts.items()
        for line, imported in imports(module, text, texts)
        if ORDER.index(folder_of(imported)) > ORDER.index(folder_of(module))
    ]


def circle(texts: dict[str, str]) -> list[str]:
    """Return the modules of a circle of imports, from one module back to itself; empty without a circle."""
    graph = {module: {name for _, name in imports(module, text, texts)} for module, text in texts.items()}
    finished: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        for name in sorted(graph.get(module, ())):
            if found := visit(name, [*path, module]):
                return found
        finished.add(module)
        return []

    return next(filter(None, (visit(module, []) for module in sorted(graph))), [])


def test_every_module_has_its_place_in_the_order() -> None:
    assert {folder_of(module) for module in [*sources(), *BUILT]} == set(ORDER)


def test_no_import_goes_upwards() -> None:
    assert upward(sources()) == []


def test_no_imports_go_in_a_circle() -> None:
    assert circle(sources()) == []


def test_every_folder_maps_its_modules() -> None:
    texts = sources()
    folders = {module for module in texts if any(other.startswith(f"{module}.") for other in texts)} - {PACKAGE}
    assert f"{PACKAGE}._torch" in folders
    for folder in folders:
        modules = {name.removeprefix(f"{folder}.") for name in texts if name.startswith(f"{folder}.")}
        lines = (ast.get_docstring(ast.parse(texts[folder])) or "").splitlines()
        assert {line.split("``")[1] for line in lines if line.startswith("* ``")} == modules, folder


def test_import_upwards_is_found_wherever_it_stands() -> None:
    statements = (
        "from torch_ucx_rpc import _agent",
        "import torch_ucx_rpc._agent as agent",
        "import torch_ucx_rpc",
        "def late():\n    from torch_ucx_rpc import _agent",
        "if TYPE_CHECKING:\n    from torch_ucx_rpc._agent import UcxRpcAgent",
        "import importlib\nimportlib.import_module('torch_ucx_rpc._agent')",
    )
    texts = sources()
    module = f"{PACKAGE}._bootstrap.record"
    texts[module] += "\n" + "\n".join(statements) + "\n"
    assert len(upward(texts)) == len(statements)
    assert module in circle(texts)
