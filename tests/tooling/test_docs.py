"""Checks of pages: links lead somewhere, pages stay short, indexes list them, and statements agree with the sources."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ._tools import ROOT
from .test_layers import CSRC, MAY_INCLUDE
from .test_sources import is_too_wide, read

DEVELOPMENT = ROOT / "docs" / "development"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(
            page
            for folder in ("docs", "examples", "torch_ucx_rpc", "tests", "benchmarks")
            for page in (ROOT / folder).rglob("*.md")
        ),
    ]
)

LONGEST_CELL = 200
MOST_WORDS = 1500

FENCED = re.compile(r"^```.*?^```[ ]*$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCED.sub("", text)):
        bare = LINK.sub(lambda link: link[0][1 : link[0].index("]")], heading)
        slug = re.sub(r"[^\w\- ]", "", bare.lower()).replace(" ", "-")
        number = 0
        while (unique := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(unique)
    return found


def broken_links(page: Path, text: str) -> Iterator[str]:
    for target in LINK.findall(CODE_SPAN.sub("", FENCED.sub("", text))):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path
        if path and not file.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8") if path else text):
            yield f"{target}: no such heading"


def too_wide(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line):
                if len(cell.strip()) > LONGEST_CELL:
                    yield f"line {number}: a cell of {len(cell.strip())} characters: {cell.strip()[:50]}"
        elif is_too_wide(line):
            yield f"line {number}: {len(line)} columns: {line[:50]}"


def words(text: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in FENCED.sub("", text).split())


def says_why_it_is_long(text: str) -> bool:
    comment = re.match(r"<!--(.*?)-->", text, re.DOTALL)
    return comment is not None and words(comment[1]) >= 5


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_keeps_the_rules(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = [*broken_links(page, text), *too_wide(text)]
    if words(text) > MOST_WORDS and not says_why_it_is_long(text):
        found.append(f"{words(text)} words, and no comment at the top that says why")
    assert not found, "\n" + "\n".join(found)


def test_the_front_page_shows_the_program_that_is_run() -> None:
    front, quickstart = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("README.md", "quickstart.md"))
    [program] = re.findall(r"^```python\n.*?^```", front, re.MULTILINE | re.DOTALL)
    assert program in quickstart, "tests/launchers/test_cookbook.py runs the one of the quickstart"


def test_the_page_on_gpus_names_the_machine_of_the_results() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "h100.json").read_text(encoding="utf-8"))
    facts = results["circumstances"]
    driver = re.search(r", (\d+)\.", facts["gpu"])
    assert driver
    torch, ucx = (".".join(facts[name].split(".")[:2]) for name in ("torch", "ucx"))
    named = f"driver {driver[1]}, CUDA 13.0, torch {torch}, UCX {ucx}"
    assert named in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_the_thread_model_lists_the_owners_of_timer_tasks() -> None:
    owners = {file for file in CSRC.rglob("*.cpp") if re.search(r"\btimer_?\.add\(", read(file))}
    listed = re.search(r"- \*\*The timer\*\*.*?user code\.", read(DEVELOPMENT / "thread_model.md"), re.DOTALL)
    assert listed
    assert set(re.findall(r"`([^`]+)`", listed[0])) - {"runtime/timer"} == {
        file.relative_to(CSRC).with_suffix("").as_posix() for file in owners
    }


def test_the_drawing_of_the_layers_agrees_with_the_rules() -> None:
    drawing = re.search(r"## Layers.*?```\n(.*?)```", read(DEVELOPMENT / "architecture.md"), re.DOTALL)
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
    page = " ".join(read(DEVELOPMENT / "decisions.md").split())
    named = re.search(r"replaces \w+ functions in the table of what libucs imports: ([^.]*)", page)
    assert named
    assert set(re.findall(r"`(\w+)`", named[1])) == set(replaced)


@pytest.mark.parametrize("index", ["docs/README.md", "docs/development/architecture.md"])
def test_the_index_of_a_shelf_lists_its_pages(index: str) -> None:
    page = ROOT / index
    listed = set(LINK.findall(page.read_text(encoding="utf-8")))
    assert {other.name for other in page.parent.glob("*.md")} - {page.name} <= listed


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("[a](nowhere.md)\n", "no such file"),
        ("[a](#b)\n", "no such heading"),
        ("# A\n\n```\n# B\n```\n\n[a](#b)\n", "no such heading"),
        ("x" * 121 + "\n", "121 columns"),
        ("| a | " + "x" * 201 + " |\n", "201 characters"),
    ],
)
def test_a_faulty_page_is_noticed(tmp_path: Path, text: str, finding: str) -> None:
    (found,) = [*broken_links(tmp_path / "page.md", text), *too_wide(text)]
    assert finding in found


# ---- The messages that docs/troubleshooting.md quotes ----------------------------------------------------------------

TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# A quoted message is a code span that contains … or is a whole message. Other code spans are commands, options and
# names.
QUOTES = [
    quote
    for quote in re.findall(r"`([^`\n]+)`", TROUBLES)
    if ("…" in quote or re.match(r"[a-z]\w+( [\w()]+){3}", quote))
    and not re.match(r"(python|pip|make|ulimit|kubectl|docker) ", quote)
]
# Messages that torch or UCX writes, or that the package composes at run time.
FOREIGN = (
    "terminate called without an active exception",
    "RPC ran for more than set timeout ",
    "UCX: Destination is unreachable",
    "starting UCX failed",
    "creating a UCX worker failed",
)


def test_quoted_messages_are_messages_of_the_package() -> None:
    assert len(QUOTES) > 10
    files = [path for path in (ROOT / "torch_ucx_rpc").rglob("*") if path.suffix in {".py", ".cpp", ".h"}]
    # Adjacent literals are joined.
    literals = re.sub(r'"\s*\+?\s*f?"', "", "\n".join(map(read, sorted(files)))) + "\n".join(FOREIGN)
    # A … stands for a part that varies. C++ and messages have the names of workers in quotes.
    fragments = [fragment.strip(" '();:,") for quote in QUOTES for fragment in quote.split("…")]
    assert [one for one in fragments if len(one) > 3 and one not in literals] == []
