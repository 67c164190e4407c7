"""The virtual hosts and the containers that other tests are built on: what is said of them holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from labs import Container, VirtualHost, VirtualHosts, _containers, _needs, needs, needs_mpi4py, needs_virtual_hosts
from workers import eventually

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
        here = Path.cwd().stat()
        assert says(host, "stat", "--format=%d %i", ".") == f"{here.st_dev} {here.st_ino}"


def test_they_reach_each_other_by_name_until_the_cable_is_cut(hosts: VirtualHosts) -> None:
    a, b = hosts
    assert reaches(a, "b")
    b.cut()
    assert not reaches(a, "b", within_s=1)
    b.heal()
    assert reaches(a, "b")
    assert reaches(a, "head")


LISTEN = "import socket; s = socket.create_server(('', 9)); print('up', flush=True); c, _ = s.accept(); c.recv(1)"
CONNECT = "import socket; c = socket.create_connection(('b', 9)); print('up', flush=True); c.recv(1)"


def test_connections_can_be_reset(hosts: VirtualHosts) -> None:
    a, b = hosts
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with b.popen([sys.executable, "-c", LISTEN], **pipes) as listening:
        assert listening.stdout.readline() == "up\n"
        with a.popen([sys.executable, "-c", CONNECT], **pipes) as connected:
            assert connected.stdout.readline() == "up\n"
            a.reset_connections()
            assert "ConnectionAbortedError" in connected.communicate(timeout=20)[1]
        assert "ConnectionResetError" in listening.communicate(timeout=20)[1]


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


# ---- Containers ------------------------------------------------------------------------------------------------------

KINDS_OF_CONTAINER = [Container(), Container(init=True), Container(pid="host"), Container(user=12345, read_only=True)]


def command_line_of(pid: int) -> bytes:
    """Empty once the process has ended: nobody on a virtual host takes note of the end of an orphan, and the kernel
    lists it without a command."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.fixture(params=KINDS_OF_CONTAINER, ids=["alone", "with init", "pid=host", "user"])
def running(request: pytest.FixtureRequest, hosts: VirtualHosts) -> Iterator[tuple[subprocess.Popen, int]]:
    """What started a container, and the number of the container's program on this machine."""
    command = request.param.command(["sh", "-c", "echo up; exec sleep 600"])
    with hosts[0].popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout.readline() == "up\n", started.stderr.read()
            pid = started.pid
            while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                [pid] = map(int, children)
            # The shell says "up" before it becomes sleep. In between, the kernel shows no command for a moment.
            eventually(lambda: command_line_of(pid) == b"sleep\000600\0", "the program runs")
            yield started, pid
        finally:
            started.kill()


def test_a_container_ends_with_the_exit_code_of_its_program(hosts: VirtualHosts) -> None:
    for container in KINDS_OF_CONTAINER:
        done = hosts[0].run(container.command(["sh", "-c", "exit 3"]), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (3, "")


def test_a_clone_in_tmp_is_there_in_a_container_with_a_tmp_of_its_own(
    hosts: VirtualHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as closed_to_others:
        clone, hidden = Path(closed_to_others, "clone"), Path(closed_to_others, "hidden")
        monkeypatch.setattr(_containers, "_NEEDED", (clone, clone / ".venv"))
        for folder in (clone / ".venv", hidden):
            folder.mkdir(parents=True)
        (clone / ".venv" / "file").touch()
        for container in (Container(read_only=True), Container(user=12345), Container(user=12345, read_only=True)):
            script = f"ls .venv; ls {hidden.parent}; touch file"
            done = hosts[0].run(
                container.command(["sh", "-c", script]), cwd=clone, capture_output=True, text=True, check=False
            )
            assert done.stdout.split() == ["file", "clone"], done.stderr
            assert "Read-only file system" in done.stderr


def test_a_container_whose_program_is_killed_says_so(running: tuple[subprocess.Popen, int]) -> None:
    started, pid = running
    os.kill(pid, signal.SIGKILL)
    assert started.wait(timeout=20) == 128 + signal.SIGKILL


def test_a_container_ends_with_what_started_it(running: tuple[subprocess.Popen, int]) -> None:
    started, pid = running
    started.kill()
    eventually(lambda: not command_line_of(pid), "the program has ended", 20)


# ---- Missing programs -------------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without any launcher, and not CI's."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(_needs, "_LIBRARY_FOLDERS", (tmp_path,))


NEEDS = [
    (lambda: needs("mpirun.mpich", "srun"), "not installed: mpirun.mpich, srun"),
    (lambda: needs_mpi4py("openmpi"), "not installed: libmpi.so.40"),
    (lambda: needs_mpi4py("mpich"), "not installed: libmpich.so.12"),
    (needs_virtual_hosts, "not installed: ip, nsenter, setpriv, unshare"),
]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("need", "reason"), NEEDS)
def test_what_is_not_installed_skips_the_test_and_is_named(need: Callable[[], object], reason: str) -> None:
    with pytest.raises(pytest.skip.Exception, match=f"^{reason}$"):
        need()


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("need", "reason"), NEEDS)
def test_in_ci_it_fails_the_test(need: Callable[[], object], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=reason):
        need()


def test_what_is_installed_is_found(bare: None, tmp_path: Path) -> None:
    for name in ("srun", "libmpich.so.12"):
        (tmp_path / name).touch(mode=0o755)
    needs("srun")
    assert needs_mpi4py("mpich") == tmp_path / "libmpich.so.12"
