"""The accepted versions of UCX and torch, and the errors for others."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torch_ucx_rpc
from torch_ucx_rpc import _native
from torch_ucx_rpc._build_info import BUILT_FOR_TORCH, BUILT_FOR_UCX

PACKAGE = Path(torch_ucx_rpc.__file__).parent

MAPS = """\
7f0000000000-7f0000010000 r--p 00000000 08:01 1000 /usr/lib/libuct.so.0
7f0000010000-7f0000020000 r--p 00000000 08:01 1001 {libucp}
7f0000020000-7f0000030000 r-xp 00010000 08:01 1001 {libucp}
7f0000030000-7f0000040000 rw-p 00000000 00:00 0
"""


# ---- Loaded libraries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "libucp", ["/usr/lib/x86_64-linux-gnu/libucp.so.0.0.0", "/opt/with space/libucx/lib/libucp.so", "/lib/libucp.so.0"]
)
def test_the_path_of_libucp_is_read_from_the_maps(libucp: str) -> None:
    assert _native.path_in_maps(MAPS.format(libucp=libucp)) == libucp


def test_a_library_that_was_replaced_on_disk_keeps_its_path() -> None:
    assert _native.path_in_maps(MAPS.format(libucp="/usr/lib/libucp.so.0 (deleted)")) == "/usr/lib/libucp.so.0"


@pytest.mark.parametrize("other", ["/usr/lib/libucpp.so", "/usr/lib/my_libucp.so", "/usr/lib/libucp/readme"])
def test_other_libraries_are_not_libucp(other: str) -> None:
    assert _native.path_in_maps(MAPS.format(libucp=other)) is None


def test_this_ucx_is_new_enough_and_at_its_reported_path() -> None:
    ucx = _native.loaded_ucx()
    assert ucx is not None
    _native.check_ucx_version(ucx, BUILT_FOR_UCX, was_there_before=False)
    assert ".".join(map(str, ucx.version)) == _native._C.ucx_library()["version"]
    assert Path(ucx.path).samefile(_native._C.ucx_library()["path"])


def test_the_extension_matches_the_record_of_the_build() -> None:
    assert _native._C.BUILT_FOR_TORCH == BUILT_FOR_TORCH
    assert _native._C.UCP_API_VERSION == BUILT_FOR_UCX


# ---- Sources of UCX --------------------------------------------------------------------------------------------------


def test_the_wheel_comes_before_the_system_unless_one_is_chosen() -> None:
    assert _native.sources("") == ("wheel", "system")
    assert _native.sources("wheel") == ("wheel",)
    assert _native.sources("system") == ("system",)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ImportError, match=r"TORCH_UCX_RPC_UCX=conda .*wheel or system"):
        _native.sources("conda")


@pytest.mark.parametrize("version", [(1, 22, 0), (1, 22, 3), (1, 23, 0), (2, 0, 0)])
def test_a_newer_ucx_than_at_the_build_is_accepted(version: tuple[int, int, int]) -> None:
    _native.check_ucx_version(_native.Ucx(version), "1.22", was_there_before=True)


@pytest.mark.parametrize(
    ("was_there_before", "cure"),
    [(True, "import torch_ucx_rpc before that package"), (False, "install a newer one, pip install libucx-cu12")],
)
def test_an_older_ucx_than_at_the_build_is_refused_with_the_cure(
    was_there_before: bool, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "_maps", lambda: MAPS.format(libucp="/lib/libucp.so.0"))
    with pytest.raises(ImportError, match=cure) as refused:
        _native.check_ucx_version(_native.Ucx((1, 13, 1)), "1.22", was_there_before=was_there_before)
    assert "built with UCX 1.22" in str(refused.value)
    assert "UCX 1.13.1 (/lib/libucp.so.0)" in str(refused.value)


# ---- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built_for", "running"),
    [
        ("2.13.0+cpu", "2.13.0+cpu"),
        ("2.13.0+cpu", "2.13.0+cu130"),
        ("2.13.0", "2.13.0+cpu"),
        ("2.13.0+rocm6.4", "2.13.0"),
        ("2.13.0a0+git1234567", "2.13.0a0+git1234567"),
    ],
)
def test_every_build_of_one_torch_release_is_accepted(built_for: str, running: str) -> None:
    _native.check_torch_version(built_for, running)


@pytest.mark.parametrize(
    ("built_for", "running"),
    [
        ("2.13.0", "2.12.0"),
        ("2.13.0", "2.13.0a0+git1234567"),
        ("2.14.0.dev20260101", "2.14.0.dev20260102"),
        ("2.13.0a0+git1234567", "2.13.0a0+git7654321"),
    ],
)
def test_another_torch_than_at_the_build_is_refused_naming_both(built_for: str, running: str) -> None:
    with pytest.raises(ImportError, match="build it again") as refused:
        _native.check_torch_version(built_for, running)
    assert f"built for torch {built_for} and this is torch {running}" in str(refused.value)


def test_the_cure_for_another_minor_release_is_its_wheel() -> None:
    with pytest.raises(ImportError, match=r"install the wheel for it \(pip install torch_ucx_rpc 'torch==2\.14\.\*'\)"):
        _native.check_torch_version("2.13.0", "2.14.1+cu130")
    # Nightly builds have no wheel.
    with pytest.raises(ImportError, match=r"this is torch 2\.15\.0\.dev20260101: build it again"):
        _native.check_torch_version("2.13.0", "2.15.0.dev20260101")


RPC_AGENT = "torch/csrc/distributed/rpc/rpc_agent.h"


@pytest.fixture
def built_with(tmp_path: Path) -> tuple[Path, Path]:
    """A listing of two headers, and the folder that has them."""
    include = tmp_path / "include"
    lines = []
    for name in (RPC_AGENT, "c10/core/Device.h"):
        (include / name).parent.mkdir(parents=True)
        (include / name).write_text(f"// {name}\n", encoding="utf-8")
        lines.append(f"{hashlib.sha256((include / name).read_bytes()).hexdigest()}  {name}\n")
    listing = tmp_path / "listing.txt"
    listing.write_text("".join(lines), encoding="utf-8")
    return listing, include


@pytest.mark.parametrize(
    ("built_for", "running"), [("2.13.0", "2.13.1"), ("2.13.1+cpu", "2.13.0+cu130"), ("2.13.0+cpu", "2.13.12")]
)
def test_a_patch_release_with_the_same_headers_is_accepted(
    built_with: tuple[Path, Path], built_for: str, running: str
) -> None:
    _native.check_torch_version(built_for, running, *built_with)


@pytest.mark.parametrize("harm", [lambda header: header.write_text("// another"), Path.unlink], ids=["changed", "gone"])
def test_patch_release_with_another_header_is_refused(
    built_with: tuple[Path, Path], harm: Callable[[Path], object]
) -> None:
    listing, include = built_with
    harm(include / RPC_AGENT)
    with pytest.raises(ImportError, match="build it again") as refused:
        _native.check_torch_version("2.13.0", "2.13.1", listing, include)
    message = str(refused.value)
    assert f"built for torch 2.13.0 and this is torch 2.13.1, whose header {RPC_AGENT} differs: " in message
    assert "pip install torch_ucx_rpc" not in message
    # The headers do not matter for the build's own release, or for another minor release.
    _native.check_torch_version("2.13.0+cpu", "2.13.0+cu130", listing, include)


def test_the_same_headers_do_not_make_another_minor_release_fit(built_with: tuple[Path, Path]) -> None:
    for running in ("2.14.0", "2.13.0.dev20260101", "2.13.0a0+git1234567"):
        with pytest.raises(ImportError, match="build it again"):
            _native.check_torch_version("2.13.0", running, *built_with)


def test_patch_release_is_refused_without_a_listing(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"this is torch 2\.13\.1: build it again"):
        _native.check_torch_version("2.13.0", "2.13.1", tmp_path / "missing.txt", tmp_path)


def test_this_builds_listing_agrees_with_torchs_headers() -> None:
    listing = PACKAGE / "_torch_headers.txt"
    names = {line.split("  ")[1] for line in listing.read_text(encoding="utf-8").splitlines()}
    assert {RPC_AGENT, "c10/core/Device.h", "c10/core/TensorImpl.h", "ATen/core/ivalue.h"} <= names
    # This file differs in each release. With it in the list no other release would be accepted.
    assert "torch/headeronly/version.h" not in names
    assert _native.changed_headers(listing, Path(torch.__file__).parent / "include") == []


def test_libucx_without_a_loader_module_loads_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = []
    libucx = ModuleType("libucx")
    libucx.__spec__ = ModuleSpec("libucx", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setitem(sys.modules, "libucx", libucx)
    assert not _native.load_wheel()
    libucx.load_library = lambda: loaded.append("UCX")  # type: ignore[attr-defined]
    assert _native.load_wheel()
    assert loaded == ["UCX"]


def test_without_any_ucx_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    # No library has this name on any machine.
    monkeypatch.setattr(_native, "SONAME", "libucp.so.none")
    monkeypatch.setitem(sys.modules, "libucx", None)
    monkeypatch.setattr(_native, "complete_ucx", lambda: None)
    with pytest.raises(ImportError, match=r"there is no UCX \(libucp.so.none\): ") as refused:
        _native.load_ucx("", BUILT_FOR_UCX)
    assert "pip install libucx-cu12" in str(refused.value)
    assert "conda install -c conda-forge ucx" in str(refused.value)


# ---- The functions that UCX overwrites -------------------------------------------------------------------------------


def tasks(folder: Path, *syscalls: str) -> Path:
    """Make a folder like /proc/self/task, with this thread in a read, and other threads in these system calls."""
    for number, syscall in enumerate(["0 0x3 0x7ffc 0x7f16", *syscalls]):
        task = folder / str(threading.get_native_id() + number)
        task.mkdir()
        (task / "syscall").write_text(syscall + "\n", encoding="ascii")
    return folder


def inside(name: str) -> str:
    function = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
    assert function is not None
    return f"11 0x7000 0x1000 0x7ffc {function + 7:#x}"


@pytest.fixture
def one_python_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the other threads of the test runner's process."""
    monkeypatch.setattr(sys, "_current_frames", lambda: {threading.get_ident(): None})


