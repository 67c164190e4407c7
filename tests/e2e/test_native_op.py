"""Operators that numba compiles: without numba, and on a worker whose Python is busy."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc as rpc

from tests.support.workers import run_program, run_workers
from tests.unit.test_native_op import update


def test_without_numba_the_error_says_so() -> None:
    (done,) = run_program("""
        import sys
        sys.modules["numba"] = None
        import torch_ucx_rpc
        try:
            torch_ucx_rpc.native_op("ns::op(Tensor self) -> ()")(lambda self: None)
        except ImportError as error:
            print(error)
    """)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("native_op compiles with numba, which cannot be imported (")
    assert done.stdout.endswith("pip install numba\n")


def read_one_byte_without_releasing_the_gil(fifo: str) -> None:
    file = os.open(fifo, os.O_RDONLY)
    # PyDLL holds the GIL during calls.
    assert ctypes.PyDLL(None).read(file, ctypes.create_string_buffer(1), 1) == 1
    os.close(file)


def update_while_python_is_busy(rank: int, fifo: str) -> None:
    if rank != 0:
        return
    parameter = rpc.remote("worker1", torch.zeros, args=([5],))
    # Compiles, which takes the GIL.
    assert rpc.rpc_sync("worker1", update, args=(parameter, torch.ones(5))) == 2
    busy = rpc.rpc_async("worker1", read_one_byte_without_releasing_the_gil, args=(fifo,))
    # Opening the pipe waits for the reader. From then on the reader holds the GIL.
    file = os.open(fifo, os.O_WRONLY)
    for n in range(2, 102):
        assert rpc.rpc_sync("worker1", update, args=(parameter, torch.ones(5)), timeout=20) == 2 * n
    assert not busy.done()
    os.write(file, b"x")
    busy.wait()
    with pytest.raises(RuntimeError, match="ValueError: shapes differ"):
        rpc.rpc_sync("worker1", update, args=(parameter, torch.ones(6)))
    with pytest.raises(RuntimeError, match=r"numba has no torch.float16"):
        rpc.rpc_sync("worker1", update, args=(parameter, torch.ones(5, dtype=torch.float16)))


def test_an_operator_runs_on_a_worker_whose_python_is_busy(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    run_workers(2, update_while_python_is_busy, str(fifo))
