"""An extension of griffe (mkdocs.yml). It adapts docstrings, which are written for ``help()``, to the site.

* Blocks after two colons, and examples with ``>>>``, become code blocks.
* A public name of the package in single backticks becomes a link, and so does the name of a page.
* The private modules at the end of a module's docstring are left out: they are for maintainers.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

LAYOUT = re.compile(r"\n(?:How (?:the package|it) is laid out|The modules and folders of the package).*", re.DOTALL)
# An indented block that follows two colons, or that has prompts.
CODE = re.compile(
    r"^(?P<indent>[ ]*)(?P<announced>[^\n]*)::\n\n(?P<code>(?:(?P=indent)[ ]+[^\n]*(?:\n|\Z)|[ ]*\n)+)"
    r"|^(?P<more>[ ]+)(?P<prompt>>>>[^\n]*(?:\n(?P=more)[^\n]+)*)",
    re.MULTILINE,
)
PAGE = re.compile(r"\bdocs/(\w+)\.md\b")
NAME = re.compile(r"(?<![`\[])`(?P<name>[A-Za-z_]+)(?P<rest>[^`\n]*)`(?!`)")


def fenced(block: re.Match[str]) -> str:
    if block["prompt"]:
        lines = block["prompt"].splitlines()
        code = "\n".join([lines[0], *(line.removeprefix(block["more"]) for line in lines[1:])])
        return f"```pycon\n{code}\n```\n"
    code = textwrap.dedent(block["code"]).strip("\n")
    language = "pycon" if code.startswith(">>>") else "python"
    announced = f"{block['announced']}:\n\n" if block["announced"] else ""
    return textwrap.indent(f"{announced}```{language}\n{code}\n```\n\n", block["indent"])


def in_markdown(text: str, links: dict[str, str]) -> str:
    """A docstring as Markdown. `links` has the full name of each public name."""

    def linked(name: re.Match[str]) -> str:
        path = links.get(name["name"])
        return f"[{name[0]}][{path}]" if path and not name["rest"] else name[0]

    parts = re.split(r"(^[ ]*```.*?^[ ]*```$)", CODE.sub(fenced, LAYOUT.sub("", text)), flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if part.lstrip().startswith("```") else PAGE.sub(r"[\1](../\1.md)", NAME.sub(linked, part))
        for part in parts
    )


def public_names(module: griffe.Module) -> dict[str, str]:
    """Return the full names of a module's exports, without other packages' names."""
    own = module.path.partition(".")[0]
    found = {}
    for name in map(str, module.exports or ()):
        member = module.members.get(name)
        is_own = member is not None and (not member.is_alias or member.target_path.startswith(f"{own}."))
        if is_own and not name.startswith("__"):
            found[name] = f"{module.path}.{name}"
    return found


class Docstrings(griffe.Extension):
    """Called once the whole package has been read, and before any docstring is parsed."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        own = public_names(pkg)
        for module in pkg.modules.values():
            if module.is_public:
                self._convert(module, {**own, **public_names(module)})
        self._convert(pkg, own)

    def _convert(self, found: griffe.Object, links: dict[str, str]) -> None:
        if found.docstring and not found.extra["site"].get("converted"):
            found.docstring.value = in_markdown(found.docstring.value, links)
            found.extra["site"]["converted"] = True
        for member in found.members.values():
            if not member.is_alias:
                self._convert(member, links)