@pytest.mark.usefixtures("one_python_thread")
def test_ucx_need_not_wait_if_other_threads_sleep_elsewhere(tmp_path: Path) -> None:
    assert _native.may_be_patched_at_once(tasks(tmp_path, "202 0x7f11 0x189 0x7f11 0x7f16", "232 0x4 0x7f11 0x7f17"))


@pytest.mark.usefixtures("one_python_thread")
@pytest.mark.parametrize(
    "syscall",
    [
        pytest.param("running", id="runs"),
        pytest.param(inside("munmap"), id="munmap"),
        pytest.param(inside("brk"), id="brk"),
    ],
)
def test_ucx_waits_for_threads_in_code_it_overwrites(tmp_path: Path, syscall: str) -> None:
    assert not _native.may_be_patched_at_once(tasks(tmp_path, "202 0x7f11 0x189 0x7f11 0x7f16", syscall))


@pytest.mark.usefixtures("one_python_thread")
def test_ucx_waits_where_other_threads_cannot_be_seen(tmp_path: Path) -> None:
    assert not _native.may_be_patched_at_once(tmp_path / "missing")
    (tasks(tmp_path, "running") / str(threading.get_native_id() + 1) / "syscall").unlink()
    assert not _native.may_be_patched_at_once(tmp_path)
