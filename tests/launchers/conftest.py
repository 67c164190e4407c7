"""One cluster serves all tests of launchers, since it takes seconds to come up.

The cluster and the virtual hosts have fixed names and addresses, so their tests run in one process of pytest-xdist, one
after the other. Tests of starts need only this machine, and run beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.labs import SlurmCluster, VirtualHosts, needs, needs_virtual_hosts

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == _HERE and item.path.name != "test_starts.py":
            item.add_marker(pytest.mark.xdist_group("hosts"))


@pytest.fixture(scope="session")
def hosts() -> Iterator[VirtualHosts]:
    needs_virtual_hosts()
    with VirtualHosts(["n1", "n2", "n3", "n4"]) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def slurm(hosts: VirtualHosts) -> Iterator[SlurmCluster]:
    needs("srun", "sbatch", "slurmctld", "slurmd", "munged")
    with SlurmCluster(hosts) as cluster:
        yield cluster
