"""``init_rpc()`` without arguments, in processes. Tests with real launchers are in ``launchers/``."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

import torch_ucx_rpc
from tests.support import workers
from tests.support.workers import keep_process_group, run_program, run_workers
from torch_ucx_rpc._options import UcxRpcBackendOptions

# ---- Beside a process group ------------------------------------------------------------------------------------------


def call_next(rank: int) -> float:
    names = [workers.worker_name(0), workers.worker_name(1)]
    return rpc.rpc_sync(names[1 - rank], torch.add, args=(torch.ones(1), rank)).item()


def join_after_process_group(rank: int, with_variables: bool) -> float:
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if with_variables:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        dist.init_process_group("gloo")
    else:
        # A program may have these variables from elsewhere.
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=2)
    keep_process_group()
    torch_ucx_rpc.init_rpc()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), float(rank))).sum().backward()
    # The mean of 0 and 1 shows that DDP has reduced.
    assert model.module.weight.grad.item() == 0.5
    sum_ = call_next(rank)
    rpc.shutdown()
    dist.destroy_process_group()
    return sum_


@pytest.mark.parametrize("with_variables", [True, False], ids=["variables", "process group alone"])
def test_init_rpc_works_after_init_process_group_beside_ddp(with_variables: bool) -> None:
    assert run_workers(2, join_after_process_group, with_variables, init=False, silent=False) == [1.0, 2.0]


def join_twice(rank: int) -> list[float]:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    results = []
    for _ in range(2):
        torch_ucx_rpc.init_rpc(rpc_backend_options=UcxRpcBackendOptions(num_worker_threads=2))
        results.append(call_next(rank))
        rpc.shutdown()
    return results


def test_init_rpc_can_be_called_again_after_shutdown() -> None:
    assert run_workers(2, join_twice, init=False) == [[1.0, 1.0], [2.0, 2.0]]


def test_the_error_without_a_launcher_comes_last() -> None:
    environ = dict.fromkeys(("RANK", "WORLD_SIZE"), "")
    [ended] = run_program("import torch_ucx_rpc; torch_ucx_rpc.init_rpc()", env=environ)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("torch_ucx_rpc.errors.JoinFailed: init_rpc() finds no source of")
