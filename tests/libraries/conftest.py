"""Jobs of these tests: on UCX, on TensorPipe, or on each in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.support import workers

from ._jobs import BACKENDS, PATIENCE_S


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(params=BACKENDS)
def run_on_both(request: pytest.FixtureRequest) -> Callable[..., list]:
    """Return `workers.run_workers`, on each backend."""
    return functools.partial(workers.run_workers, backend=request.param, silent=False, timeout=PATIENCE_S)


@pytest.fixture
def run_on_ucx() -> Callable[..., list]:
    """Return `workers.run_workers` on UCX. The workers may print torch's message about a callee that raised."""
    return functools.partial(workers.run_workers, silent=False, timeout=PATIENCE_S)


@pytest.fixture
def run_on_tensorpipe() -> Callable[..., list]:
    """Return `workers.run_workers` on TensorPipe."""
    return functools.partial(workers.run_workers, backend="TENSORPIPE", silent=False, timeout=PATIENCE_S)
