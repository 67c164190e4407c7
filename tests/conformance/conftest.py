"""Collects PyTorch's suites for the backend under test, when asked for by path: ``pytest tests/conformance``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# torch's limit for one of its tests, in seconds, which it reads when the suites are imported. On two cores the longest
# takes 15, and several times that on one that is shared.
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "150")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torch_ucx_rpc")
    group.addoption("--conformance-report", type=Path, metavar="FILE", help="write how each suite fared, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--conformance-report")
    if file:
        from _report import Report

        config.pluginmanager.register(Report(file, config.getoption("--rpc-backend")))


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list | None:
    """Leave out the suites of the other backends."""
    from _fixtures import FIXTURES

    others = [
        fixture for backend, fixture in FIXTURES.items() if backend != collector.config.getoption("--rpc-backend")
    ]
    return [] if isinstance(obj, type) and issubclass(obj, tuple(others)) else None
