"""The programs of docs/cookbook.md, and the first programs of other pages, print what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.workers import reserved_port

from .test_recipes import follow, install

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")


def sections(page: str) -> dict[str, str]:
    """Return the sections of a page by heading."""
    return {section.partition("\n")[0]: section for section in page.split("\n## ")[1:]}


RECIPES = sections(PAGE)


def block(recipe: str, language: str) -> str:
    [found] = re.findall(rf"^```{language}\n(.*?)^```$", recipe, re.MULTILINE | re.DOTALL)
    return found


@pytest.mark.field
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_prints_the_output_on_the_page(tmp_path: Path, name: str) -> None:
    assert_prints_what_it_says(RECIPES[name], tmp_path)


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        ("README.md", "Ten lines"),
        ("docs/quickstart.md", "A first program"),
        ("docs/services.md", "A first program"),
    ],
    ids=["readme", "quick", "services"],
)
def test_the_first_program_of_a_page_prints_its_output(tmp_path: Path, page: str, heading: str) -> None:
    assert_prints_what_it_says(sections((ROOT / page).read_text(encoding="utf-8"))[heading], tmp_path)


def assert_prints_what_it_says(recipe: str, tmp_path: Path) -> None:
    command, program, output = (block(recipe, language) for language in ("sh", "python", "text"))
    [file] = set(re.findall(r"\w+\.py", command))
    (tmp_path / file).write_text(program, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    install(tmp_path, "python", sys.executable)
    with reserved_port() as port:
        done = follow(f"{re.sub('(?<=MASTER_PORT=)[0-9]+', str(port), command)}wait", tmp_path)
    # Lines of different workers may come in any order.
    assert sorted(done.stdout.splitlines()) == sorted(output.splitlines()), done.stderr
