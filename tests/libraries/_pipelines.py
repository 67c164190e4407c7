"""Common parts of the tests of pipelines."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from ._jobs import reference_step


class Failing(nn.Module):
    """A module that raises if a value exceeds 100 in the forward, or is below -100 in the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x > 100).any():
            raise ZeroDivisionError("too much of it")
        if x.requires_grad and (x < -100).any():
            x.register_hook(raise_on_the_way_back)
        return self.inner(x)


def raise_on_the_way_back(gradient: torch.Tensor) -> None:
    raise LookupError("no way back")


class PassOn(nn.Module):
    """The identity, with a parameter to train."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def make_pipe(model: Any, workers: Any = ("worker1", "worker2"), **options: Any) -> Any:
    from torch_ucx_rpc import pipeline

    return pipeline.DistributedPipeline(model, list(workers), **{"loss": F.mse_loss, "chunks": 4, **options})


class Twins:
    """A pipeline and the same model in one process, which are trained in the same way."""

    def __init__(self, pipe: Any, model: nn.Module, optimizer: Any) -> None:
        self._pipe, self._model = pipe, model
        self._optimizers = pipe.optimizer(optimizer, lr=0.1), optimizer(model.parameters(), lr=0.1)

    def step(self, x: torch.Tensor | None = None, y: torch.Tensor | None = None) -> None:
        """Train both on a batch, by default a random one. Their losses are equal bit for bit."""
        x = torch.randn(8, 8) if x is None else x
        y = torch.randn(8, 4) if y is None else y
        assert torch.equal(self._pipe.step(x, target=y), reference_step(self._model, F.mse_loss, 4, x, target=y))
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()


def assert_equal_gradients(pipe: Any, model: nn.Module) -> None:
    found = pipe.gradients()
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert (found[name] is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            assert torch.equal(found[name], parameter.grad), f"{name}: {(found[name] - parameter.grad).abs().max()}"
