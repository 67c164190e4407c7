"""Which UCX and which torch the package runs with, and what it says where it cannot.

Errors on import are provoked in a process of its own, with a copy of the package that lacks something and with
libraries that are made on the spot.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torch_ucx_rpc
from tests.support import workers
from tests.support.fresh import run_fresh
from torch_ucx_rpc import _native
from torch_ucx_rpc._build_info import BUILT_FOR_TORCH, BUILT_FOR_UCX

PACKAGE = Path(torch_ucx_rpc.__file__).parent
needs_final_release = pytest.mark.skipif(
    _native.minor_release(_native.without_build_label(torch.__version__)) is None, reason="torch is no final release"
)
EXT_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")

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


def test_this_ucx_is_new_enough_and_where_it_says() -> None:
    ucx = _native.loaded_ucx()
    assert ucx is not None
    _native.check_ucx_version(ucx, BUILT_FOR_UCX, was_there_before=False)
    assert ".".join(map(str, ucx.version)) == _native._C.ucx_library()["version"]
    assert Path(ucx.path).samefile(_native._C.ucx_library()["path"])


def test_the_extension_was_built_with_what_the_build_wrote_down() -> None:
    assert _native._C.BUILT_FOR_TORCH == BUILT_FOR_TORCH
    assert _native._C.UCP_API_VERSION == BUILT_FOR_UCX


# ---- Sources of UCX --------------------------------------------------------------------------------------------------


def test_the_wheel_comes_before_the_system_unless_one_is_chosen() -> None:
    assert _native.sources("") == ("wheel", "system")
    assert _native.sources("wheel") == ("wheel",)
    assert _native.sources("system") == ("system",)


def test_a_choice_that_is_none_is_refused() -> None:
    with pytest.raises(ImportError, match=r"TORCH_UCX_RPC_UCX=conda means nothing: set it to wheel or system"):
        _native.sources("conda")


@pytest.mark.parametrize("version", [(1, 22, 0), (1, 22, 3), (1, 23, 0), (2, 0, 0)])
def test_a_newer_ucx_than_at_the_build_is_taken(version: tuple[int, int, int]) -> None:
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
def test_every_build_of_one_torch_release_will_do(built_for: str, running: str) -> None:
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
    # Nightly builds have none.
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
def test_a_patch_release_with_the_same_headers_will_do(
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
    assert f"built for torch 2.13.0 and this is torch 2.13.1, whose header {RPC_AGENT} is another: " in message
    assert "pip install torch_ucx_rpc" not in message
    # The headers are not read for the release of the build, nor do they make another minor release fit.
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
    # It differs in each release, so none would fit.
    assert "torch/headeronly/version.h" not in names
    assert _native.changed_headers(listing, Path(torch.__file__).parent / "include") == []


# ---- On import -------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with a package torch_ucx_rpc that is made of links to this one's files."""
    package = tmp_path / "copied" / "torch_ucx_rpc"
    package.mkdir(parents=True)
    rooms = [file.parent for file in PACKAGE.glob("*/__init__.py")]
    for file in [*PACKAGE.glob("*.py"), *rooms, PACKAGE / f"_C{EXT_SUFFIX}", PACKAGE / "_torch_headers.txt"]:
        (package / file.name).symlink_to(file)
    return package


def import_error(copied: Path, before: str = "", env: Mapping[str, str] | None = None) -> str:
    """What the ImportError says with which importing the copied package ends."""
    script = f"""
import sys
sys.path.insert(0, {str(copied.parent)!r})
{before}
import torch_ucx_rpc
"""
    with pytest.raises(workers.WorkersFailed) as failed:
        run_fresh(script, env=env)
    [message] = re.findall(r"^ImportError: (.*)$", str(failed.value), re.MULTILINE)[-1:]
    return message


def library(folder: Path, major: int, minor: int, name: str = "libucp.so.0") -> Path:
    """A libucp of another version, as far as the loader and a question for the version can tell."""
    folder.mkdir(exist_ok=True)
    source, made = folder / "ucp.c", folder / name
    source.write_text(
        f"void ucp_get_version(unsigned* a, unsigned* b, unsigned* c) {{ *a = {major}; *b = {minor}; *c = 7; }}"
    )
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{made.name}", str(source), "-o", str(made)]
    subprocess.run(command, check=True)
    return made


def test_the_copy_can_be_imported(copied: Path) -> None:
    run_fresh(f"""
        import sys
        sys.path.insert(0, {str(copied.parent)!r})
        import torch_ucx_rpc
        assert torch_ucx_rpc.__file__ == {str(copied / "__init__.py")!r}
    """)


def test_a_source_tree_that_is_not_built_says_how_to_build(copied: Path) -> None:
    (copied / f"_C{EXT_SUFFIX}").unlink()
    (copied / "_build_info.py").unlink()
    message = import_error(copied)
    assert f"the extension has not been built in {copied}" in message
    assert "make build" in message
    assert "pip install --no-build-isolation" in message


