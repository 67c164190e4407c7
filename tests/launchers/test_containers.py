"""Workers in containers, with the container settings that matter. The containers are namespaces, like those of Docker
and Kubernetes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support import workers
from tests.support.labs import Container, VirtualHost, VirtualHosts, limits, needs_virtual_hosts

from ._reports import ENVIRON, EXCHANGE, LOST_MEMORY, PYTHON, WITHOUT

TIMEOUT_S = 150.0

# A user without a name, as in images for Kubernetes or OpenShift.
NOBODY = 12345

IN_SHARED_MEMORY = ["sysv/memory"]


@pytest.fixture(autouse=True)
def needs_containers() -> None:
    needs_virtual_hosts()


@pytest.fixture
def node() -> Iterator[VirtualHost]:
    """A separate host, so that System V IPC and ``/dev/shm`` of this machine stay untouched."""
    with VirtualHosts(["n1"]) as (host,):
        yield host


Program = subprocess.Popen


def start(host: VirtualHost, container: Container, *program: str, **variables: str) -> Program:
    command = container.command([PYTHON, "-X", "faulthandler", *program])
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return host.popen(command, env={**ENVIRON, "PYTHONDONTWRITEBYTECODE": "1", **variables}, **pipes)


@contextlib.contextmanager
def worker_in_each(
    containers: Sequence[tuple[VirtualHost, Container]], *program: str, **variables: str
) -> Iterator[list[Program]]:
    """Start one worker in each container; the first is rank 0."""
    meeting = {"MASTER_ADDR": containers[0][0].address, "MASTER_PORT": "29500", "WORLD_SIZE": str(len(containers))}
    with contextlib.ExitStack() as running:
        programs = []
        for rank, (host, container) in enumerate(containers):
            programs.append(start(host, container, *program, **meeting, RANK=str(rank), **variables))
            running.enter_context(programs[-1])
            running.callback(programs[-1].kill)
        yield programs


def ends_of(programs: Sequence[Program]) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of each program. Print the stacks if one hangs."""
    deadline = time.monotonic() + TIMEOUT_S
    ends = []
    for program in programs:
        try:
            output, errors = program.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(map(stacks_of, descendants(program.pid)))) from None
        ends.append((program.returncode, output, errors))
    return ends


def descendants(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *(one for child in children for one in descendants(int(child)))]
    return []


def stacks_of(pid: int) -> str:
    return f"--- process {pid} ---\n{workers.native_stacks(pid)}"


def lanes_of(ends: list[tuple[int, str, str]]) -> dict[str, dict[str, list[str]]]:
    """Return the lanes between all workers, after they exchanged tensors."""
    for code, _, errors in ends:
        assert code == 0, errors
    reports = [json.loads(found) for _, output, _ in ends for found in re.findall(r'\{"exchanged".*\}\}', output)]
    return {report["exchanged"]: report["lanes"] for report in reports}


def assert_only_tcp(lanes: dict[str, dict[str, list[str]]]) -> None:
    assert all(re.fullmatch(r"tcp/\w+", lane) for peers in lanes.values() for used in peers.values() for lane in used)


@contextlib.contextmanager
def job_in_one(host: VirtualHost, container: Container, size: int, *program: str) -> Iterator[Program]:
    """Run our launcher in one container."""
    with start(host, container, "-m", "torch_ucx_rpc", "run", "-n", str(size), *program) as job:
        try:
            yield job
        finally:
            job.kill()


def run_in_one(host: VirtualHost, container: Container, size: int, *program: str) -> dict[str, dict[str, list[str]]]:
    """Run such a job, and return its lanes."""
    with job_in_one(host, container, size, *program) as job:
        return lanes_of(ends_of([job]))


# ---- One container ---------------------------------------------------------------------------------------------------


def test_with_dockers_defaults_workers_share_memory(node: VirtualHost) -> None:
    lanes = run_in_one(node, Container(), 3, EXCHANGE)
    assert list(lanes["worker0"].values()) == [IN_SHARED_MEMORY] * 2


@pytest.mark.field
def test_shared_memory_works_without_reading_other_processes(node: VirtualHost) -> None:
    forbidden = "process_vm_readv,process_vm_writev"
    lanes = run_in_one(node, Container(capabilities=()), 2, WITHOUT, forbidden, EXCHANGE)
    assert lanes["worker0"] == {"worker1": IN_SHARED_MEMORY}


@pytest.mark.field
def test_workers_with_only_the_loopback_share_memory(node: VirtualHost) -> None:
    # Like `docker run --network none`, for untrusted code.
    assert run_in_one(node, Container(network="none"), 2, EXCHANGE)["worker0"] == {"worker1": IN_SHARED_MEMORY}


@pytest.mark.field
def test_a_tensor_may_be_larger_than_dev_shm(node: VirtualHost) -> None:
    container = Container(shm_mib=64)
    assert run_in_one(node, container, 2, EXCHANGE, "192")["worker0"] == {"worker1": IN_SHARED_MEMORY}


@pytest.mark.field
def test_nameless_user_on_read_only_files_works(node: VirtualHost) -> None:
    container = Container(user=NOBODY, capabilities=(), read_only=True)
    assert run_in_one(node, container, 2, EXCHANGE)["worker0"] == {"worker1": IN_SHARED_MEMORY}


