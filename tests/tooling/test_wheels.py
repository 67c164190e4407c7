"""Tests of wheels: their requirements, their tags, and the index for pip."""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch

from ._tools import ROOT, SETUP_CFG, build_environment, tool

TORCH_MINOR = ".".join(torch.__version__.split(".")[:2])
wheels, index = tool("wheels"), tool("index")


# ---- What a wheel requires -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch_version", "cuda", "ucx"),
    [
        ("2.13.0+cpu", "", "libucx-cu12>=1.22"),
        ("2.13.1+cu128", "12.8", "libucx-cu12>=1.22"),
        ("2.13.0", "13.0", "libucx-cu13>=1.22"),
    ],
)
def test_wheel_is_for_one_torch_minor_and_the_ucx_of_its_cuda(monkeypatch, torch_version, cuda, ucx) -> None:
    facts = {"TORCH_VERSION": torch_version, "TORCH_CUDA": cuda}
    monkeypatch.setattr(build_environment, "torch_facts", lambda: facts)
    monkeypatch.setattr(build_environment, "ucx_of_wheel", lambda: (Path("/wheel/include"), Path("/wheel/lib")))
    ucx_facts = {"UCX_VERSION": "1.22", "UCX_LIBRARY_DIR": "/wheel/lib"}
    monkeypatch.setattr(build_environment, "ucx_facts", lambda choice: ucx_facts)
    assert build_environment.pins() == ("torch2.13", ["torch==2.13.*", "numpy", ucx])
    # conda's and the system's UCX are not packages of pip.
    ucx_facts["UCX_LIBRARY_DIR"] = "/usr/lib"
    assert build_environment.pins() == ("torch2.13", ["torch==2.13.*", "numpy"])


def test_a_pinned_build_is_named_for_this_torch_and_requires_it(tmp_path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "TORCH_UCX_RPC_PIN": "1"}, capture_output=True, check=True)
    metadata = (tmp_path / "torch_ucx_rpc.egg-info" / "PKG-INFO").read_text(encoding="utf-8").splitlines()
    assert f"Version: {SETUP_CFG['metadata']['version']}+torch{TORCH_MINOR}" in metadata
    assert f"Requires-Dist: torch=={TORCH_MINOR}.*" in metadata
    assert "Requires-Dist: numpy" in metadata


# ---- Which wheels are built ------------------------------------------------------------------------------------------

ANSWER = """\
torch (2.15.0)
Available versions: 2.15.0, 2.14.1, 2.14.0, 2.13.0+cpu, 2.13.0, 2.13.0rc1, 2.11.0, 2.10.0
  INSTALLED: 2.13.0+cpu
"""


def test_wheels_build_with_the_newest_patch_of_each_minor(monkeypatch) -> None:
    monkeypatch.setattr(wheels.build_environment, "oldest_torch", lambda: (2, 11))
    versions = wheels.versions_in(ANSWER)
    assert versions == ["2.15.0", "2.14.1", "2.14.0", "2.13.0+cpu", "2.13.0", "2.11.0", "2.10.0"]
    assert wheels.chosen(versions, []) == {
        "2.15": "2.15.0",
        "2.14": "2.14.1",
        "2.13": "2.13.0+cpu",
        "2.11": "2.11.0",
    }
    wanted = ["2.14.0", "2.13", "2.13.0", "2.12", "2.10.0"]
    found = ["2.14.0", "2.13.0+cpu", "2.13.0+cpu", None, None]
    assert wheels.chosen(versions, wanted) == dict(zip(wanted, found, strict=True))
    assert wheels.chosen(wheels.versions_in("ERROR: no matching distribution"), []) == {}


# ---- The index -------------------------------------------------------------------------------------------------------


def links(page: Path) -> list[re.Match]:
    """Return each link of a page, with its parts ``href`` and ``rest``."""
    return list(re.finditer('<a href="(?P<href>[^"]+)"(?P<rest>[^>]*)>', page.read_text(encoding="utf-8")))


def test_the_index_leads_to_each_file_and_has_its_digest(tmp_path) -> None:
    names = ["torch_ucx_rpc-1.0+torch2.13-cp311-cp311-linux_x86_64.whl", "torch_ucx_rpc-1.0.tar.gz"]
    for name in [*names, "other-1.0.tar.gz", "torch_ucx_rpc-notes.txt"]:
        (tmp_path / name).write_text(name, encoding="utf-8")
    folder = index.make_index(tmp_path, "../..")
    [project] = links(folder / "index.html")
    page = folder / project["href"] / "index.html"
    assert [unquote(urlsplit(link["href"]).path).rpartition("/")[2] for link in links(page)] == names
    for link in links(page):
        address = urlsplit(link["href"])
        file = page.parent / unquote(address.path)
        assert address.fragment == f"sha256={hashlib.sha256(file.read_bytes()).hexdigest()}"
        assert html.unescape(link["rest"]) == ' data-requires-python=">=3.10"'
    index.make_index(tmp_path, "https://example.org/v1/")
    assert links(page)[0]["href"].startswith("https://example.org/v1/torch_ucx_rpc-1.0%2Btorch2.13-cp311")


# ---- The wheel of this tree ------------------------------------------------------------------------------------------


@pytest.mark.field
def test_the_wheel_runs_by_itself(tmp_path) -> None:
    for left_over in (ROOT / "build").glob("lib.*"):
        shutil.rmtree(left_over)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    command = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "TORCH_UCX_RPC_PIN": "1"})
    [wheel] = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    wanted = {path for pattern in ("*.py", "*.pyi", "py.typed") for path in (ROOT / "torch_ucx_rpc").rglob(pattern)}
    assert {path.relative_to(ROOT) for path in wanted} <= {path.relative_to(site) for path in site.rglob("*")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        # Import the package from the wheel only.
        environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, check=True)

    facts = json.loads(run("-m", "torch_ucx_rpc", "info", "--json").stdout)["torch_ucx_rpc"]
    assert (facts["path"], facts["extension"]) == (str(site / "torch_ucx_rpc"), "loaded")

    # The program shows its help without importing the package.
    program = site / "bin" / "torch-ucx-rpc"
    assert os.access(program, os.X_OK)
    done = run("-X", "importtime", str(program), "--help")
    assert done.stdout.startswith("usage: torch-ucx-rpc ")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"_torch_ucx_rpc_cli", "torch", "torch_ucx_rpc"} & imported == {"_torch_ucx_rpc_cli"}

    # A patch release of torch that has the same headers is enough.
    script = (
        f"import torch; torch.__version__ = '{TORCH_MINOR}.99'; import torch_ucx_rpc; print(torch_ucx_rpc._C.__file__)"
    )
    assert Path(run("-c", script.format(TORCH_MINOR)).stdout.strip()).is_relative_to(site)
