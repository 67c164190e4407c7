"""The recipes of docs/cookbook.md, run as they are written there: a program, its command, and what it prints."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from workers import reserved_port

from .test_recipes import follow, install

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cookbook.md").read_text(encoding="utf-8")

# By heading; each ends where the next begins.
RECIPES = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")[1:]}


def block(recipe: str, language: str) -> str:
    [found] = re.findall(rf"^```{language}\n(.*?)^```$", recipe, re.MULTILINE | re.DOTALL)
    return found


@pytest.mark.field
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_prints_what_the_page_says(tmp_path: Path, name: str) -> None:
    command, program, output = (block(RECIPES[name], language) for language in ("sh", "python", "text"))
    [file] = set(re.findall(r"\w+\.py", command))
    (tmp_path / file).write_text(program, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    install(tmp_path, "python", sys.executable)
    with reserved_port() as port:
        done = follow(f"{command.replace('29513', str(port))}wait", tmp_path)
    # Lines of different workers come in any order.
    assert sorted(done.stdout.splitlines()) == sorted(output.splitlines()), done.stderr


def test_the_list_at_the_top_has_every_recipe() -> None:
    assert re.findall(r"^- \[(.*)\]\(#", PAGE, re.MULTILINE) == list(RECIPES)