@pytest.mark.field
def test_no_worker_is_lost_on_half_a_processor(node: VirtualHost) -> None:
    with limits(cpus=0.5) as cgroups:
        lanes = run_in_one(node, Container(cgroups=cgroups), 2, EXCHANGE)
    assert lanes["worker0"] == {"worker1": IN_SHARED_MEMORY}


def test_stopping_a_container_ends_the_job_of_the_launcher_in_it(node: VirtualHost) -> None:
    # Process 1 of a container gets only signals that it handles. `docker stop` waits 10 s for it.
    program = "import os, time; os.write(1, b'up\\n'); time.sleep(600)"
    with start(node, Container(), "-m", "torch_ucx_rpc", "run", "-n", "2", "-c", program) as job:
        try:
            assert "up" in job.stdout.readline()
            launcher = descendants(job.pid)[2]
            os.kill(launcher, signal.SIGTERM)
            job.communicate(timeout=10)
        finally:
            job.kill()


# ---- One container for each worker -----------------------------------------------------------------------------------


@pytest.mark.field
# Both workers have pid 1 in their containers, or pids that the other container does not have.
@pytest.mark.parametrize("numbers", [{}, {"init": True, "first_pid": 400}], ids=["same pid", "other pid"])
@pytest.mark.parametrize("ipc", ["private", "host"])
def test_two_containers_of_a_host_reach_each_other_by_tcp(node: VirtualHost, ipc: str, numbers: dict) -> None:
    containers = [(node, Container(ipc=ipc, **numbers)), (node, Container(ipc=ipc))]
    with worker_in_each(containers, EXCHANGE) as programs:
        assert_only_tcp(lanes_of(ends_of(programs)))


@pytest.mark.field
def test_containers_with_one_pid_namespace_share_memory(node: VirtualHost) -> None:
    with worker_in_each([(node, Container(ipc="host", pid="host"))] * 2, EXCHANGE) as programs:
        lanes = lanes_of(ends_of(programs))
    assert lanes == {"worker0": {"worker1": IN_SHARED_MEMORY}, "worker1": {"worker0": IN_SHARED_MEMORY}}


@pytest.mark.field
def test_tensor_between_containers_may_exceed_dev_shm(node: VirtualHost) -> None:
    with worker_in_each([(node, Container(shm_mib=64))] * 2, EXCHANGE, "192") as programs:
        assert_only_tcp(lanes_of(ends_of(programs)))


@pytest.mark.field
def test_containers_need_no_names_that_resolve(node: VirtualHost) -> None:
    containers = [(node, Container(hostname=name)) for name in ("3f2a9c0b11d7", "train-1")]
    with worker_in_each(containers, EXCHANGE) as programs:
        assert_only_tcp(lanes_of(ends_of(programs)))


@pytest.mark.field
# Two workers share the network of the first node (hostNetwork). Each of the two others has the network of another node.
@pytest.mark.parametrize("ipc", ["private", "host"])
def test_pods_with_and_without_hostnetwork_reach_each_other(hosts: VirtualHosts, ipc: str) -> None:
    places = [hosts[0], hosts[0], hosts[1], hosts[2]]
    with worker_in_each([(place, Container(ipc=ipc)) for place in places], EXCHANGE) as programs:
        lanes = lanes_of(ends_of(programs))
    assert len(lanes) == len(places)
    assert_only_tcp(lanes)


@pytest.mark.field
# UCX's shared memory is open to one user only, and UCX does not fall back.
def test_containers_of_several_users_reach_each_other_by_tcp(node: VirtualHost) -> None:
    containers = [(node, Container(ipc="host", pid="host", user=user)) for user in (NOBODY, NOBODY + 1)]
    with worker_in_each(containers, EXCHANGE) as programs:
        assert_only_tcp(lanes_of(ends_of(programs)))


# ---- Beyond the limits -----------------------------------------------------------------------------------------------


@pytest.mark.field
def test_launcher_reports_a_worker_killed_for_its_memory(node: VirtualHost) -> None:
    with limits(memory_mib=1024) as cgroups, job_in_one(node, Container(cgroups=cgroups), 2, LOST_MEMORY) as job:
        [(code, _, errors)] = ends_of([job])
    assert code == 128 + signal.SIGKILL, errors
    assert re.search(r"worker1 \(pid \d+ on n1\) ended with SIGKILL", errors), errors


@pytest.mark.field
# With "host" each worker sees the other's processes. Without pidfd_open it cannot watch them.
@pytest.mark.parametrize("program", [[LOST_MEMORY], [WITHOUT, "pidfd_open", LOST_MEMORY]], ids=["", "no pidfd"])
@pytest.mark.parametrize("sees", ["private", "host"])
def test_worker_killed_for_its_memory_is_lost(node: VirtualHost, sees: str, program: list[str]) -> None:
    with limits(memory_mib=1024) as cgroups:
        containers = [(node, Container(ipc=sees, pid=sees, cgroups=folders)) for folders in ((), cgroups)]
        with worker_in_each(containers, *program) as programs:
            (code, output, errors), (killed, _, last_words) = ends_of(programs)
    assert code == 0, errors
    assert re.search(r"WorkerLost: .*lost worker 'worker1'", output), output
    assert killed == 128 + signal.SIGKILL, last_words
