"""The package offers the names of its docstring and ``__all__``, and no more."""

from __future__ import annotations

import importlib.metadata
import pkgutil
import re
import types

import torch_ucx_rpc
from torch_ucx_rpc import _build_info

# The package imports errors itself. Users import the other modules by name.
PUBLIC_MODULES = ("channel", "checkpoint", "errors", "pipeline", "reduction", "services", "testing")


def test_the_exported_names_are_the_public_names() -> None:
    public = {
        name
        for name in dir(torch_ucx_rpc)
        if not name.startswith("_") and not isinstance(getattr(torch_ucx_rpc, name), types.ModuleType)
    }
    assert public | {"__version__", "errors"} == set(torch_ucx_rpc.__all__)
    assert list(torch_ucx_rpc.__all__) == sorted(torch_ucx_rpc.__all__)


def test_other_modules_are_private_and_mapped_by_the_docstring() -> None:
    # The build writes the module _build_info, for `_native` only.
    modules = {module.name for module in pkgutil.iter_modules(torch_ucx_rpc.__path__)} - {"_build_info"}
    assert {name for name in modules if not name.startswith("_")} == set(PUBLIC_MODULES)
    mapped = set(re.findall(r"^\* `+(\w+)`+", torch_ucx_rpc.__doc__, re.MULTILINE))
    assert mapped == modules | set(torch_ucx_rpc.__all__)


def test_the_version_is_the_installed_packages() -> None:
    assert torch_ucx_rpc.__version__ == importlib.metadata.version("torch_ucx_rpc")


def test_wheel_and_source_build_of_one_version_work_together() -> None:
    # Workers compare this version. A wheel's version also names its torch (0.2.0+torch2.13), and some workers may run
    # from source.
    assert torch_ucx_rpc.__version__.partition("+")[0] == _build_info.VERSION
