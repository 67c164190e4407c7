"""Imports of incomplete copies of the package, and imports beside libraries of other versions."""

from __future__ import annotations

import re
import signal
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.support import workers
from tests.support.fresh import run_fresh
from tests.unit.test_native import PACKAGE, RPC_AGENT
from torch_ucx_rpc import _native
from torch_ucx_rpc._build_info import BUILT_FOR_TORCH, BUILT_FOR_UCX

needs_final_release = pytest.mark.skipif(
    _native.minor_release(_native.without_build_label(torch.__version__)) is None, reason="torch is no final release"
)
EXT_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


# ---- On import -------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Make a package torch_ucx_rpc of links to the files of this one."""
    package = tmp_path / "copied" / "torch_ucx_rpc"
    package.mkdir(parents=True)
    rooms = [file.parent for file in PACKAGE.glob("*/__init__.py")]
    for file in [*PACKAGE.glob("*.py"), *rooms, PACKAGE / f"_C{EXT_SUFFIX}", PACKAGE / "_torch_headers.txt"]:
        (package / file.name).symlink_to(file)
    return package


def import_error(copied: Path, before: str = "", env: Mapping[str, str] | None = None) -> str:
    """Import the copied package, and return the text of its ImportError."""
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
    """Build a libucp of another version. It can be loaded, and it tells its version."""
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
    assert f"whose header {RPC_AGENT} differs" in message


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


NO_WHEEL = "sys.modules['libucx'] = None"


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
    # Under nohup the process would ignore the signal.
    script = """
        import os, signal
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        import torch_ucx_rpc
        os.kill(os.getpid(), signal.SIGHUP)
    """
    run_fresh(script, exit_codes={0: -signal.SIGHUP})


def test_signal_handlers_from_before_ucx_stay() -> None:
    run_fresh("""
        import os, signal
        came = []
        signal.signal(signal.SIGHUP, lambda *_: came.append("hup"))
        import torch_ucx_rpc
        os.kill(os.getpid(), signal.SIGHUP)
        assert came == ["hup"]
    """)


def test_a_signal_the_user_assigns_to_ucx_stays_with_ucx() -> None:
    run_fresh(
        """
        import os, signal
        import torch_ucx_rpc
        os.kill(os.getpid(), signal.SIGHUP)
        """,
        env={"UCX_DEBUG_SIGNO": "HUP"},
    )


# Note UCX's environment when UCX is loaded: only libucs's constructor reads it.
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


def test_with_one_thread_ucx_waits_less_but_not_in_children() -> None:
    run_fresh(
        LOADED_WITH
        + """
    import torch_ucx_rpc
    assert set(during) == {"10us"}, during
    assert "UCX_MEM_BISTRO_GRACE_DURATION" not in os.environ
    """
    )


def test_more_python_threads_do_not_change_ucxs_wait() -> None:
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


def test_a_users_limit_for_ucxs_wait_is_kept() -> None:
    run_fresh(
        LOADED_WITH
        + """
    import torch_ucx_rpc
    assert set(during) == {"2ms"}, during
    assert os.environ["UCX_MEM_BISTRO_GRACE_DURATION"] == "2ms"
    """,
        env={"UCX_MEM_BISTRO_GRACE_DURATION": "2ms"},
    )
