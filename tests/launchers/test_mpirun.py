"""What can come in the way under mpirun; that it works is what ``test_recipes.py`` is about."""

from __future__ import annotations

import importlib.util
import subprocess

import pytest
from labs import VirtualHosts, needs

from ._reports import ENVIRON, MEET, PYTHON, assert_all_called

NAMES = ["worker0", "worker1", "worker2"]
ON = ["n1", "n2", "n3"]

# Both hang when a host is lost.
TIMEOUT = ["timeout", "--kill-after=5", "100"]


def open_mpi(*arguments: str) -> list[str]:
    needs("mpirun.openmpi")
    return [*TIMEOUT, "mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", *arguments]


def open_mpi_over(hosts: VirtualHosts, *arguments: str) -> list[str]:
    shell = ["--mca", "plm_rsh_agent", str(hosts.remote_shell)]
    return open_mpi(*shell, "-H", ",".join(ON), "-n", "3", *arguments)


def mpich(*arguments: str) -> list[str]:
    needs("mpirun.mpich")
    return [*TIMEOUT, "mpirun.mpich", *arguments]


def mpich_over(hosts: VirtualHosts, *arguments: str) -> list[str]:
    shell = ["-launcher", "ssh", "-launcher-exec", str(hosts.remote_shell)]
    return mpich(*shell, "-hosts", ",".join(ON), "-n", "3", *arguments)


def needs_mpi4py() -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.fail("mpi4py is among the requirements of the tests")


def run(command: list[str], on: VirtualHosts | None = None) -> subprocess.CompletedProcess[str]:
    options = {"env": ENVIRON, "capture_output": True, "text": True, "check": False}
    return subprocess.run(command, **options) if on is None else on.head.run(command, **options)


@pytest.mark.parametrize("mpirun", [open_mpi, mpich])
def test_two_jobs_at_the_same_time_on_a_host_do_not_meet(mpirun) -> None:
    commands = [mpirun("-n", "2", PYTHON, MEET) for _ in range(2)]
    jobs = [subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, text=True) for command in commands]
    for job in jobs:
        output, _ = job.communicate()
        assert job.returncode == 0
        assert_all_called(output, NAMES[:2])


# Have Open MPI use UCX for all it does. By the time it starts the package has brought one, and it takes that.
UCX_IN_OPEN_MPI = ["--mca", "pml", "ucx", "--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any"]


def test_open_mpi_shares_the_ucx_of_this_package(hosts: VirtualHosts) -> None:
    needs_mpi4py()
    done = run(open_mpi_over(hosts, *UCX_IN_OPEN_MPI, PYTHON, MEET), on=hosts)
    assert done.returncode == 0, done.stderr
    assert_all_called(done.stdout, NAMES, on=ON)


def test_an_mpi4py_for_another_mpi_is_explained(hosts: VirtualHosts) -> None:
    needs("mpirun.openmpi")
    needs_mpi4py()
    done = run(mpich_over(hosts, "-genv", "MPI4PY_MPIABI", "openmpi", PYTHON, MEET), on=hosts)
    assert done.returncode != 0
    assert "of 1, and MPICH started it as rank" in done.stderr
    assert "MPI4PY_MPIABI=mpich or openmpi" in done.stderr


def test_mpi_that_has_loaded_its_ucx_before_is_refused_with_the_reason() -> None:
    needs_mpi4py()
    code = "from mpi4py import MPI; import torch_ucx_rpc"
    done = run(open_mpi(*UCX_IN_OPEN_MPI, "-n", "1", PYTHON, "-c", code))
    assert done.returncode == 1
    assert "import torch_ucx_rpc before that package (MPI, for one)" in done.stderr
