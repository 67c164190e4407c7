"""The folders of csrc are layers, and includes go one way (torch_ucx_rpc/csrc/README.md), and tests mirror them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

CSRC = Path(__file__).resolve().parents[2] / "torch_ucx_rpc" / "csrc"

# The headers of ours that the files of a layer may include: whole folders, or single files. The deepest folder that has
# rules counts.
BELOW_TRANSPORT = {"base", "wire", "memory"}
BELOW_RUNTIME = BELOW_TRANSPORT | {"transport/transport.h"}
MAY_INCLUDE = {
    "base": {"base"},
    "wire": {"wire", "base"},
    "memory": {"memory", "base"},
    "transport": BELOW_RUNTIME,
    "transport/ucp": {"transport/ucp"} | BELOW_RUNTIME,
    "runtime": {"runtime"} | BELOW_RUNTIME,
    "peers": {"peers", "runtime"} | BELOW_RUNTIME,
    "messaging": {"messaging", "peers", "runtime"} | BELOW_RUNTIME,
    "torch_glue": {"torch_glue", "base"},
    "tensors": {"tensors", "torch_glue", "messaging", "peers", "runtime"} | BELOW_RUNTIME,
    "rpc": {"rpc", "tensors", "torch_glue", "messaging", "peers", "runtime"} | BELOW_RUNTIME,
    "native_op": {"native_op"},
    # These files make the agent's transport too.
    "bindings": {"bindings", "native_op", "rpc", "tensors", "torch_glue", "messaging", "peers", "runtime", "transport"}
    | BELOW_TRANSPORT,
}

# Headers for a few only: first part of the include path -> the folders that may include them, and why. c10 is for all.
ABOVE_MESSAGING = {"tensors", "torch_glue", "rpc", "native_op", "bindings"}
OF_TORCH = (ABOVE_MESSAGING, "below tensors only c10's light headers are used")
OF_UCX = ({"transport/ucp"}, "UCX is for transport/ucp alone")
OF_PYTHON = ({"bindings"}, "only the bindings know of Python")
RESERVED = {
    "torch": OF_TORCH,
    "ATen": OF_TORCH,
    "ucp": OF_UCX,
    "ucs": OF_UCX,
    "uct": OF_UCX,
    "pybind11": OF_PYTHON,
    "Python.h": OF_PYTHON,
}

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"(?P<ours>[^"]+)"|<(?P<theirs>[^>]+)>)')


def layer_of(path: PurePosixPath) -> str:
    """The deepest folder with rules; empty for a file that no rule guards."""
    return next((str(folder) for folder in path.parents if str(folder) in MAY_INCLUDE), "")


def folders_of(path: str) -> set[str]:
    """ "transport" and "transport/ucp" of a header of ucp."""
    return {str(folder) for folder in PurePosixPath(path).parents} - {"."}


def broken_rules(file: str, text: str, headers: set[str]) -> Iterator[str]:
    """Return a sentence for each forbidden include in `text` of `file`, a path relative to csrc."""
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
    stray = [file for file in sources() if not layer_of(PurePosixPath(file))]
    assert not stray, f"no layer has these files, so no rule guards them: {stray}"
    assert layers == set(MAY_INCLUDE)


# Folders without C++ tests of their own: Python's tests reach them.
TESTED_FROM_PYTHON = {"bindings", "native_op"}


def missing_mirrors(folders: set[str], tested: set[str]) -> tuple[set[str], set[str]]:
    """The folders of csrc without C++ tests, and the folders of C++ tests without a folder of csrc."""
    return folders - tested, tested - folders


def test_the_tests_mirror_the_folders():
    tests = CSRC.parents[1] / "tests" / "cpp"
    folders = {file.split("/")[0] for file in sources()}
    tested = {path.relative_to(tests).parts[0] for path in tests.rglob("*_test.cpp")}
    untested, strays = missing_mirrors(folders, tested)
    assert untested == TESTED_FROM_PYTHON
    assert not strays


HEADERS = {
    "base/error.h",
    "wire/header.h",
    "memory/host_pool.h",
    "transport/transport.h",
    "transport/ucp/worker.h",
    "runtime/timer.h",
    "peers/peer.h",
    "messaging/outbox.h",
    "torch_glue/torch_state.h",
    "tensors/device_copy.h",
    "rpc/agent.h",
    "native_op/native_op.h",
    "bindings/bindings.h",
}


@pytest.mark.parametrize(
    ("file", "include", "sentence"),
    [
        ("base/a.h", '"wire/header.h"', "files of base may include only: base."),
        ("wire/a.h", '"rpc/agent.h"', "files of wire may include only: base, wire."),
        ("messaging/a.h", "<ATen/Tensor.h>", "below tensors only c10's light headers are used."),
        ("transport/ucp/a.cpp", "<Python.h>", "only the bindings know of Python."),
        ("transport/ucp/a.cpp", '"runtime/timer.h"', "files of transport/ucp may include only"),
        ("messaging/a.cpp", '"tensors/device_copy.h"', "files of messaging may include only"),
        ("rpc/a.cpp", '"transport/ucp/worker.h"', "files of rpc may include only"),
        ("rpc/a.cpp", "<ucp/api/ucp.h>", "UCX is for transport/ucp alone."),
        ("rpc/a.cpp", "<pybind11/pybind11.h>", "only the bindings know of Python."),
        ("rpc/a.cpp", '"agent.h"', "csrc has no such header"),
        ("rpc/a.cpp", "<base/error.h>", 'our own headers are included as "base/error.h".'),
    ],
)
def test_a_broken_rule_is_named(file, include, sentence):
    (broken,) = broken_rules(file, f"#pragma once\n\n#include {include}\n", HEADERS)
    assert broken.startswith(f"{file}:3 says #include {include}, but ")
    assert sentence in broken
