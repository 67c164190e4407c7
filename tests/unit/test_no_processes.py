"""The fixture of ``conftest.py`` refuses processes."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support.workers import process_context


def test_unit_tests_cannot_start_a_process() -> None:
    for start in (os.fork, lambda: subprocess.run(["true"], check=True), process_context().Process(target=print).start):
        with pytest.raises(AssertionError, match="move the test to tests/e2e"):
            start()
