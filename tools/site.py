"""Hooks of MkDocs (mkdocs.yml) that make the site. The same Markdown can be read on GitHub.

* Files outside docs/ that a page links to become pages in the site's folder ``repository``: Markdown unchanged, sources
  as code, folders as lists. So a link leads to the same file on the site and on GitHub.
* The API reference has a page for each public module, which mkdocstrings fills from the docstrings.
* A public name without a docstring is a warning, which ends a strict build. ``python tools/site.py`` lists them.
"""

from __future__ import annotations

import configparser
import contextlib
import logging
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# The tests of this file do not need MkDocs.
if TYPE_CHECKING:
    import griffe
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs"
# The site's folders for the pages that this file makes.
REPOSITORY = "repository"
API = "api"

PACKAGE = "torch_ucx_rpc"
MODULES = (
    "errors",
    "testing",
    "channel",
    "services",
    "reduction",
    "pipeline",
    "checkpoint",
    "checkpoint.remote_modules",
)

# Links in code do not count, fenced or not.
PART = re.compile(
    r"^```.*?^```[ ]*$|`[^`\n]*`|(?P<text>\[(?:[^\]\[]|\[[^\]]*\])*\]\()(?P<target>[^()\s]+)\)",
    re.MULTILINE | re.DOTALL,
)
LANGUAGES = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".json": "json", ".yml": "yaml", ".yaml": "yaml"}

log = logging.getLogger("mkdocs.hooks.site")


def location(path: str) -> str:
    """Return the place in the site of a file of the repository; both are POSIX paths."""
    if path.startswith(f"{DOCS}/"):
        return path[len(DOCS) + 1 :]
    return f"{REPOSITORY}/{path}" if path.endswith(".md") else f"{REPOSITORY}/{path}.md"


def origin(name: str) -> str:
    """Return the file of the repository at this place of the site: the inverse of `location`."""
    if not name.startswith(f"{REPOSITORY}/"):
        return f"{DOCS}/{name}"
    path = name[len(REPOSITORY) + 1 :]
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def linked_file(path: str, target: str | None) -> tuple[str, str] | None:
    """Return the file that the page `path` links to by `target`, and the heading in it. Return None for URLs and
    missing files."""
    if not target or re.match(r"\w+:|#", target):
        return None
    file, mark, heading = target.partition("#")
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
    return (found, mark + heading) if not found.startswith("..") and (ROOT / found).exists() else None


def outside(path: str) -> set[str]:
    """Return the files outside docs/ that this page links to, directly or through such files."""
    found: set[str] = set()
    pages = [path]
    while pages:
        page = pages.pop()
        for part in PART.finditer((ROOT / page).read_text(encoding="utf-8")):
            link = linked_file(page, part["target"])
            if link and not link[0].startswith(f"{DOCS}/") and link[0] not in found:
                found.add(link[0])
                if link[0].endswith(".md"):
                    pages.append(link[0])
    return found


def rewritten(path: str, markdown: str) -> str:
    """The Markdown of the page `path`, with links that lead to the same files in the site."""
    here = posixpath.dirname(location(path)) or "."

    def in_site(part: re.Match[str]) -> str:
        link = linked_file(path, part["target"])
        return f"{part['text']}{posixpath.relpath(location(link[0]), here)}{link[1]})" if link else part[0]

    return PART.sub(in_site, markdown)


def content(path: str) -> str:
    """The page that a file outside docs/ becomes."""
    file = ROOT / path
    if file.is_dir():
        return "\n".join([f"# {path}", "", *(f"- `{entry.name}`" for entry in sorted(file.iterdir()))])
    text = file.read_text(encoding="utf-8")
    return text if path.endswith(".md") else f"# {path}\n\n``````{LANGUAGES.get(file.suffix, 'text')}\n{text}``````\n"


def api_pages() -> dict[str, str]:
    modules = (PACKAGE, *(f"{PACKAGE}.{name}" for name in MODULES))
    return {f"{API}/{module}.md": f"# `{module}`\n\n::: {module}\n" for module in modules}


def pages_of(nav: object) -> Iterator[str]:
    """The pages that a navigation names, at any depth."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, (dict, list)):
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(entry)


# ---- Names without docstrings ----------------------------------------------------------------------------------------


def undocumented() -> Iterator[str]:
    """The public names, dotted, that no docstring describes."""
    import griffe

    package = griffe.load(PACKAGE, search_paths=[str(ROOT)])
    for module in (package, *(package[name] for name in MODULES)):
        for name in module.exports or ():
            named = module[str(name)]
            # Names of other packages do not count.
            with contextlib.suppress(griffe.AliasResolutionError):
                yield from undocumented_of(named.final_target if named.is_alias else named, f"{module.path}.{name}")


def complaints() -> Iterator[str]:
    return (f"{name} is public and has no docstring" for name in undocumented())


def undocumented_of(named: griffe.Object, path: str) -> Iterator[str]:
    """Return the undocumented names of an object. A class adds its methods and properties; its docstring describes its
    other attributes."""
    if (named.is_class or named.is_function) and named.docstring is None:
        yield path
    if named.is_class:
        for name, member in named.members.items():
            is_code = member.is_function or "property" in member.labels
            if is_code and member.is_public and not name.startswith("__") and not is_described(named, name):
                yield f"{path}.{name}"


def is_described(owner: griffe.Class, name: str) -> bool:
    """Tell whether a name is documented: by its docstring, an overridden method's, or its class's attributes and
    arguments."""
    if any(name in kind.members and kind.members[name].docstring for kind in (owner, *owner.mro())):
        return True
    return owner.docstring is not None and bool(
        re.search(rf"^ +{name}(?: \(.*?\))?:", owner.docstring.value, re.MULTILINE)
    )


# ---- Called by MkDocs ------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the site's description from setup.cfg."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    config.site_description = setup["metadata"]["description"]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File, InclusionLevel

    in_nav = set(pages_of(config.nav))
    outsiders = {origin(name) for name in in_nav if name.startswith(f"{REPOSITORY}/")}
    pages = [f"{DOCS}/{file.src_uri}" for file in files.documentation_pages()]
    outsiders.update(*map(outside, [*pages, *outsiders]))
    for name, text in {**{location(path): content(path) for path in outsiders}, **api_pages()}.items():
        inclusion = InclusionLevel.INCLUDED if name in in_nav else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, name, content=text, inclusion=inclusion))
    for complaint in complaints():
        log.warning(complaint)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    name = page.file.src_uri
    return markdown if name.startswith(f"{API}/") else rewritten(origin(name), markdown)


if __name__ == "__main__":
    sys.exit("\n".join(complaints()) or 0)
