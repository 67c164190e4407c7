"""A worker without memory or files goes on, and fails only the calls that need these, with the reason."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc as rpc

from tests.support import workers
from tests.support.labs import VirtualHosts, needs_virtual_hosts
from tests.support.workers import eventually, init_rpc
from torch_ucx_rpc.errors import JoinFailed, OutOfResources

pytestmark = pytest.mark.ucx_only

MIB = 1 << 20


def limit_memory(mib: int | None) -> None:
    """Limit the address space that this process may still take; None removes the limit."""
    gc.collect()
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if mib is None else now + mib * MIB, most))


def ones(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4)


def total(tensor: torch.Tensor) -> float:
    return float(tensor.double().sum())


def call_short_of_memory(rank: int) -> None:
    if rank != 0:
        return
    large, small = ones(400), ones(1)
    rpc.rpc_sync("worker1", limit_memory, args=(200,))
    with pytest.raises(OutOfResources, match="out of memory for a message of 419430400") as raised:
        rpc.rpc_sync("worker1", torch.numel, args=(large,))
    assert (raised.value.name, raised.value.resource) == ("worker1", "memory")
    for _ in range(3):
        assert rpc.rpc_sync("worker1", total, args=(small,)) == small.numel()
    rpc.rpc_sync("worker1", limit_memory, args=(None,))
    assert rpc.rpc_sync("worker1", torch.numel, args=(large,)) == large.numel()

    limit_memory(200)
    with pytest.raises(OutOfResources, match=r"the answer of worker .* out of memory for a message of") as raised:
        rpc.rpc_sync("worker1", ones, args=(400,))
    assert (raised.value.name, raised.value.resource) == ("worker1", "memory")
    assert rpc.rpc_sync("worker1", total, args=(small,)) == small.numel()
    limit_memory(None)
    assert rpc.rpc_sync("worker1", ones, args=(256,)).numel() == 64 * MIB


def test_out_of_memory_fails_one_call_and_names_the_place() -> None:
    workers.run_workers(2, call_short_of_memory)


def limit_files(more: int | None) -> None:
    """Limit the files that this process may still open; None removes the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if more is None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return
    # The limit applies to numbers of files, so first fill the free lower numbers.
    fillers = []
    highest = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
    while not fillers or fillers[-1] < highest:
        fillers.append(os.open("/dev/null", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1 + more, most))


def call_short_of_files(rank: int) -> None:
    if rank != 0:
        return
    # Workers 0 and 1 are then connected.
    assert rpc.rpc_sync("worker1", divmod, args=(17, 5)) == (3, 2)
    limit_files(2)
    with pytest.raises(OutOfResources) as raised:
        rpc.rpc_sync("worker2", divmod, args=(17, 5))
    assert (raised.value.name, raised.value.resource) == ("worker2", "files")
    assert re.search(r"too many files open .*ulimit -n", str(raised.value.cause))
    assert rpc.rpc_sync("worker1", divmod, args=(17, 5)) == (3, 2)
    limit_files(None)
    assert rpc.rpc_sync("worker2", divmod, args=(17, 5)) == (3, 2)


def test_out_of_files_only_the_call_that_connects_fails() -> None:
    workers.run_workers(3, call_short_of_files, transport=workers.Transport.TCP)


def call_oneself() -> None:
    """Make torch import its modules for calls and answers."""
    assert rpc.rpc_sync(rpc.get_worker_info().name, divmod, args=(17, 5)) == (3, 2)


def call_new_peers_short_of_files(rank: int, more: int) -> None:
    if rank != 0:
        return
    others = [f"worker{other}" for other in range(1, 6)]
    call_oneself()
    limit_files(more)
    calls = [rpc.rpc_async(other, divmod, args=(17, 5)) for other in others]
    if more == 1:
        eventually(lambda: any(call.done() for call in calls), "a call has failed")
    time.sleep(0.05)
    limit_files(None)
    if more == 1:
        with pytest.raises(OutOfResources):
            torch.futures.wait_all(calls)
    for call in calls:
        # Calls made before the limit was lifted may fail.
        with contextlib.suppress(OutOfResources):
            assert call.wait() == (3, 2)
    for other in others:
        assert rpc.rpc_sync(other, divmod, args=(17, 5)) == (3, 2)


# Without the reserve of files, UCX ended the process, or never reached some of the peers again.
@pytest.mark.parametrize("more", [1, 2, 3, 4, 5])
def test_out_of_files_while_connecting_no_peer_is_lost(more: int) -> None:
    workers.run_workers(6, call_new_peers_short_of_files, more, transport=workers.Transport.TCP)


