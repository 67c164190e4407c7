"""The folders of csrc are layers, and includes go one way (docs/development/architecture.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

CSRC = Path(__file__).resolve().parents[2] / "torch_ucx_rpc" / "csrc"

# What the files of a folder may include of ours: folders, or single headers. The longest folder that matches counts.
MAY_INCLUDE = {
    "base": {"base"},
    "memory": {"memory", "base"},
    "wire": {"wire", "memory", "base"},
    "transport": {"transport/transport.h", "wire", "memory", "base"},
    "transport/loopback": {"transport/loopback", "transport/transport.h", "wire", "memory", "base"},
    "transport/ucp": {"transport/ucp", "transport/transport.h", "wire", "memory", "base"},
    "agent": {"agent", "transport/transport.h", "wire", "memory", "base"},
    # module.cpp and its like, which bind the agent and make its transport.
    ".": {".", "agent", "transport", "wire", "memory", "base"},
}

# Whose headers are for a few only: first part of the include path -> who may, and why not the others.
RESERVED = {
    "ucp": ({"transport/ucp"}, "UCX is the affair of transport/ucp alone"),
    "ucs": ({"transport/ucp"}, "UCX is the affair of transport/ucp alone"),
    "uct": ({"transport/ucp"}, "UCX is the affair of transport/ucp alone"),
    "torch": ({"agent", "."}, "below the agent only c10's light headers are used"),
    "ATen": ({"agent", "."}, "below the agent only c10's light headers are used"),
    "pybind11": ({"."}, "only the bindings know of Python"),
    "Python.h": ({"."}, "only the bindings know of Python"),
}

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"(?P<ours>[^"]+)"|<(?P<theirs>[^>]+)>)')


def layer_of(path: PurePosixPath) -> str:
    return next((str(folder) for folder in path.parents if str(folder) in MAY_INCLUDE), ".")


def folders_of(path: str) -> set[str]:
    """ "transport" and "transport/ucp" of a header of ucp; "." only of what lies in csrc itself."""
    return {str(folder) for folder in PurePosixPath(path).parents} - {"."} or {"."}


def broken_rules(file: str, text: str, headers: set[str]) -> Iterator[str]:
    """One sentence for each include in `text` that `file`, a path relative to csrc, must not have."""
    layer = layer_of(PurePosixPath(file))
    for number, line in enumerate(text.splitlines(), start=1):
        found = INCLUDE.match(line)
        if found is None:
            continue
        says = f"{file}:{number} says {line.strip()}, but"
        if ours := found["ours"]:
            if ours not in headers:
                yield f"{says} csrc has no such header: includes are written relative to csrc."
            elif not {ours, *folders_of(ours)} & MAY_INCLUDE[layer]:
                allowed = ", ".join(sorted(MAY_INCLUDE[layer]))
                yield f"{says} files of {layer} may include only: {allowed}."
        else:
            theirs = found["theirs"]
            if theirs in headers:
                yield f'{says} our own headers are included as "{theirs}".'
            owners, reason = RESERVED.get(theirs.split("/")[0], ({layer}, ""))
            if layer not in owners:
                yield f"{says} {reason}."


def sources() -> list[str]:
    return sorted(str(path.relative_to(CSRC)) for path in CSRC.rglob("*") if path.suffix in {".h", ".cpp"})


def test_includes_go_one_way():
    files = sources()
    headers = {file for file in files if file.endswith(".h")}
    broken = [rule for file in files for rule in broken_rules(file, (CSRC / file).read_text(encoding="utf-8"), headers)]
    assert not broken, "\n" + "\n".join(broken)


def test_every_source_is_in_a_layer():
    layers = {layer_of(PurePosixPath(file)) for file in sources()}
    assert layers == set(MAY_INCLUDE)
    stray = [file for file in sources() if layer_of(PurePosixPath(file)) == "." and "/" in file]
    assert not stray, f"no layer has these files, so no rule guards them: {stray}"


HEADERS = {"base/error.h", "wire/header.h", "agent/agent.h", "transport/transport.h", "transport/ucp/worker.h"}


@pytest.mark.parametrize(
    ("file", "include", "sentence"),
    [
        ("base/a.h", '"wire/header.h"', "files of base may include only: base."),
        ("memory/a.h", '"wire/header.h"', "files of memory may include only: base, memory."),
        ("wire/a.h", '"agent/agent.h"', "files of wire may include only: base, memory, wire."),
        ("wire/a.cpp", "<torch/types.h>", "below the agent only c10's light headers are used."),
        ("base/a.h", "<ATen/Tensor.h>", "below the agent only c10's light headers are used."),
        ("transport/ucp/a.cpp", "<Python.h>", "only the bindings know of Python."),
        ("transport/ucp/a.cpp", '"agent/agent.h"', "files of transport/ucp may include only"),
        ("transport/loopback/a.cpp", '"transport/ucp/worker.h"', "files of transport/loopback may include only"),
        ("transport/transport.h", '"transport/ucp/worker.h"', "files of transport may include only"),
        ("agent/a.cpp", '"transport/ucp/worker.h"', "files of agent may include only"),
        ("agent/a.cpp", "<ucp/api/ucp.h>", "UCX is the affair of transport/ucp alone."),
        ("module.cpp", "<ucp/api/ucp.h>", "UCX is the affair of transport/ucp alone."),
        ("agent/a.cpp", "<pybind11/pybind11.h>", "only the bindings know of Python."),
        ("agent/a.cpp", '"agent.h"', "csrc has no such header"),
        ("agent/a.cpp", "<base/error.h>", 'our own headers are included as "base/error.h".'),
    ],
)
def test_a_broken_rule_is_named(file, include, sentence):
    (broken,) = broken_rules(file, f"#pragma once\n\n#include {include}\n", HEADERS)
    assert broken.startswith(f"{file}:3 says #include {include}, but ")
    assert sentence in broken


@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("wire/a.h", '"base/error.h"'),
        ("wire/a.h", "<c10/core/Device.h>"),
        ("transport/ucp/a.cpp", '"transport/ucp/worker.h"'),
        ("transport/ucp/a.cpp", '"transport/transport.h"'),
        ("transport/ucp/a.cpp", "<ucp/api/ucp.h>"),
        ("agent/a.cpp", '"transport/transport.h"'),
        ("agent/a.cpp", "<torch/types.h>"),
        ("module.cpp", '"agent/agent.h"'),
        ("module.cpp", '"transport/ucp/worker.h"'),
        ("module.cpp", "<pybind11/pybind11.h>"),
    ],
)
def test_what_the_rules_allow_passes(file, include):
    assert not list(broken_rules(file, f"#include {include}\n", HEADERS))
