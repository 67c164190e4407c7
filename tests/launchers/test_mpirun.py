"""Special cases under mpirun. ``test_recipes.py`` has the ordinary ones."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.labs import VirtualHosts, needs, needs_mpi4py, needs_virtual_hosts

from ._reports import BESIDE_MPI, ENVIRON, MEET, PYTHON, assert_all_called

NAMES = ["worker0", "worker1", "worker2"]
ON = ["n1", "n2", "n3"]

# Both versions of mpirun hang when a host is lost.
TIMEOUT = ["timeout", "--kill-after=5", "100"]


def open_mpi(*arguments: str) -> list[str]:
    needs("mpirun.openmpi")
    # If MPICH's development files are installed too, mpi4py chooses MPICH.
    abi = ["-x", "MPI4PY_MPIABI=openmpi"]
    return [*TIMEOUT, "mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", *abi, *arguments]


def open_mpi_over(hosts: VirtualHosts, *arguments: str) -> list[str]:
    shell = ["--mca", "plm_rsh_agent", str(hosts.remote_shell)]
    return open_mpi(*shell, "-H", ",".join(ON), "-n", "3", *arguments)


def mpich(*arguments: str) -> list[str]:
    needs("mpirun.mpich")
    return [*TIMEOUT, "mpirun.mpich", *arguments]


def mpich_over(hosts: VirtualHosts, *arguments: str) -> list[str]:
    shell = ["-launcher", "ssh", "-launcher-exec", str(hosts.remote_shell)]
    return mpich(*shell, "-hosts", ",".join(ON), "-n", "3", *arguments)


def run(command: list[str], on: VirtualHosts | None = None) -> subprocess.CompletedProcess[str]:
    options = {"env": ENVIRON, "capture_output": True, "text": True, "check": False}
    return subprocess.run(command, **options) if on is None else on.head.run(command, **options)


def mpich_in_pid_namespaces(*arguments: str) -> list[str]:
    """Run mpirun so that each worker is in its own pid namespace, as in containers."""
    needs_virtual_hosts()
    return mpich(*arguments[:2], "unshare", "--pid", "--fork", "--mount-proc", *arguments[2:])


def mpich_in_pid_namespaces_with_the_proc_of_the_host(*arguments: str) -> list[str]:
    needs_virtual_hosts()
    return mpich(*arguments[:2], "unshare", "--pid", "--fork", "sh", "-c", '"$@"; exit $?', "-", *arguments[2:])


@pytest.mark.field
def test_a_worker_that_cannot_see_its_mpirun_names_the_cure() -> None:
    closing = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    done = run(mpich_in_pid_namespaces("-n", "2", PYTHON, "-c", closing, PYTHON, MEET))
    assert done.returncode != 0
    assert "in a pid namespace of its own" in done.stderr
    assert "Set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port" in done.stderr


@pytest.mark.parametrize(
    "mpirun",
    [
        open_mpi,
        mpich,
        pytest.param(mpich_in_pid_namespaces, marks=pytest.mark.field),
        pytest.param(mpich_in_pid_namespaces_with_the_proc_of_the_host, marks=pytest.mark.field),
    ],
)
def test_two_jobs_at_the_same_time_on_a_host_do_not_meet(mpirun) -> None:
    commands = [mpirun("-n", "2", PYTHON, MEET) for _ in range(2)]
    jobs = [subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, text=True) for command in commands]
    for job in jobs:
        output, _ = job.communicate()
        assert job.returncode == 0
        assert_all_called(output, NAMES[:2])


# Make Open MPI use UCX for everything. If RPC starts first, that is the UCX that the package has loaded.
UCX_IN_OPEN_MPI = ["--mca", "pml", "ucx", "--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any"]


@pytest.mark.field
def test_open_mpi_shares_the_ucx_of_this_package(hosts: VirtualHosts) -> None:
    needs_mpi4py("openmpi")
    done = run(open_mpi_over(hosts, *UCX_IN_OPEN_MPI, PYTHON, MEET), on=hosts)
    assert done.returncode == 0, done.stderr
    assert_all_called(done.stdout, NAMES, on=ON)


@pytest.mark.field
def test_error_names_an_mpi4py_that_is_for_another_mpi(hosts: VirtualHosts) -> None:
    needs_mpi4py("openmpi")
    done = run(mpich_over(hosts, "-genv", "MPI4PY_MPIABI", "openmpi", PYTHON, MEET), on=hosts)
    assert done.returncode != 0
    assert "of 1, and MPICH started it as rank" in done.stderr
    assert "MPI4PY_MPIABI=mpich or openmpi" in done.stderr


# ---- MPI's own traffic beside RPC ------------------------------------------------------------------------------------


def beside(kind: str, tmp_path: Path, first: str, libraries: str = "") -> subprocess.CompletedProcess[str]:
    """Run two workers whose program also uses MPI, and starts it before RPC or after. The loader looks into
    ``libraries`` first."""
    library = needs_mpi4py("mpich" if kind == "mpich" else "openmpi")
    program = [PYTHON, BESIDE_MPI, first]
    if kind == "mpich":
        # mpi4py's wheels look for a library name that Debian does not use.
        (tmp_path / "libmpi.so.12").symlink_to(library)
        path = os.pathsep.join(filter(None, [str(tmp_path), libraries]))
        return run(mpich("-n", "2", "-genv", "MPI4PY_MPIABI", "mpich", "-genv", "LD_LIBRARY_PATH", path, *program))
    options = [*UCX_IN_OPEN_MPI, "-x", f"LD_LIBRARY_PATH={libraries}"] if kind == "open mpi over ucx" else []
    return run(open_mpi("-n", "2", *options, *program))


def assert_both_worked(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 has exchanged and called 10 times",
        "rank 1 has exchanged and called 10 times",
    ]


@pytest.mark.field
@pytest.mark.parametrize("kind", ["open mpi", "open mpi over ucx", "mpich"])
def test_mpi_that_is_started_after_rpc_works_beside_it(kind: str, tmp_path: Path) -> None:
    assert_both_worked(beside(kind, tmp_path, first="rpc"))


@pytest.mark.field
def test_open_mpi_without_ucx_may_start_before_rpc(tmp_path: Path) -> None:
    assert_both_worked(beside("open mpi", tmp_path, first="mpi"))


@pytest.mark.field
@pytest.mark.parametrize("kind", ["open mpi over ucx", "mpich"])
def test_older_ucx_loaded_by_mpi_is_refused_with_a_working_cure(kind: str, tmp_path: Path) -> None:
    refused = beside(kind, tmp_path, first="mpi")
    assert refused.returncode != 0
    assert "import torch_ucx_rpc before that package (MPI, for one)" in refused.stderr
    [cure, *_] = re.findall(r"LD_LIBRARY_PATH=(.*)\.$", refused.stderr, re.MULTILINE)
    (tmp_path / "cured").mkdir()
    assert_both_worked(beside(kind, tmp_path / "cured", first="mpi", libraries=cure))
