"""Tests of what not every machine has: never silently skipped where everything is supposed to be installed."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

import pytest


def needs(*programs: str) -> None:
    """Skip the test, with the reason, if one of these programs is not installed; in CI that is a failure."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        _do_without(f"not installed: {', '.join(missing)}")


def needs_virtual_hosts() -> None:
    """Skip the test, with the reason, where this process cannot make hosts; in CI that is a failure."""
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


def _do_without(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (and CI is set)", pytrace=False)
    pytest.skip(reason)
