"""Checkpoints with DCP's own storages and planners, workers that hang in a save, and torch's DistributedOptimizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.optim import DistributedOptimizer

from tests.support.workers import stopped

from ._jobs import drive, on, processes_of, small_model
from ._pipelines import make_pipe


class WithoutBiases(DefaultSavePlanner):
    """A planner that leaves out some of the state."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        kept = {name: value for name, value in state_dict.get("model", {}).items() if "bias" not in name}
        super().set_up_planner({**state_dict, "model": kept}, storage_meta, is_coordinator)


def save_by_other_storages(folder: str) -> None:
    from torch_ucx_rpc import checkpoint

    url = f"file://{folder}/first"
    pipe, expected = make_pipe(small_model()), small_model().state_dict()
    future = checkpoint.async_save({"model": pipe, "epoch": 3}, storage_writer=FsspecWriter(url), timeout=60)
    future.wait(60)
    assert {one.suffix for one in Path(folder, "first").iterdir()} == {".distcp", ""}

    other, rest = make_pipe(small_model(1), ["worker2", "worker1"], schedule="interleaved"), {"epoch": 0}
    checkpoint.load({"model": other, **rest}, storage_reader=FsspecReader(url), timeout=60)
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())

    # If a storage is given, the path is a place in it.
    url = f"file://{folder}/second"
    checkpoint.save({"model": pipe}, url, storage_writer=FsspecWriter("file:///nowhere"), planner=WithoutBiases())
    third = make_pipe(small_model(2))
    with pytest.raises(checkpoint.CheckpointError, match=r"of another model: Missing key.*bias"):
        checkpoint.load({"model": third}, storage_reader=FsspecReader(url))
    checkpoint.load({"model": third}, f"{folder}/second", planner=DefaultLoadPlanner(allow_partial_load=True))
    for name, value in third.state_dict().items():
        source = small_model(2).state_dict() if "bias" in name else expected
        assert torch.equal(value, source[name]), name
    with pytest.raises(TypeError, match=r"path must be .*got None"):
        checkpoint.save({"model": pipe}, planner=DefaultSavePlanner())


def test_storages_and_planners_of_dcp_are_used(tmp_path, backend):
    drive(save_by_other_storages, 3, str(tmp_path), backend=backend)


def make_linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 3)


def save_beside_a_stopped_worker(folder: str) -> None:
    from torch_ucx_rpc import checkpoint

    state = {
        "one": rpc.remote("worker1", make_linear, args=(1,)),
        "other": rpc.remote("worker2", make_linear, args=(2,)),
    }
    checkpoint.save(state, folder)
    with stopped(processes_of("worker2")):
        for call in (checkpoint.save, checkpoint.load):
            with pytest.raises(checkpoint.CheckpointError, match=r"failed on 'worker2'.*within the timeout"):
                call(state, folder, timeout=0.5)
        rpc._set_rpc_timeout(2)
        for call in (checkpoint.save, checkpoint.load):
            with pytest.raises(checkpoint.CheckpointError, match="failed on 'worker2'"):
                call(state, folder)
        rpc._set_rpc_timeout(60)
    on("worker2", os.getpid)
    checkpoint.load(state, folder)
    checkpoint.save(state, folder, timeout=60)
    del state


def test_a_save_does_not_wait_for_a_worker_that_hangs(tmp_path, backend):
    drive(save_beside_a_stopped_worker, 3, str(tmp_path), backend=backend, silent=False)


def parameters_of(rref: Any) -> list[Any]:
    return [rpc.RRef(one) for one in rref.local_value().parameters()]


def output_of(rref: Any, x: torch.Tensor) -> torch.Tensor:
    return rref.local_value()(x)


class Halves:
    """A model on two workers, and its DistributedOptimizer."""

    def __init__(self, seed: int, kind: Any, **options: Any) -> None:
        owners = ("worker1", "worker2")
        self.rrefs = [rpc.remote(owner, make_linear, args=(seed + place,)) for place, owner in enumerate(owners)]
        self.parameters = [one for rref in self.rrefs for one in on(rref.owner_name(), parameters_of, rref)]
        self.optimizer = DistributedOptimizer(kind, self.parameters, lr=0.1, **options)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            with dist_autograd.context() as context:
                x = torch.linspace(-1, 1, 12).reshape(4, 3)
                for rref in self.rrefs:
                    x = on(rref.owner_name(), output_of, rref, x).tanh()
                loss = x.square().mean()
                losses.append(loss.item())
                dist_autograd.backward(context, [loss])
                self.optimizer.step(context)
        return losses

    def state(self) -> dict[str, Any]:
        return {"first": self.rrefs[0], "second": self.rrefs[1], "optim": self.optimizer}


def go_on_with_a_distributed_optimizer(folder: str) -> None:
    from torch_ucx_rpc import checkpoint

    kinds = [
        (torch.optim.Adam, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        # torch has no TorchScript version of this optimizer.
        (torch.optim.NAdam, {}),
    ]
    for number, (kind, options) in enumerate(kinds):
        for steps_before in (0, 2):
            path = Path(folder, f"{number}-{steps_before}")
            saved, loaded = Halves(0, kind, **options), Halves(5, kind, **options)
            saved.train(2)
            checkpoint.save(saved.state(), path)
            loaded.train(steps_before)
            checkpoint.load(loaded.state(), path)
            assert loaded.train(3) == saved.train(3), (kind, steps_before)


def test_a_distributed_optimizer_goes_on_as_the_saved_one(tmp_path, backend):
    # torch warns of TorchScript, and of optimizers that have no TorchScript version.
    drive(go_on_with_a_distributed_optimizer, 3, str(tmp_path), backend=backend, silent=False)
