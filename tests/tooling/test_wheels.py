"""Wheels: their requirements, their tags, and pip's index."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
TORCH_MINOR = "{0.major}.{0.minor}".format(Version(torch.__version__))
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, ModuleType]]:
    """The modules build_environment, wheels and index of the folder tools."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield {name: importlib.import_module(name) for name in ("build_environment", "wheels", "index")}
    finally:
        sys.path.remove(str(ROOT / "tools"))
        for name in ("build_environment", "wheels", "index"):
            sys.modules.pop(name, None)


def required_by(metadata: Message) -> dict[str, Requirement]:
    """The requirements that need no extra, by name."""
    lines = map(Requirement, metadata.get_all("Requires-Dist"))
    return {line.name: line for line in lines if "extra" not in str(line.marker)}


# ---- What a wheel requires -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch_version", "cuda", "ucx"),
    [
        ("2.13.0+cpu", "", "libucx-cu12>=1.22"),
        ("2.13.1+cu128", "12.8", "libucx-cu12>=1.22"),
        ("2.13.0", "13.0", "libucx-cu13>=1.22"),
    ],
)
def test_wheel_is_for_one_torch_minor_and_the_ucx_of_its_cuda(tools, monkeypatch, torch_version, cuda, ucx) -> None:
    build_environment = tools["build_environment"]
    facts = {"TORCH_VERSION": torch_version, "TORCH_CUDA": cuda}
    monkeypatch.setattr(build_environment, "torch_facts", lambda: facts)
    monkeypatch.setattr(build_environment, "ucx_of_wheel", lambda: (Path("/wheel/include"), Path("/wheel/lib")))
    ucx_facts = {"UCX_VERSION": "1.22", "UCX_LIBRARY_DIR": "/wheel/lib"}
    monkeypatch.setattr(build_environment, "ucx_facts", lambda choice: ucx_facts)
    assert build_environment.pins() == ("torch2.13", ["torch==2.13.*", "numpy", ucx])
    # conda's and the system's UCX are not packages of pip.
    ucx_facts["UCX_LIBRARY_DIR"] = "/usr/lib"
    assert build_environment.pins() == ("torch2.13", ["torch==2.13.*", "numpy"])


def metadata_of_this_tree(folder: Path, **variables: str) -> Message:
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, check=True)
    return Parser().parsestr((folder / "torch_ucx_rpc.egg-info" / "PKG-INFO").read_text(encoding="utf-8"))


def test_a_pinned_build_is_named_for_this_torch_and_requires_it(tools, tmp_path) -> None:
    version = tools["build_environment"].setup_cfg()["metadata"]["version"]
    metadata = metadata_of_this_tree(tmp_path, TORCH_UCX_RPC_PIN="1")
    assert metadata["Version"] == f"{version}+torch{TORCH_MINOR}"
    required = required_by(metadata)
    assert str(required["torch"].specifier) == f"=={TORCH_MINOR}.*"
    assert required["torch"].specifier.contains(Version(torch.__version__).public)
    assert "numpy" in required


# ---- Which wheels are built ------------------------------------------------------------------------------------------

ANSWER = """\
torch (2.15.0)
Available versions: 2.15.0, 2.14.1, 2.14.0, 2.13.0+cpu, 2.13.0, 2.13.0rc1, 2.11.0, 2.10.0
  INSTALLED: 2.13.0+cpu
"""


def test_wheels_build_with_the_newest_patch_of_each_minor(tools, monkeypatch) -> None:
    monkeypatch.setattr(tools["wheels"].build_environment, "oldest_torch", lambda: (2, 11))
    versions = tools["wheels"].versions_in(ANSWER)
    assert versions == ["2.15.0", "2.14.1", "2.14.0", "2.13.0+cpu", "2.13.0", "2.11.0", "2.10.0"]
    assert tools["wheels"].chosen(versions, []) == {
        "2.15": "2.15.0",
        "2.14": "2.14.1",
        "2.13": "2.13.0+cpu",
        "2.11": "2.11.0",
    }
    wanted = ["2.14.0", "2.13", "2.13.0", "2.12", "2.10.0"]
    found = ["2.14.0", "2.13.0+cpu", "2.13.0+cpu", None, None]
    assert tools["wheels"].chosen(versions, wanted) == dict(zip(wanted, found, strict=True))
    assert tools["wheels"].chosen(tools["wheels"].versions_in("ERROR: no matching distribution"), []) == {}


