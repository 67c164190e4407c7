"""Processes forked from a worker are not workers, and do not harm it."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from torch.utils.data import DataLoader, Dataset

from tests.support.workers import agent, backend_options, in_every_worker, in_worker0, init_rpc
from torch_ucx_rpc import Statistics, statistics
from torch_ucx_rpc._observe import socket as observers

pytestmark = pytest.mark.ucx_only

REFUSED = "cannot be used in a process that was forked from worker 'worker0'"


def in_forked_child(call: Callable[[], object]) -> str:
    """Return the error that ``call`` raises in a child, or "no error"."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # A child that hangs writes its stack, and ends.
        faulthandler.dump_traceback_later(20, exit=True)
        try:
            call()
            text = "no error"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as result:
        text = result.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return text


@in_worker0(of=2)
def test_rpc_in_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    rref = rpc.remote("worker1", torch.add, (torch.ones(2), 1))
    future = rpc.rpc_async("worker1", torch.add, (torch.ones(2), 1))
    uses: dict[str, Callable[[], Any]] = {
        "rpc_sync": lambda: rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1)),
        "rpc_async": lambda: rpc.rpc_async("worker1", torch.add, (torch.ones(2), 1)),
        "remote": lambda: rpc.remote("worker1", torch.add, (torch.ones(2), 1)),
        "to_here": rref.to_here,
        "a call to oneself": lambda: rpc.rpc_sync("worker0", torch.add, (torch.ones(2), 1)),
        "metrics": lambda: agent().get_metrics(),
        "lanes": lambda: agent().get_debug_info(),
        "statistics": statistics,
        "shutdown": rpc.shutdown,
        "an ungraceful shutdown": lambda: rpc.shutdown(graceful=False),
        "init_rpc": lambda: rpc.init_rpc("again", backend="UCX", rank=0, world_size=2),
    }
    for name, use in uses.items():
        text = in_forked_child(use)
        assert text.startswith("ForkedProcess: "), text
        assert REFUSED in text, name
        assert rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1)).tolist() == [2, 2], name
    assert future.wait().tolist() == [2, 2]
    assert rref.to_here().tolist() == [2, 2]


@in_worker0(of=2)
def test_a_forked_child_may_end_in_any_way() -> None:
    rref = rpc.remote("worker1", torch.add, (torch.ones(2), 1))
    received = rpc.rpc_sync("worker1", torch.ones, ([2**20],))

    def end_as_python_does() -> None:
        # Delete the reference, release the received memory, and run exit handlers.
        nonlocal received, rref
        rref = received = None

    context = multiprocessing.get_context("fork")
    child = context.Process(target=end_as_python_does)
    child.start()
    child.join(20)
    assert child.exitcode == 0
    # The child ends like a program: with the exit handlers of Python, then of C and C++.
    if (pid := os.fork()) == 0:
        end_as_python_does()
        atexit._run_exitfuncs()
        ctypes.CDLL(None).exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert rref.to_here().tolist() == [2, 2]
    assert received.sum() == 2**20


def forked() -> int:
    """Return the pid of an idle child that has run the package's fork handlers."""
    is_there, tells = os.pipe()
    if (child := os.fork()) == 0:
        os.write(tells, b".")
        signal.pause()
    os.close(tells)
    assert os.read(is_there, 1) == b"."
    os.close(is_there)
    return child


@in_every_worker(of=1, init=False)
def test_forked_child_keeps_no_listening_socket_of_its_parent(rank: int) -> None:
    init_rpc(rank, rpc_backend_options=backend_options(prometheus_port=0))
    port = statistics().prometheus_port
    child = forked()
    try:
        rpc.shutdown()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        assert os.getpid() not in [found.pid for found in observers.workers_of_this_host()]
    finally:
        os.kill(child, signal.SIGKILL)


@in_every_worker(of=1)
def test_child_forked_during_an_answer_does_not_delay_the_answer(rank: int) -> None:
    children = []

    def fork_and_answer() -> Statistics:
        children.append(forked())
        return statistics()

    observed = observers.Observed(fork_and_answer)
    try:
        address = observed._socket.getsockname().decode()
        [own] = [found for found in observers.workers_of_this_host() if observers._address(found.name) == address]
        assert own.ask()[0].name == "worker0"
    finally:
        observed.close()
        for child in children:
            os.kill(child, signal.SIGKILL)


class Squares(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index**2)


def load_data() -> list[int]:
    # A program's default is "fork". A process of a fork server, like this one, would use "forkserver".
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create 2 worker processes")  # on one core
        loader = DataLoader(Squares(), batch_size=8, num_workers=2, multiprocessing_context="fork")
        return [number for batch in loader for number in batch.tolist()]


@in_worker0(of=2)
def test_data_loader_processes_work_in_workers_and_handlers() -> None:
    expected = [n**2 for n in range(64)]
    assert load_data() == expected
    assert rpc.rpc_sync("worker1", load_data) == expected
    assert rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
