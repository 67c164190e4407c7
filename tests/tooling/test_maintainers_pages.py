"""Statements of the maintainers' pages that the sources can contradict."""

from __future__ import annotations

import configparser
import itertools
import re
from pathlib import Path

import yaml

from .test_layers import MAY_INCLUDE

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "torch_ucx_rpc" / "csrc"
PAGES = ROOT / "docs" / "development"


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_the_thread_model_lists_the_timers_tasks() -> None:
    tasks = {name for file in CSRC.rglob("*.cpp") for name in re.findall(r'timer_?\.add\("([^"]+)"', read(file))}
    listed = re.search(r"- \*\*The timer\*\*.*?user code\.", read(PAGES / "thread_model.md"), re.DOTALL)
    assert listed
    assert set(re.findall(r'"([^"]+)"', " ".join(listed[0].split()))) == tasks


def test_the_drawing_of_the_layers_is_the_rule() -> None:
    drawing = re.search(r"## Layers.*?```\n(.*?)```", read(PAGES / "architecture.md"), re.DOTALL)
    assert drawing
    chains = [chain.split("  <  ") for line in drawing[1].splitlines() for chain in re.split(r" {3,}", line.strip())]
    assert set(MAY_INCLUDE) - {"transport/ucp"} == {
        layer for chain in chains for group in chain for layer in group.split(", ")
    }
    for lower, upper in ((a, b) for chain in chains for a, b in itertools.pairwise(chain)):
        for layer, below in itertools.product(upper.split(", "), lower.split(", ")):
            allowed = MAY_INCLUDE[layer]
            assert {below, f"{below}/{below}.h"} & allowed, f"{layer} may not include {below}"


def test_the_decisions_name_the_functions_that_are_replaced() -> None:
    source = read(CSRC / "transport" / "ucp" / "files_for_ucx.cpp")
    replaced = re.findall(r'\{"(\w+)", reinterpret_cast<void\*>', source)
    page = " ".join(read(PAGES / "decisions.md").split())
    named = re.search(r"replaces \w+ functions in the table of what libucs imports: ([^.]*)", page)
    assert named
    assert set(re.findall(r"`(\w+)`", named[1])) == set(replaced)


def test_the_recipe_of_conda_has_the_version_of_setup_cfg() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    recipe = yaml.safe_load(read(ROOT / "recipe" / "recipe.yaml"))
    assert recipe["context"]["version"] == config["metadata"]["version"]
