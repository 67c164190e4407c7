"""Tests of the virtual hosts and containers that other tests use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.labs import VirtualHost, VirtualHosts, _needs, needs, needs_mpi4py, needs_virtual_hosts

REACH = "import socket, sys; socket.create_connection((sys.argv[1], 7), timeout=float(sys.argv[2]))"


@pytest.fixture(scope="module")
def hosts() -> Iterator[VirtualHosts]:
    needs_virtual_hosts()
    with VirtualHosts(["a", "b"]) as hosts:
        yield hosts


def says(host: VirtualHost, *command: str) -> str:
    return host.run(command, capture_output=True, text=True, check=True).stdout.strip()


def reaches(host: VirtualHost, other: str, within_s: float = 20) -> bool:
    """Whether the other host answers. A refusal is an answer too: nothing listens there."""
    done = host.run([sys.executable, "-c", REACH, other, str(within_s)], capture_output=True, text=True, check=False)
    return "ConnectionRefusedError" in done.stderr


def test_each_host_has_its_own_name_address_and_processes(hosts: VirtualHosts) -> None:
    for host in hosts:
        assert says(host, "hostname") == host.name
        assert f"inet {host.address}/24" in says(host, "ip", "addr", "show", "eth0")
        assert says(host, "sh", "-c", "echo $$; ls -A /dev/shm") in [str(pid) for pid in range(2, 100)]
        here = Path.cwd().stat()
        assert says(host, "stat", "--format=%d %i", ".") == f"{here.st_dev} {here.st_ino}"


def test_hosts_reach_each_other_until_the_cable_is_cut(hosts: VirtualHosts) -> None:
    a, b = hosts
    assert reaches(a, "b")
    b.cut()
    assert not reaches(a, "b", within_s=1)
    b.heal()
    assert reaches(a, "b")
    assert reaches(a, "head")


def test_programs_end_with_their_host() -> None:
    needs_virtual_hosts()
    with VirtualHosts(["a"]) as (host,):
        program = host.popen(["sh", "-c", "echo up; exec sleep 600"], stdout=subprocess.PIPE)
        assert program.stdout.readline() == b"up\n"
        host.power_off()
        assert program.wait(timeout=20) != 0
        program.stdout.close()


# ---- Missing programs -------------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pretend that this machine has no launchers and is not CI."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(_needs, "_LIBRARY_FOLDERS", (tmp_path,))


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (lambda: needs("mpirun.mpich", "srun"), "not installed: mpirun.mpich, srun"),
        (lambda: needs_mpi4py("openmpi"), "not installed: libmpi.so.40"),
        (lambda: needs_mpi4py("mpich"), "not installed: libmpich.so.12"),
        (needs_virtual_hosts, "not installed: ip, nsenter, setpriv, unshare"),
    ],
)
def test_missing_program_skips_the_test_but_fails_it_in_ci(
    need: Callable[[], object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(pytest.skip.Exception, match=f"^{reason}$"):
        need()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=reason):
        need()