def call_new_peers_on_one_core(rank: int) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    init_rpc(rank, world_size=6)
    call_new_peers_short_of_files(rank, 4)
    rpc.shutdown()


# On one core a thread that waits for UCX's lock spins, so the lock's holder cannot run.
def test_out_of_files_on_one_core_no_peer_is_lost() -> None:
    workers.run_workers(6, call_new_peers_on_one_core, transport=workers.Transport.TCP, init=False, shutdown=False)


def be_called_with_all_files_open(rank: int, steps: workers.Steps) -> None:
    if rank == 0:
        call_oneself()
        steps.done("full")
        limit_files(0)
        steps.wait_for(*(f"calling {peer}" for peer in range(1, 12)))
        time.sleep(1)
        limit_files(None)
    else:
        steps.wait_for("full")
        time.sleep(0.5)
        steps.done(f"calling {rank}")
        assert rpc.rpc_sync("worker0", divmod, args=(17, 5)) == (3, 2)


# Without the reserve of files, UCX closed the port.
def test_a_worker_with_all_files_open_can_be_called_by_new_peers(tmp_path: Path) -> None:
    steps = workers.Steps(tmp_path)
    workers.run_workers(12, be_called_with_all_files_open, steps, transport=workers.Transport.TCP)


def call_with_all_files_open(rank: int) -> None:
    if rank != 0:
        return
    assert rpc.rpc_sync("worker1", divmod, args=(17, 5)) == (3, 2)
    assert workers.agent().get_debug_info()["lanes.worker1"] == "sysv/memory"
    limit_files(0)
    # If UCX's own keepalive were on, it would check twice in this time, 20 s apart.
    for _ in range(45):
        assert rpc.rpc_sync("worker1", divmod, args=(17, 5)) == (3, 2)
        time.sleep(1)
    limit_files(None)


@pytest.mark.field
def test_a_worker_with_all_files_open_keeps_its_neighbours() -> None:
    workers.run_workers(2, call_with_all_files_open, timeout=120)


def count_files_in_reserve(rank: int) -> int:
    workers.init_rpc(rank)
    amid = opened_of("/dev/null")
    rpc.shutdown()
    return amid - opened_of("/dev/null")


def opened_of(name: str) -> int:
    """Return how often this process has a file open."""
    return [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.exists()].count(name)


def test_the_files_in_reserve_are_given_back_at_the_shutdown() -> None:
    # Eight for UCX, and eight for control frames.
    assert workers.run_workers(2, count_files_in_reserve, init=False) == [16, 16]


@pytest.fixture
def host() -> Iterator[VirtualHosts]:
    """One host with its own shared memory."""
    needs_virtual_hosts()
    with VirtualHosts(["small"]) as hosts:
        yield hosts


def call_over_shared_memory(rank: int) -> None:
    if rank == 0:
        for _ in range(3):
            assert rpc.rpc_sync("worker1", total, args=(ones(8),)) == 2 * MIB
        assert workers.agent().get_debug_info()["lanes.worker1"] == "sysv/memory"


def test_with_dev_shm_full_workers_still_share_memory(host: VirtualHosts) -> None:
    # The default size in containers.
    host[0].run(["mount", "-o", "remount,size=64m", "/dev/shm"], check=True)
    full = host[0].run(["sh", "-c", "head --bytes 64M /dev/zero > /dev/shm/full"], capture_output=True, check=False)
    assert full.stderr == b""
    workers.run_workers(2, call_over_shared_memory, hosts=host)


def init_without_shared_memory(rank: int) -> str:
    with pytest.raises(JoinFailed) as error:
        workers.init_rpc(rank)
    # Any other transport would do.
    os.environ["UCX_TLS"] = "tcp,self"
    workers.init_rpc(rank)
    assert rpc.rpc_sync(f"worker{1 - rank}", divmod, args=(17, 5)) == (3, 2)
    rpc.shutdown()
    return str(error.value)


def test_without_shared_memory_init_rpc_names_the_cure(host: VirtualHosts) -> None:
    host[0].run(["sh", "-c", "echo 0 > /proc/sys/kernel/shmmni"], check=True)
    for text in workers.run_workers(2, init_without_shared_memory, init=False, hosts=host):
        assert text.startswith("creating a UCX worker failed: ")
        assert "Check df /dev/shm, ipcs -l -u" in text
