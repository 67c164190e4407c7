"""What does a step of distributed autograd cost?

A parameter server (a layer on worker1, its loss on worker0) and a pipeline (a layer on each of worker1 and worker2,
micro-batches through both): forward, backward and DistributedOptimizer.step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure

STEPS = 60
BATCH, WIDTH = 32, 64
MICRO_BATCHES = 4


class Linear(nn.Module):
    """The common part of `Layer` and `Stage`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def parameter_rrefs(self) -> list[rpc.RRef[torch.Tensor]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Layer(Linear):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(batch))


class Stage(Linear):
    """Fetches its input from its owner, as in PyTorch's pipeline tutorial."""

    def forward(self, batch: rpc.RRef[torch.Tensor]) -> torch.Tensor:
        return torch.relu(self.linear(batch.to_here()))


def step_us(forward: Callable[[torch.Tensor], torch.Tensor], layers: Sequence[rpc.RRef[Linear]]) -> float:
    parameters = [parameter for layer in layers for parameter in layer.rpc_sync().parameter_rrefs()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.01)
    batch, target = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

    def step() -> None:
        with dist_autograd.context() as context:
            loss = nn.functional.mse_loss(forward(batch), target)
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]  # not in torch's __all__
            optimizer.step(context)

    for _ in range(5):
        step()
    return harness.p50(harness.durations_us(step, STEPS))


def parameter_server() -> float:
    layer = rpc.remote("worker1", Layer)
    return step_us(lambda batch: layer.rpc_sync().forward(batch), [layer])


def pipeline() -> float:
    first, second = rpc.remote("worker1", Stage), rpc.remote("worker2", Stage)

    def forward(batch: torch.Tensor) -> torch.Tensor:
        outputs = []
        for part in batch.split(BATCH // MICRO_BATCHES):
            hidden = first.remote().forward(rpc.RRef(part))
            outputs.append(second.rpc_async().forward(hidden))
        return torch.cat(torch.futures.wait_all(outputs))

    return step_us(forward, [first, second])


def _benchmark(name: str, step: Callable[[], float], workers: int) -> harness.Benchmark:
    figure = f"{name}, a step"
    return harness.Benchmark(
        question="What does a step of distributed autograd cost?",
        figures=(Figure(figure, "us", (Bound(0.6, 0.4),)),),
        rounds=15,  # the rounds differ much, and are short
        contenders=lambda: [
            jobs.RpcJob(transport, functools.partial(_measure, figure, step), workers=workers)
            for transport in jobs.ON_ONE_HOST
        ],
    )


def _measure(figure: str, step: Callable[[], float]) -> harness.Figures:
    return {figure: step()}


PARAMETER_SERVER = _benchmark("parameter server", parameter_server, workers=2)
PIPELINE = _benchmark("pipeline", pipeline, workers=3)