def test_an_extension_for_another_python_is_named(copied: Path) -> None:
    (copied / f"_C{EXT_SUFFIX}").rename(copied / "_C.cpython-34m.so")
    message = import_error(copied)
    assert "is _C.cpython-34m.so" in message
    assert f"needs _C{EXT_SUFFIX}" in message


def test_another_torch_than_at_the_build_is_noticed(copied: Path) -> None:
    (copied / "_build_info.py").unlink()
    (copied / "_build_info.py").write_text(f"BUILT_FOR_TORCH = '1.0.0'\nBUILT_FOR_UCX = '{BUILT_FOR_UCX}'\n")
    assert f"built for torch 1.0.0 and this is torch {torch.__version__}" in import_error(copied)


def build_info_for(copied: Path, built_for: str) -> None:
    (copied / "_build_info.py").unlink()
    (copied / "_build_info.py").write_text(f"BUILT_FOR_TORCH = '{built_for}'\nBUILT_FOR_UCX = '{BUILT_FOR_UCX}'\n")


def other_patch_release() -> str:
    minor, _, patch = _native.without_build_label(torch.__version__).rpartition(".")
    return f"{minor}.{int(patch) + 1}"


@needs_final_release
def test_a_patch_release_with_the_same_headers_is_imported(copied: Path) -> None:
    build_info_for(copied, other_patch_release())
    run_fresh(f"""
        import sys
        sys.path.insert(0, {str(copied.parent)!r})
        import torch_ucx_rpc
        assert torch_ucx_rpc.__file__ == {str(copied / "__init__.py")!r}
    """)


@needs_final_release
def test_a_patch_release_with_another_header_is_noticed(copied: Path) -> None:
    build_info_for(copied, other_patch_release())
    (copied / "_torch_headers.txt").unlink()
    (copied / "_torch_headers.txt").write_text(f"{'0' * 64}  {RPC_AGENT}\n")
    message = import_error(copied)
    assert f"built for torch {other_patch_release()} and this is torch {torch.__version__}" in message
    assert f"whose header {RPC_AGENT} is another" in message


def test_an_older_ucx_is_noticed(copied: Path) -> None:
    (copied / "_build_info.py").unlink()
    (copied / "_build_info.py").write_text(f"BUILT_FOR_TORCH = '{BUILT_FOR_TORCH}'\nBUILT_FOR_UCX = '99.0'\n")
    message = import_error(copied)
    assert "built with UCX 99.0" in message
    assert "install a newer one" in message


def test_an_extension_that_cannot_be_loaded_says_why(copied: Path) -> None:
    (copied / f"_C{EXT_SUFFIX}").unlink()
    (copied / f"_C{EXT_SUFFIX}").write_bytes(b"not a library")
    message = import_error(copied)
    assert "the extension cannot be loaded" in message
    assert "make build" in message


def test_older_ucx_loaded_by_another_package_is_not_replaced(copied: Path, tmp_path: Path) -> None:
    older = library(tmp_path / "older", 1, 13)
    message = import_error(copied, f"import ctypes; ctypes.CDLL({str(older)!r})")
    assert f"the older UCX 1.13.7 ({older}), which another package loaded before" in message


def test_partly_loaded_ucx_is_the_ucx_of_the_process(copied: Path, tmp_path: Path) -> None:
    part = library(tmp_path / "older", 1, 13, "libucs.so.0")
    load_part = f"import ctypes; ctypes.CDLL({str(part)!r})"
    message = import_error(copied, load_part)
    assert f"a part of UCX ({part}) that has no libucp.so.0 beside it" in message
    whole = library(tmp_path / "older", 1, 13)
    message = import_error(copied, load_part)
    assert f"the older UCX 1.13.7 ({whole}), which another package loaded before" in message


def test_cure_for_a_loaded_older_ucx_names_the_newer_one(copied: Path, tmp_path: Path) -> None:
    older = library(tmp_path / "older", 1, 13)
    message = import_error(copied, f"import ctypes; ctypes.CDLL({str(older)!r})")
    [folder] = re.findall(r"LD_LIBRARY_PATH=(.*)\.$", message)
    assert (Path(folder) / "libucp.so.0").exists()


def test_loaded_ucx_that_was_not_chosen_is_refused(copied: Path, tmp_path: Path) -> None:
    other = library(tmp_path / "other", 99, 0)
    message = import_error(copied, f"import ctypes; ctypes.CDLL({str(other)!r})", {"TORCH_UCX_RPC_UCX": "wheel"})
    assert f"UCX 99.0.7 ({other}) is in this process already" in message
    assert "TORCH_UCX_RPC_UCX=wheel" in message


