"""Options, markers and fixtures of every test. The package ``support/workers`` runs a test's workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support import workers
from tests.support.labs import Fate, VirtualHosts, needs_virtual_hosts

BACKENDS = ("UCX", "TENSORPIPE")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torch_ucx_rpc")
    group.addoption(
        "--rpc-backend",
        choices=BACKENDS,
        default="UCX",
        help="run the end-to-end tests and the conformance suites on this backend; TENSORPIPE shows what a test "
        "demands of PyTorch's own",
    )


def pytest_configure(config: pytest.Config) -> None:
    for message in workers.ACCEPTED_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{message}")
    config.addinivalue_line("filterwarnings", f"ignore:::{workers.FOREIGN_MODULES}")
    config.addinivalue_line("markers", "field: takes minutes or much memory; make test-field runs it, CI does not")
    config.addinivalue_line("markers", "gpu: needs a GPU, and is skipped without one")
    config.addinivalue_line("markers", "ucx_only: states something that holds on UCX and not on TensorPipe")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    if config.getoption("--rpc-backend") == "UCX":
        return
    for item in items:
        if item.get_closest_marker("ucx_only"):
            item.add_marker(pytest.mark.skip(reason="holds on UCX only"))


@pytest.fixture(scope="session")
def rpc_backend(pytestconfig: pytest.Config) -> str:
    backend: str = pytestconfig.getoption("--rpc-backend")
    return backend


@pytest.fixture(scope="session", params=list(workers.Transport), ids=lambda transport: transport.name.lower())
def transport(request: pytest.FixtureRequest) -> workers.Transport:
    """The test runs once over each transport."""
    chosen: workers.Transport = request.param
    return chosen


@pytest.fixture(scope="session")
def run_workers(rpc_backend: str, transport: workers.Transport) -> Callable[..., list]:
    """`workers.run_workers` on the backend and over the transport of this test."""
    return functools.partial(workers.run_workers, backend=rpc_backend, transport=transport)


@pytest.fixture(scope="module")
def hosts() -> Iterator[VirtualHosts]:
    """Virtual hosts that the tests of a module share."""
    needs_virtual_hosts()
    with VirtualHosts(["a", "b", "c"]) as made:
        yield made


@pytest.fixture
def fate(hosts: VirtualHosts) -> Iterator[Fate]:
    """The failures of the virtual hosts."""
    with Fate(hosts) as desk:
        yield desk
