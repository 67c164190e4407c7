"""Groups that outlive their Store: it ends with the process of rank 0, or its file is deleted."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch.distributed.rpc as rpc
from torch.distributed import TCPStore

from tests.support import workers
from tests.support.workers import Stalls, Steps, backend_options, eventually, init_rpc
from torch_ucx_rpc.errors import JoinTimedOut

from ._failures import is_lost
from .test_dynamic_groups import RunWorkers, assert_answers, join, present, rpc_pid_of

pytestmark = pytest.mark.ucx_only


def test_worker_joins_by_a_file_without_rank_0(run_workers: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    run_workers(3, join_without_rank_0, Steps(tmp_path), url, {}, init=False, exit_codes={0: 0})


def test_worker_joins_by_a_launchers_store_without_rank_0(run_workers: RunWorkers, tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    run_workers(3, join_without_rank_0, Steps(tmp_path), "env://", environment, init=False, exit_codes={0: 0})


def join_without_rank_0(rank: int, steps: Steps, url: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    options = backend_options(init_method=url)
    if rank == 2:
        steps.wait_for("alone 1")
    join(rank, rpc_backend_options=options)
    steps.done(f"joined {rank}")
    steps.wait_for("joined 0", "joined 1")
    if rank == 0:
        rpc.shutdown()
        os._exit(0)
    if rank == 1:
        eventually(lambda: present() == {"worker1"}, "worker0 has left")
        steps.done("alone 1")
    steps.wait_for("joined 2")
    assert present() == {"worker1", "worker2"}
    assert_answers(3 - rank)
    steps.done(f"called {rank}")
    steps.wait_for("called 1", "called 2")
    rpc.shutdown()


def test_joining_without_rank_0s_store_is_a_clear_error(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(2, join_without_store, Steps(tmp_path), init=False, exit_codes={0: 0})


def somebody_listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:
        pass  # the server's process was ending
    return True


def join_without_store(rank: int, steps: Steps) -> None:
    if rank == 0:
        join(0)
        rpc.shutdown()
        steps.done("left")
        os._exit(0)
    steps.wait_for("left")
    eventually(lambda: not somebody_listens(int(os.environ["MASTER_PORT"])), "the Store has ended with worker0")
    with pytest.raises(JoinTimedOut, match=r"(?s)no server listens.*ends with the process of rank 0.*file:///path"):
        join(1, rpc_backend_options=backend_options(init_timeout=1))


@pytest.mark.parametrize("world_size", [None, 2])
def test_no_worker_waits_for_a_deleted_file_of_the_store(tmp_path: Path, world_size: int | None) -> None:
    arguments = (Steps(tmp_path), tmp_path / "job", world_size)
    workers.run_workers(2, leave_without_file, *arguments, init=False, expendable={1}, silent=False)


def leave_without_file(rank: int, steps: Steps, job: Path, world_size: int | None) -> None:
    job.mkdir(exist_ok=True)
    init_rpc(rank, world_size=world_size, rpc_backend_options=backend_options(init_method=(job / "store").as_uri()))
    steps.done(f"joined {rank}")
    steps.wait_for("joined 0", "joined 1")
    if rank == 1:
        steps.wait_for("never")
    # A program that keeps the file in a TemporaryDirectory does this when it ends with an error.
    shutil.rmtree(job)
    with Stalls() as stalls:
        os.kill(rpc_pid_of(1), signal.SIGKILL)
        began = time.monotonic()
        eventually(lambda: is_lost("worker1"), "the death of worker1 is noticed")
        rpc.shutdown(graceful=False)
        # Each attempt to open the file may take five seconds.
        assert time.monotonic() - began < 20 + stalls.seconds()