# What Python takes for a package that is not installed.
def test_libucx_with_its_loader_elsewhere_is_asked_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = []
    libucx = ModuleType("libucx")
    libucx.__spec__ = ModuleSpec("libucx", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setitem(sys.modules, "libucx", libucx)
    assert not _native.load_wheel()
    libucx.load_library = lambda: loaded.append("UCX")  # type: ignore[attr-defined]
    assert _native.load_wheel()
    assert loaded == ["UCX"]


NO_WHEEL = "sys.modules['libucx'] = None"


def test_without_any_ucx_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    # Under this name there is none, neither in this process nor on any machine.
    monkeypatch.setattr(_native, "SONAME", "libucp.so.none")
    monkeypatch.setitem(sys.modules, "libucx", None)
    monkeypatch.setattr(_native, "complete_ucx", lambda: None)
    with pytest.raises(ImportError, match=r"there is no UCX \(libucp.so.none\): ") as refused:
        _native.load_ucx("", BUILT_FOR_UCX)
    assert "pip install libucx-cu12" in str(refused.value)
    assert "conda install -c conda-forge ucx" in str(refused.value)


def test_a_choice_that_is_not_installed_is_named(copied: Path) -> None:
    message = import_error(copied, NO_WHEEL, {"TORCH_UCX_RPC_UCX": "wheel"})
    assert "there is no UCX (libucp.so.0) in a libucx wheel" in message


@pytest.mark.parametrize(
    ("before", "env"), [("", {"TORCH_UCX_RPC_UCX": "system"}), (NO_WHEEL, {})], ids=["chosen", "no wheel"]
)
def test_system_ucx_is_taken_when_chosen_or_without_a_wheel(
    copied: Path, tmp_path: Path, before: str, env: dict[str, str]
) -> None:
    made = library(tmp_path / "system", 1, 2)
    script = f"import sys; sys.path.insert(0, {str(copied.parent)!r}); {before or 'pass'}; import torch_ucx_rpc"
    # The loader reads this when a program starts.
    [ended] = workers.run_program(script, env={"LD_LIBRARY_PATH": str(made.parent), **env})
    assert ended.returncode == 1
    assert f"the older UCX 1.2.7 ({made}): install a newer one" in ended.stderr.splitlines()[-1]


# ---- Signals ---------------------------------------------------------------------------------------------------------


def test_process_with_ucx_still_ends_with_its_terminal() -> None:
    # Under nohup, say, these tests would begin with another disposition.
    script = """
        import os, signal
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        import torch_ucx_rpc
        os.kill(os.getpid(), signal.SIGHUP)
    """
    run_fresh(script, exit_codes={0: -signal.SIGHUP})


def test_handlers_that_were_there_before_ucx_stay() -> None:
    run_fresh("""
        import os, signal
        came = []
        signal.signal(signal.SIGHUP, lambda *_: came.append("hup"))
        import torch_ucx_rpc
        os.kill(os.getpid(), signal.SIGHUP)
        assert came == ["hup"]
    """)


def test_a_signal_that_the_user_gives_to_ucx_is_left_to_it() -> None:
    run_fresh(
        """
        import os, signal
        import torch_ucx_rpc
        os.kill(os.getpid(), signal.SIGHUP)
        """,
        env={"UCX_DEBUG_SIGNO": "HUP"},
    )


# ---- The functions that UCX overwrites -------------------------------------------------------------------------------


def tasks(folder: Path, *syscalls: str) -> Path:
    """A folder as /proc/self/task, with this thread in a read, and others."""
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
    """Hides the threads that the test runner's process may have besides this one."""
    monkeypatch.setattr(sys, "_current_frames", lambda: {threading.get_ident(): None})


@pytest.mark.usefixtures("one_python_thread")
def test_ucx_need_not_wait_where_all_others_sleep_elsewhere(tmp_path: Path) -> None:
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


# What UCX finds in the environment when it is loaded: libucs's constructor reads it, and nothing later does.
LOADED_WITH = """
    import ctypes, os, threading
    during = []
    load = ctypes.CDLL.__init__

    def look(library, name, *arguments, **named):
        if "libuc" in str(name) and "mode" not in named:  # which is RTLD_NOLOAD
            during.append(os.environ.get("UCX_MEM_BISTRO_GRACE_DURATION"))
        load(library, name, *arguments, **named)

    ctypes.CDLL.__init__ = look
"""


def test_one_thread_shortens_ucxs_wait_but_not_its_childrens() -> None:
    run_fresh(
        LOADED_WITH
        + """
    import torch_ucx_rpc
    assert set(during) == {"10us"}, during
    assert "UCX_MEM_BISTRO_GRACE_DURATION" not in os.environ
    """
    )


def test_more_python_threads_leave_ucxs_wait_alone() -> None:
    run_fresh(
        LOADED_WITH
        + """
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait)
    other.start()
    import torch_ucx_rpc
    is_over.set()
    other.join()
    assert set(during) == {None}, during
    """
    )


def test_how_long_a_user_lets_ucx_wait_stands() -> None:
    run_fresh(
        LOADED_WITH
        + """
    import torch_ucx_rpc
    assert set(during) == {"2ms"}, during
    assert os.environ["UCX_MEM_BISTRO_GRACE_DURATION"] == "2ms"
    """,
        env={"UCX_MEM_BISTRO_GRACE_DURATION": "2ms"},
    )
