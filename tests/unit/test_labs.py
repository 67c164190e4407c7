"""The virtual hosts that other tests are built on: what is said of them holds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from labs import VirtualHost, VirtualHosts, needs_virtual_hosts

REACH = "import socket, sys; socket.create_connection((sys.argv[1], 7), timeout=float(sys.argv[2]))"


@pytest.fixture(scope="module")
def hosts() -> Iterator[VirtualHosts]:
    needs_virtual_hosts()
    with VirtualHosts(["a", "b"]) as hosts:
        yield hosts


def says(host: VirtualHost, *command: str) -> str:
    return host.run(command, capture_output=True, text=True, check=True).stdout.strip()


def reaches(host: VirtualHost, other: str, within_s: float = 20) -> bool:
    """Whether the other one answers, be it by a refusal: nothing listens there."""
    done = host.run([sys.executable, "-c", REACH, other, str(within_s)], capture_output=True, text=True, check=False)
    return "ConnectionRefusedError" in done.stderr


def test_each_has_a_name_an_address_and_processes_of_its_own(hosts: VirtualHosts) -> None:
    for host in hosts:
        assert says(host, "hostname") == host.name
        assert f"inet {host.address}/24" in says(host, "ip", "addr", "show", "eth0")
        assert says(host, "sh", "-c", "echo $$; ls -A /dev/shm") in [str(pid) for pid in range(2, 100)]
        assert says(host, "pwd") == str(Path.cwd())


def test_they_reach_each_other_by_name_until_the_cable_is_cut(hosts: VirtualHosts) -> None:
    a, b = hosts
    assert reaches(a, "b")
    b.cut()
    assert not reaches(a, "b", within_s=1)
    b.heal()
    assert reaches(a, "b")
    assert reaches(a, "head")


def test_the_remote_shell_runs_commands_there(hosts: VirtualHosts) -> None:
    assert says(hosts.head, str(hosts.remote_shell), "-x", "b", "hostname", ";", "exit") == "b"
    unknown = hosts.head.run([str(hosts.remote_shell), "c", "hostname"], capture_output=True, text=True, check=False)
    assert (unknown.returncode, unknown.stderr) == (255, "there is no host c\n")


def test_what_runs_on_one_ends_with_it() -> None:
    needs_virtual_hosts()
    with VirtualHosts(["a"]) as (host,):
        program = host.popen(["sh", "-c", "echo up; exec sleep 600"], stdout=subprocess.PIPE)
        assert program.stdout.readline() == b"up\n"
        host.power_off()
        assert program.wait(timeout=20) != 0
        program.stdout.close()
