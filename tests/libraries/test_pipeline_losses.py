"""Values that cannot travel: they fail a call, but lose no worker."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from ._jobs import drive
from ._pipelines import make_pipe


class OnlyHere:
    """A value whose module only this process has."""


def define_only_here() -> None:
    module = types.ModuleType("only_here")
    OnlyHere.__module__ = "only_here"
    module.OnlyHere = OnlyHere  # type: ignore[attr-defined]
    sys.modules["only_here"] = module


class GivesWhatStays(nn.Module):
    """A module that also returns an unpicklable value if a value of its input exceeds 100."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, more: Any = None) -> Any:
        y = self.inner(x)
        return (y, lambda: y) if (x > 100).any() else y


def give_what_a_worker_cannot_take(folder: str) -> None:
    from torch_ucx_rpc.pipeline import StageError

    define_only_here()
    pipe = make_pipe([nn.Linear(8, 8), GivesWhatStays()], spares=["worker3"])
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    pipe.save(folder)
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    good = pipe.step(x, target=y)
    pipe.zero_grad()
    wrong = [
        (r"worker 'worker1' .*only_here", lambda: pipe.step(OnlyHere(), target=y)),
        (r"worker 'worker2' .*only_here", lambda: pipe.step(x, target=OnlyHere())),
        (r"worker 'worker2' .*pickle", lambda: pipe.eval()(torch.full((8, 8), 1e4))),
    ]
    for words, call in wrong:
        with torch.no_grad(), pytest.raises(StageError, match=f"(?s){words}"):
            call()
        # Both workers still live, and do the next step.
        assert pipe.workers == ["worker1", "worker2"]
        pipe.train()
        assert torch.equal(pipe.step(x, target=y), good)
        optimizer.zero_grad()


def test_unpicklable_orders_and_answers_lose_no_worker(tmp_path, backend):
    # torch writes a worker's unpickling errors to stderr.
    drive(give_what_a_worker_cannot_take, 4, str(tmp_path), backend=backend, silent=False)


class GivesWhatCannotTravel(nn.Module):
    """A module that returns a tensor without values beside its output."""

    def forward(self, x: torch.Tensor) -> Any:
        return x, torch.empty(2, device="meta")


def give_another_stage_what_cannot_travel() -> None:
    from torch_ucx_rpc.pipeline import StageError

    pipe = make_pipe([GivesWhatCannotTravel(), nn.Identity()])
    with pytest.raises(StageError, match=r"(?s)stage 0 on worker 'worker1' failed in the forward.*meta") as raised:
        pipe(torch.randn(8, 8))
    assert raised.value.stage == 0


def test_a_value_that_cannot_be_sent_is_an_error_of_its_stage(backend):
    drive(give_another_stage_what_cannot_travel, 3, backend=backend, silent=False)
