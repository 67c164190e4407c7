"""A process is stopped while it writes into a worker's shared memory. The others still reach the worker."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc as rpc

from tests.support import workers
from tests.support.workers import Stalls, agent, eventually, stop

from ._failures import DEATH_OF_WORKER1, echo, leave_ungracefully_after, let_go, stay

pytestmark = pytest.mark.ucx_only

# This code sets a byte after itself, and then loops for ever: mov byte ptr [rip + 57], 1; jmp $
CIRCLE = bytes.fromhex("c6053900000001ebfe")
REACHED = 64


def write_into_nothing(to: str, folder: Path) -> None:
    """Send a partly unreadable tensor: where it becomes unreadable, a signal handler makes the copying thread loop for
    ever."""
    prot = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    with (folder / "circle").open("r+b") as file:
        code = mmap.mmap(file.fileno(), 0, prot=prot)
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGBUS, address)
    size = 8 << 20
    tensor = torch.from_file(str(folder / "gone"), shared=True, size=size, dtype=torch.uint8)
    os.truncate(folder / "gone", size // 2)
    rpc.rpc_sync(to, echo, (tensor,))


def be_deaf_to_a_neighbour(rank: int, folder: Path) -> None:
    if rank != 0:
        stay()
        return
    assert rpc.rpc_sync("worker2", echo, (1,)) == 1
    assert not any("tcp" in lane for lane in lanes_to("worker2"))
    pid = rpc.rpc_sync("worker1", os.getpid)
    circle = folder / "circle"
    circle.write_bytes(CIRCLE.ljust(mmap.PAGESIZE, b"\0"))
    rpc.rpc_async("worker1", write_into_nothing, ("worker0", folder))
    # Stop it at once: after 50 ms the thread would count as running, not as copying.
    with circle.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as seen:
        while seen[REACHED] == 0:
            pass
    stop(pid)

    def is_answered() -> bool:
        try:
            return rpc.rpc_sync("worker2", echo, (2,), timeout=0.5) == 2
        except RuntimeError:
            return False

    with Stalls() as stalls:
        stopped = time.monotonic()
        eventually(is_answered, "worker2 is heard over the network")
        # The move to the network takes at most two seconds. The first messages and an unanswered question take the
        # rest.
        assert time.monotonic() - stopped < 4 + stalls.seconds()
    assert all(lane.startswith("tcp/") for lane in lanes_to("worker2"))
    for number in range(100):
        assert rpc.rpc_sync("worker2", echo, (number,)) == number
    big = torch.arange(1 << 20)
    assert torch.equal(rpc.rpc_sync("worker2", echo, (big,)), big)
    os.kill(pid, signal.SIGKILL)
    for number in range(100):
        assert rpc.rpc_sync("worker2", echo, (number,)) == number
    rpc.rpc_sync("worker2", let_go)


def lanes_to(name: str) -> list[str]:
    return agent().get_debug_info()[f"lanes.{name}"].split(",")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the circle is x86-64's")
def test_worker_blocked_by_a_stopped_writer_is_still_reached(tmp_path: Path) -> None:
    # With this limit the queue is examined only after the writer has been stopped.
    options = {"heartbeat_limit": 60}
    body = leave_ungracefully_after(be_deaf_to_a_neighbour)
    workers.run_workers(3, body, tmp_path, options=options, **DEATH_OF_WORKER1)
