"""Collects PyTorch's suites for the backend under test, if the command line names their path: ``pytest
tests/conformance``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# torch's limit for one of its tests, in seconds. torch reads it when it imports the suites. The longest test takes 15 s
# on two cores, and several times that on a shared core.
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "150")
# With this, torch's init_process_group returns when all ranks are done. The master of DdpUnderDistAutogradTest calls
# its trainers as soon as its own init_process_group has returned, and they need the group. If trainers are 50 ms late,
# the test fails with TensorPipe too.
os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torch_ucx_rpc")
    group.addoption("--conformance-report", type=Path, metavar="FILE", help="write the results of the suites, as JSON")
    group.addoption("--cuda", action="store_true", help="collect PyTorch's suites for GPUs too")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cuda") and not config.getoption("--collect-only"):
        import torch

        if torch.cuda.device_count() == 0:
            raise pytest.UsageError(
                f"torch {torch.__version__} finds no GPU here: PyTorch's suites for GPUs cannot run."
            )
    from ._report import Report

    if Report.is_needed(config):
        config.pluginmanager.register(Report(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.name == "test_cuda_suites.py" and not config.getoption("--cuda") else None


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list | None:
    """Leave out the suites of the other backends."""
    from ._faulty_fixtures import FAULTY_FIXTURES
    from ._fixtures import FIXTURES, TENSORPIPE_FIXTURES

    chosen = collector.config.getoption("--rpc-backend")
    others = {
        fixture
        for fixtures in (FIXTURES, TENSORPIPE_FIXTURES, FAULTY_FIXTURES)
        for backend, fixture in fixtures.items()
        if backend != chosen
    }
    return [] if isinstance(obj, type) and issubclass(obj, tuple(others)) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that only TensorPipe's agent can pass. This project has equivalents of them."""
    backend = config.getoption("--rpc-backend")
    if backend == "TENSORPIPE":
        return
    from ._equivalents import EQUIVALENTS

    left_out = tuple(f"::{backend}{name}".replace(".", "::") for name in EQUIVALENTS)
    deselected = [item for item in items if item.nodeid.endswith(left_out)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]