# ---- The index -------------------------------------------------------------------------------------------------------


class Links(HTMLParser):
    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[dict[str, str]] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str]]) -> None:
        if tag == "a":
            self.found.append(dict(attrs))


def test_the_index_leads_to_each_file_and_has_its_digest(tools, tmp_path) -> None:
    names = ["torch_ucx_rpc-1.0+torch2.13-cp311-cp311-linux_x86_64.whl", "torch_ucx_rpc-1.0.tar.gz"]
    for name in [*names, "other-1.0.tar.gz", "torch_ucx_rpc-notes.txt"]:
        (tmp_path / name).write_text(name, encoding="utf-8")
    index = tools["index"].make_index(tmp_path, "../..")
    [project] = Links(index / "index.html").found
    page = index / project["href"] / "index.html"
    links = Links(page).found
    assert [unquote(urlsplit(link["href"]).path).rpartition("/")[2] for link in links] == names
    for link in links:
        address = urlsplit(link["href"])
        file = page.parent / unquote(address.path)
        assert address.fragment == f"sha256={hashlib.sha256(file.read_bytes()).hexdigest()}"
        assert link["data-requires-python"] == ">=3.10"
    tools["index"].make_index(tmp_path, "https://example.org/v1/")
    assert Links(page).found[0]["href"].startswith("https://example.org/v1/torch_ucx_rpc-1.0%2Btorch2.13-cp311")


# ---- The wheel of this tree ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this tree, pinned to this torch, in a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    for left_over in (ROOT / "build").glob("lib.*"):
        shutil.rmtree(left_over)
    options = ["--no-build-isolation", "--no-deps", "--wheel-dir", str(folder)]
    pinned = {**os.environ, "TORCH_UCX_RPC_PIN": "1"}
    subprocess.run([*PIP, "wheel", *options, str(ROOT)], check=True, cwd=folder, env=pinned)
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def unpacked_wheel(wheel) -> Path:
    """A folder with only the files that pip installs from the wheel."""
    site = wheel.parent / "site"
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    return site


def run_with_wheel(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # -P: the current folder, hence the source tree, cannot be imported.
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=site, capture_output=True, text=True, check=False
    )


@pytest.mark.field
def test_wheel_has_every_module_and_runs_with_its_torch(unpacked_wheel):
    package = ROOT / "torch_ucx_rpc"
    wanted = {path.relative_to(ROOT) for pattern in ("*.py", "*.pyi", "py.typed") for path in package.rglob(pattern)}
    assert wanted <= {path.relative_to(unpacked_wheel) for path in unpacked_wheel.rglob("*")}
    done = run_with_wheel(unpacked_wheel, "-m", "torch_ucx_rpc", "info", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)["torch_ucx_rpc"]
    assert facts["path"] == str(unpacked_wheel / "torch_ucx_rpc")
    assert facts["extension"] == "loaded"


@pytest.mark.field
def test_wheels_program_shows_help_without_the_package(unpacked_wheel):
    program = unpacked_wheel / "bin" / "torch-ucx-rpc"
    assert os.access(program, os.X_OK)
    help_and_imports = [sys.executable, "-X", "importtime", str(program), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(unpacked_wheel), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        help_and_imports, env=environment, cwd=unpacked_wheel, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: torch-ucx-rpc ")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "_torch_ucx_rpc_cli" in imported
    assert not {"torch", "torch_ucx_rpc"} & imported


@pytest.mark.field
def test_wheel_runs_with_a_patch_release_with_the_same_headers(unpacked_wheel):
    running = f"{TORCH_MINOR}.99"
    script = f"import torch; torch.__version__ = '{running}'; import torch_ucx_rpc; print(torch_ucx_rpc._C.__file__)"
    done = run_with_wheel(unpacked_wheel, "-c", script)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(unpacked_wheel)
