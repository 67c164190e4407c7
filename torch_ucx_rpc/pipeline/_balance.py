"""Stages that take equally long: the layers' times (`timed`), and how many go into each stage (`balanced`)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from torch_ucx_rpc.pipeline._errors import PipelineError

__all__ = ["balanced", "timed"]


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


def timed(
    model: nn.Module, blocks: Iterable[tuple[str, nn.Module]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, float]]:
    """Run a forward of the model. Returns name and seconds of each block in the order in which they run. The model
    stays as it is."""
    began: dict[str, float] = {}
    found: list[tuple[str, float]] = []
    hooks = []
    for name, block in blocks:

        def begin(*_: Any, name: str = name) -> None:
            began[name] = time.perf_counter()

        def end(*_: Any, name: str = name) -> None:
            found.append((name, time.perf_counter() - began[name]))

        hooks += [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]
    state = {name: value.clone() for name, value in model.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            # The first run allocates memory, which takes time.
            model(*args, **kwargs)
            found.clear()
            model(*args, **kwargs)
    except Exception as error:
        raise PipelineError(
            f"the model raised when it ran on the sample: {type(error).__name__}: {error}. Give as sample= a batch "
            f"such as step() will get."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for name, value in model.named_buffers():
                value.copy_(state[name])
    return found
