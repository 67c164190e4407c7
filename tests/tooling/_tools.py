"""The programs of the folder ``tools`` as modules, and the metadata of the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str) -> ModuleType:
    """Import tools/NAME.py, which imports other tools from its own folder."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(ROOT / "tools"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


build_environment = tool("build_environment")
SETUP_CFG = build_environment.setup_cfg()
