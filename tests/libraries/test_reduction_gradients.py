"""Gradients that `DataParallel` averages: zeros, none at all, in two parts, with a graph, after a failed backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.workers import Steps
from torch_ucx_rpc import reduction

from ._training import are_equal, batches, parameters_of

RunWorkers = Callable[..., list]


class Gated(nn.Module):
    """A model with a branch behind a gate that is closed at the start, and with a part that no trainer uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.common, self.branch, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, uses_branch: bool) -> torch.Tensor:
        y = self.common(x)
        return (y + self.gate * self.branch(x) if uses_branch else y).square().mean()


def test_a_gradient_of_zero_counts_on_all_trainers(run_on_both: RunWorkers, tmp_path: Path) -> None:
    first, second = run_on_both(2, train_a_gated_branch, Steps(tmp_path))
    assert are_equal(first, second)


def train_a_gated_branch(rank: int, steps: Steps) -> list[torch.Tensor]:
    module = Gated()
    model = reduction.DataParallel(module, reduction.serve())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    # The branch has gradients of zero on the first trainer, and none on the second.
    for x in batches(rank, 3):
        optimizer.zero_grad()
        model(x, uses_branch=rank == 0).backward()
        assert module.branch.weight.grad is not None
        assert module.unused.weight.grad is None
        optimizer.step()
    steps.meet("done", rank, 2)
    return parameters_of(module)


def test_a_backward_that_makes_a_graph_is_averaged(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, differentiate_twice, Steps(tmp_path))


def differentiate_twice(rank: int, steps: Steps) -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    model = reduction.DataParallel(module, reduction.serve())
    x = torch.full((1, 1), rank + 1.0)
    for _ in range(2):
        module.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the cycle, which zero_grad() breaks
            model(x).pow(3).sum().backward(create_graph=True)
        # The gradients are 3 x**3 = 3 and 24.
        assert module.weight.grad.item() == 13.5
        assert not model._buckets[0].buffer.requires_grad
    steps.meet("done", rank, 2)


class Checkpointed(nn.Module):
    """A model whose last part is used within reentrant checkpoints, and also after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for _ in range(2):
            y = checkpoint(lambda z: self.last(self.middle(z).tanh()), y, use_reentrant=True)
        return self.last(y).square().mean()


def test_gradients_that_come_in_parts_are_averaged_whole(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, train_checkpointed, Steps(tmp_path))


def train_checkpointed(rank: int, steps: Steps) -> None:
    module, alone = Checkpointed(), Checkpointed()
    model = reduction.DataParallel(module, reduction.serve(), bucket_bytes=1)
    for inputs in zip(batches(0, 3), batches(1, 3), strict=True):
        module.zero_grad()
        alone.zero_grad()
        model(inputs[rank]).backward()
        for x in inputs:
            (alone(x) / 2).backward()
        for own, expected in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own.grad, expected.grad)
    steps.meet("done", rank, 2)


def test_a_second_loss_is_averaged_after_a_failed_one(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, fail_before_a_second_loss, Steps(tmp_path))


def fail_before_a_second_loss(rank: int, steps: Steps) -> None:
    if rank < 2:
        module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        copy = reduction.DataParallel(module, reduction.serve("worker2"), bucket_bytes=1)
        x = torch.full((1, 1), rank + 1.0)
        # Both forwards come before both backwards. The first backward fails after it has put a bucket.
        failing, loss = copy(x).sum(), copy(x).sum()
        if rank == 0:
            handle = module[0].weight.register_hook(fail_by_design)
            with pytest.raises(RuntimeError, match="by design"):
                failing.backward()
            handle.remove()
            module.zero_grad()
        loss.backward()
        assert [parameter.grad.item() for parameter in module.parameters()] == [1.5, 1.5]
    steps.meet("done", rank, 3)


def fail_by_design(_: torch.Tensor) -> None:
    raise RuntimeError("by design")
