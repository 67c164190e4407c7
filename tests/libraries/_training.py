"""Small models of the reduction tests, and their training."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from tests.support.workers import backend_options, init_rpc, keep_process_group
from torch_ucx_rpc import reduction

SGD = functools.partial(torch.optim.SGD, lr=0.1)


@contextlib.contextmanager
def process_group(rank: int, size: int, path: Path) -> Iterator[None]:
    """Make torch's process group on gloo, of ``size`` workers, for the block."""
    dist.init_process_group("gloo", init_method=(path / "group").as_uri(), rank=rank, world_size=size)
    keep_process_group()
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_model(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def batches(rank: int, steps: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield torch.randn(16, 8, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> list[float]:
    losses = []
    for x in batches(rank, steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def step_of(server: reduction.Server) -> int:
    """Return the number of steps of a server's first model."""
    return server.positions.get("model0", 0)


def enter(url: str, rank: int) -> None:
    """Join the group without a size that meets at ``url``."""
    init_rpc(rank, name=f"worker{rank}", world_size=None, rpc_backend_options=backend_options(init_method=url))
