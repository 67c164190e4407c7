"""One cluster serves all tests of launchers, since its start takes seconds.

The cluster and the virtual hosts have fixed names and addresses. So their tests run one after the other, in one process
of pytest-xdist. Tests of starts and facts need only this machine, and run in other processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.support.labs import SlurmCluster, VirtualHosts, needs, needs_virtual_hosts


class Scheduling(LoadScopeScheduling):
    """Tests of one scope run in one process. xdist's own groups have no effect with pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0]).name
        return {"test_starts.py": nodeid, "test_facts.py": file}.get(file, "hosts")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return Scheduling(config, log)


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
