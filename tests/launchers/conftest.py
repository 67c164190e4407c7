"""One cluster serves all tests of launchers, since it takes seconds to come up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.labs import SlurmCluster, VirtualHosts, needs, needs_virtual_hosts


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
