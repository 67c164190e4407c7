"""The site of the documentation: its navigation has every page, and its links match the repository's."""

from __future__ import annotations

import pkgutil
import re
import subprocess

import pytest
import yaml

from tests.support.labs import needs

from ._tools import ROOT, tool


class Loader(yaml.SafeLoader):
    """Reads the tags of mkdocs.yml as the values behind them."""


for tag in ("tag:yaml.org,2002:python/", "!ENV"):
    Loader.add_multi_constructor(tag, lambda loader, suffix, node: node.value)


site = tool("site")


@pytest.fixture(scope="module")
def in_nav() -> list[str]:
    return list(site.pages_of(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]))


def test_the_navigation_has_every_page_once_and_no_other(in_nav: list[str]) -> None:
    assert len(in_nav) == len(set(in_nav))
    written = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    files = {name for name in in_nav if name.startswith("repository/") and (ROOT / site.origin(name)).is_file()}
    assert set(in_nav) == written | files | set(site.api_pages())


def test_the_reference_has_every_public_module() -> None:
    modules = {module.name for module in pkgutil.iter_modules([str(ROOT / "torch_ucx_rpc")])}
    assert {name for name in site.MODULES if "." not in name} == {name for name in modules if name[0] != "_"}


@pytest.mark.parametrize(
    ("page", "link", "in_site"),
    [
        ("docs/services.md", "security.md#keys", "security.md#keys"),
        ("docs/services.md", "../examples/services.py", "repository/examples/services.py.md"),
        ("docs/development/gpu.md", "../../CONTRIBUTING.md#the-soak", "../repository/CONTRIBUTING.md#the-soak"),
        ("docs/conformance.md", "../tests/conformance/results", "repository/tests/conformance/results.md"),
        ("docs/services.md", "figures/workers.svg", "figures/workers.svg"),
        ("docs/services.md", "https://openucx.org", "https://openucx.org"),
        # MkDocs warns of a missing page.
        ("docs/services.md", "nowhere.md", "nowhere.md"),
    ],
)
def test_a_link_leads_to_the_same_file_in_the_site(page: str, link: str, in_site: str) -> None:
    text = "A [link]({}), `[code]({})`.\n\n```\n[code]({})\n```\n"
    assert site.rewritten(page, text.format(link, link, link)) == text.format(in_site, link, link)


def test_files_that_are_linked_become_pages() -> None:
    assert {"examples/services.py", "docs/security.md"} & site.outside("docs/services.md") == {"examples/services.py"}
    # CONTRIBUTING.md links to it.
    assert "torch_ucx_rpc/csrc/README.md" in site.outside("docs/development/maintaining.md")
    for path in ("examples/services.py", "CONTRIBUTING.md", "tests/conformance/results"):
        assert site.origin(site.location(path)) == path
    assert site.content("examples/services.py").startswith("# examples/services.py\n\n``````python\n")
    assert "- `ucx-2-cores.json`" in site.content("tests/conformance/results")


# ---- The whole site --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The pages of the site, by place."""
    needs("mkdocs")
    site = tmp_path_factory.mktemp("site")
    command = ["mkdocs", "build", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return {page.relative_to(site).as_posix(): page.read_text(encoding="utf-8") for page in site.rglob("*.html")}


@pytest.mark.field
def test_the_site_needs_nothing_from_elsewhere(built: dict[str, str]) -> None:
    assert {"index.html", "cookbook.html", "api/torch_ucx_rpc.html", "repository/CONTRIBUTING.html"} <= built.keys()
    for page in built.values():
        assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>", page)


@pytest.mark.field
def test_docstrings_become_markdown(built: dict[str, str]) -> None:
    page = built["api/torch_ucx_rpc.services.html"]
    assert "::</p>" not in page
    assert 'href="#torch_ucx_rpc.services.NameTaken"' in page
    assert 'href="../services.html"' in page
    # The reference leaves out the parts of docstrings that are for maintainers.
    assert "How the package is laid out" not in page
