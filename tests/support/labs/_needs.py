"""Skip tests of optional programs that are missing; fail them in CI, where all should be installed."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

# Debian and its derivatives have a library folder for each architecture, others have one folder.
_LIBRARY_FOLDERS = (*Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"))

# The libraries' names on Debian.
_MPI_LIBRARIES = {"openmpi": "libmpi.so.40", "mpich": "libmpich.so.12"}


def needs(*programs: str) -> None:
    """Skip the test, with the reason, if one of these programs is not installed. In CI, fail it."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        _do_without(f"not installed: {', '.join(missing)}")


def needs_mpi4py(mpi: str) -> Path:
    """Return the shared library of ``mpi``, "openmpi" or "mpich": mpi4py's wheels load it at import, but do not contain
    it.

    Skip the test, with the reason, if the library is not installed. In CI, fail it.
    """
    if importlib.util.find_spec("mpi4py") is None:
        pytest.fail("mpi4py is among the requirements of the tests")
    name = _MPI_LIBRARIES[mpi]
    found = next((folder / name for folder in _LIBRARY_FOLDERS if (folder / name).exists()), None)
    return found or _do_without(f"not installed: {name}")


def needs_virtual_hosts() -> None:
    """Skip the test, with the reason, if this process cannot make hosts. In CI, fail it."""
    needs("ip", "nsenter", "setpriv", "unshare")
    if reason := _why_no_namespaces():
        _do_without(f"no virtual hosts: {reason}")


@functools.cache
def _why_no_namespaces() -> str:
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    command = ["unshare", "--net", "--ipc", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "ip", "link"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def _do_without(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (and CI is set)", pytrace=False)
    pytest.skip(reason)
