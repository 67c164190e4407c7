"""Stages that take equally long: the layers' times (`profile`), and how many go into each stage (`balanced`)."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torch_ucx_rpc.pipeline._errors import PipelineError
from torch_ucx_rpc.pipeline._values import tensors_of

__all__ = ["balanced", "profile"]


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Return how many neighbours of ``costs`` go into each stage so that the dearest stage is as cheap as can be.

    Dynamic programming finds the exact optimum; among equals the sum of squares decides, so that the other stages are
    even too.
    """
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
    for stage in range(1, stages + 1):
        row: dict[int, tuple[float, float, int]] = {}
        for end in range(stage, count - (stages - stage) + 1):
            row[end] = min(
                (max(top, sums[end] - sums[begin]), squares + (sums[end] - sums[begin]) ** 2, begin)
                for begin, (top, squares, _) in best[-1].items()
                if begin < end
            )
        best.append(row)
    counts: list[int] = []
    end = count
    for row in reversed(best[1:]):
        begin = row[end][2]
        counts.append(end - begin)
        end = begin
    return counts[::-1]


def profile(layers: Sequence[nn.Module], args: tuple[Any, ...], repeats: int = 3) -> list[float]:
    """Time a forward and backward of each layer in turn: the median of ``repeats``, in seconds. The layers stay as they
    are."""
    times = []
    values: Any = args
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for place, layer in enumerate(layers):
            try:
                # Statistics and gradients change in the copy only.
                seconds, values = _measure(copy.deepcopy(layer), values, repeats)
            except Exception as error:
                raise PipelineError(
                    f"layer {place} ({type(layer).__name__}) raised when it was profiled on the sample: {error}. Give "
                    f"as sample= a batch such as step() will get."
                ) from error
            times.append(seconds)
    return times


def _measure(layer: nn.Module, args: tuple[Any, ...], repeats: int) -> tuple[float, tuple[Any, ...]]:
    durations = []
    output: Any = None
    for _ in range(repeats + 1):
        inputs = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda one: one.detach().requires_grad_(one.is_floating_point()), args
        )
        begin = time.perf_counter()
        output = layer(*inputs)
        wanting = [one for one in tensors_of(output) if one.requires_grad]
        if wanting:
            torch.autograd.backward(wanting, [torch.ones_like(one) for one in wanting])
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations[1:]), (output,)
