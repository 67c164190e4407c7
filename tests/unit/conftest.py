"""Unit tests start no process. A test that needs one belongs in tests/e2e."""

from __future__ import annotations

import multiprocessing.process
import os
import subprocess
from collections.abc import Iterator
from typing import NoReturn

import pytest


# The scope is the package, so that it covers fixtures of modules too.
@pytest.fixture(scope="package", autouse=True)
def _no_processes() -> Iterator[None]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a unit test starts a process: move the test to tests/e2e")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fork", refuse)
        patch.setattr(os, "posix_spawn", refuse)
        patch.setattr(subprocess.Popen, "__init__", refuse)
        patch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
        yield
