"""Trainers begin a model: with the state of one of them, with the same parameters, and after a failed attempt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from torch import nn

from tests.support.workers import Steps
from torch_ucx_rpc import reduction

RunWorkers = Callable[..., list]


class Projected(nn.Module):
    """A model with a buffer that no state dict has, one that grows, and a hook that copies its state dict."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("projection", torch.randn(4), persistent=False)
        self.register_buffer("cache", torch.zeros(rank), persistent=False)
        self._register_state_dict_hook(copied_on_the_cpu)


def copied_on_the_cpu(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> dict[str, Any]:
    return {name: value.cpu().clone() for name, value in state.items()}


def test_trainers_begin_with_equal_parameters_and_buffers(run_on_both: RunWorkers, tmp_path: Path) -> None:
    first, second = run_on_both(2, begin_with_other_values, Steps(tmp_path))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def begin_with_other_values(rank: int, steps: Steps) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    module = Projected(rank)
    model = reduction.DataParallel(module, reduction.serve())
    steps.meet("begun", rank, 2)
    del model
    return [module.linear.weight.detach(), module.linear.bias.detach(), module.projection]


def test_trainers_that_freeze_other_parameters_are_refused(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, freeze_other_parameters, Steps(tmp_path))


def freeze_other_parameters(rank: int, steps: Steps) -> None:
    server = reduction.serve()
    # The frozen parts have the same size.
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[0].requires_grad_(rank == 0)
    module[1].requires_grad_(rank == 1)
    if rank == 1:
        with pytest.raises(ValueError, match=r"only this trainer trains '1.weight' and only another .* '0.weight'"):
            reduction.DataParallel(module, server)
        module[0].requires_grad_(True)
        module[1].requires_grad_(False)
    begun = reduction.DataParallel(module, server)
    steps.meet("begun", rank, 2)
    del begun


@pytest.mark.parametrize("way", ["hook", "DataParallel"])
def test_a_trainer_tries_again_if_the_others_come_late(run_on_both: RunWorkers, tmp_path: Path, way: str) -> None:
    run_on_both(2, begin_again, Steps(tmp_path), way)


def begin_again(rank: int, steps: Steps, way: str) -> None:
    server = reduction.serve()

    def begin() -> object:
        return reduction.state(server) if way == "hook" else reduction.DataParallel(nn.Linear(1, 1), server)

    if rank == 0:
        rpc._set_rpc_timeout(2)
        with pytest.raises(RuntimeError, match="it waited for worker1"):
            begin()
        rpc._set_rpc_timeout(60)
        steps.done("failed")
    steps.wait_for("failed", timeout=60)
    begun = begin()
    assert list(server.positions) == ["ddp0" if way == "hook" else "model0"]
    steps.meet("begun", rank, 2)
    del begun
