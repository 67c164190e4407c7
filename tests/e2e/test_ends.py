"""A worker ends in any way, with calls and large tensors in flight. The others can end too, and shared memory stays
clean."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc as rpc

from tests.support import workers
from tests.support.workers import eventually, reserved_port, run_program
from torch_ucx_rpc.errors import BarrierFailed, WorkerLost

pytestmark = pytest.mark.ucx_only

MIB = 2**20


# ---- Shared memory ---------------------------------------------------------------------------------------------------


def segments_of(pids: Iterable[int]) -> list[str]:
    """Return the System V segments of these processes."""
    _, *segments = Path("/proc/sysvipc/shm").read_text().splitlines()
    # key shmid perms size cpid ...
    return [segment for segment in segments if int(segment.split()[4]) in set(pids)]


def files() -> set[str]:
    return {file.name for file in Path("/dev/shm").iterdir()}


def nobodys_files() -> set[str]:
    """Return the files in ``/dev/shm`` that no process has mapped."""
    found = files()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:
            # The process has just ended, or belongs to another user.
            continue
        found -= {line.rpartition("/dev/shm/")[2] for line in text.splitlines() if "/dev/shm/" in line}
    return found


@pytest.fixture
def assert_clean() -> Callable[[Iterable[int]], None]:
    """Check that these ended processes have left nothing in shared memory."""
    before = files()

    def assert_clean(pids: Iterable[int]) -> None:
        assert segments_of(pids) == []
        # Other processes on this machine may be about to map new files.
        eventually(lambda: nobodys_files() <= before, "no file is left in /dev/shm")

    return assert_clean


# ---- Processes that are ended, or crash ------------------------------------------------------------------------------

WAYS: dict[str, tuple[Callable[[], object], int]] = {
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "SIGSEGV": (lambda: os.kill(os.getpid(), signal.SIGSEGV), -signal.SIGSEGV),
    "abort": (os.abort, -signal.SIGABRT),
    "os._exit": (lambda: os._exit(3), 3),
}


def echo(value: object) -> object:
    return value


def end_in_the_midst(rank: int, way: str, ended: Path) -> list[int]:
    pids = [rpc.rpc_sync(f"worker{peer}", os.getpid) for peer in range(3)]
    assert uses_shared_memory(os.getpid()), "or this tests nothing"
    tensor = torch.zeros(64 * MIB, dtype=torch.uint8)
    others = [f"worker{peer}" for peer in range(3) if peer != rank]
    # Each worker sends 64 MiB twice to each other worker, and gets them back.
    calls = [rpc.rpc_async(name, echo, (value,)) for value in (tensor, tensor, 1) for name in others]
    if rank == 1:
        calls[0].wait()
        ended.touch()
        end, _ = WAYS[way]
        end()
    with pytest.raises(WorkerLost) as raised:
        rpc.rpc_sync("worker1", time.sleep, (60,))
    assert raised.value.name == "worker1"
    # This limit is enough on a busy machine, and much less than UCX itself takes.
    assert time.time() - ended.stat().st_mtime < 10
    with pytest.raises(BarrierFailed) as failed:
        rpc.shutdown()
    assert "lost worker 'worker1'" in str(failed.value.cause)
    assert all(call.done() for call in calls)
    return pids


def uses_shared_memory(pid: int) -> bool:
    maps = Path(f"/proc/{pid}/maps").read_text()
    return "/SYSV" in maps or "ucx_shm_posix" in maps


@pytest.mark.parametrize(
    ("way", "transport"), [*((way, "sysv") for way in WAYS), *((way, "posix") for way in ("SIGKILL", "SIGSEGV"))]
)
def test_crash_leaves_no_hang_and_no_shared_memory(
    way: str, transport: str, tmp_path: Path, assert_clean: Callable[[Iterable[int]], None]
) -> None:
    pids, *_ = workers.run_workers(
        3,
        end_in_the_midst,
        way,
        tmp_path / "ended",
        env={"UCX_TLS": f"{transport},tcp,self"},
        exit_codes={1: WAYS[way][1]},
        shutdown=False,
        silent=False,
    )
    assert_clean(pids)


# ---- Interpreters that end -------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, time
import torch, torch.distributed.rpc as rpc
import torch_ucx_rpc

def end():
    {end}

rank = int(sys.argv[1])
rpc.init_rpc(f"worker{rank}", backend="UCX", rank=rank, world_size=3)
tensor = torch.zeros(64 << 20, dtype=torch.uint8)
open(os.path.join(os.environ["PIDS"], str(os.getpid())), "w").close()
peers = [peer for peer in range(3) if peer != rank]
calls = [rpc.rpc_async(peer, torch.neg, (value,)) for value in (tensor, tensor, tensor[:9]) for peer in peers]
if rank == 1:
    calls[0].wait()
    end()
else:
    rpc.rpc_sync(1, time.sleep, (60,))
"""


@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        pytest.param("sys.exit(3)", 3, id="sys.exit"),
        pytest.param("raise ValueError('enough')", 1, id="an exception in the main thread"),
        pytest.param("rpc.shutdown(graceful=False)", 0, id="an ungraceful shutdown"),
    ],
)
def test_early_leave_causes_no_hang_and_leaves_no_shared_memory(
    end: str, exit_code: int, tmp_path: Path, assert_clean: Callable[[Iterable[int]], None]
) -> None:
    with reserved_port() as port:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PIDS": str(tmp_path)}
        ended = run_program(PROGRAM.replace("{end}", end), ranks=range(3), env=env)
    assert ended[1].returncode == exit_code, ended[1].stderr
    for other in (ended[0], ended[2]):
        assert other.returncode == 1
        assert other.stderr.endswith("has shut down its RPC agent\n"), other.stderr
        assert "torch_ucx_rpc.errors.WorkerLeft: worker 'worker1'" in other.stderr
    assert_clean(int(file.name) for file in tmp_path.iterdir())
