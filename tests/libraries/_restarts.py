"""Trainers that join and train until a step that one of them names, and hosts that answer in part."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from tests.support.workers import Steps, backend_options, init_rpc
from torch_ucx_rpc import reduction
from torch_ucx_rpc.reduction import _piece


def enter(url: str, rank: int) -> None:
    """Join the group, as worker0, worker1, ..."""
    init_rpc(rank, name=f"worker{rank}", world_size=None, rpc_backend_options=backend_options(init_method=url))


class Trainer:
    """A copy of a model in training, with batches that differ from trainer to trainer."""

    def __init__(self, server: reduction.Server, seed: int) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.5)
        self.server = server
        self.model = reduction.DataParallel(self.module, server, optimizer=self.optimizer, bucket_bytes=1 << 10)
        self._draw = torch.Generator().manual_seed(seed)

    @property
    def step(self) -> int:
        return self.server.positions.get("model0/0/0", 0)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            x = torch.randn(16, 8, generator=self._draw)
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), x.sum(1, keepdim=True)).backward()
            self.optimizer.step()

    def train_until(self, steps: Steps, file: str) -> list[torch.Tensor]:
        """Train to the step that the file names, which appears on the way. Return the parameters."""
        last = None
        while last is None or self.step < last:
            self.train()
            if last is None and steps.is_done(file):
                last = int((steps.directory / file).read_text())
                assert self.step <= last
        assert self.step == last
        return [parameter.detach().clone() for parameter in self.module.parameters()]

    def say_until(self, steps: Steps, file: str, more: int = 20) -> None:
        """Make all train ``steps`` steps more. The others cannot be further: they wait for this trainer."""
        part = steps.directory / f"{file}.part"
        part.write_text(str(self.step + more))
        part.rename(steps.directory / file)


def are_equal(*trained: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for other in trained[1:] for a, b in zip(trained[0], other, strict=True))


def answer_only(name: str) -> None:
    """Make this host answer one trainer, and no other."""
    publish = _piece.Piece._publish

    def answer_one(piece: _piece.Piece, round_: Any, result: list[torch.Tensor]) -> None:
        for coming in round_.came.values():
            if coming.trainer.name != name:
                coming.future = torch.futures.Future()
        publish(piece, round_, result)

    _piece.Piece._publish = answer_one  # type: ignore[method-assign]
