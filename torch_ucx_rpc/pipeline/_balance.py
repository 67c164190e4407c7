"""Stages that take equally long: the layers' times (`timed`), and how many go into each stage (`balanced`)."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from torch_ucx_rpc.pipeline._build import restored
from torch_ucx_rpc.pipeline._errors import PipelineError

__all__ = ["balanced", "timed"]


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Return how many consecutive ``costs`` go into each stage, so that the most expensive stage is as cheap as
    possible.

    Dynamic programming finds the exact optimum. Among equally good divisions the one with the smallest sum of squares
    wins, so that the other stages are even too.
    """
    sums = [0.0, *itertools.accumulate(costs)]

    @functools.cache
    def best(end: int, count: int) -> tuple[float, float, tuple[int, ...]]:
        """Divide the first ``end`` costs into ``count`` stages. Returns the highest cost, the sum of squares, and the
        counts."""
        if count == 1:
            return sums[end], sums[end] ** 2, (end,)
        found = []
        for begin in range(count - 1, end):
            top, squares, counts = best(begin, count - 1)
            cost = sums[end] - sums[begin]
            found.append((max(top, cost), squares + cost**2, (*counts, end - begin)))
        return min(found)

    return list(best(len(costs), stages)[2])


def timed(
    model: nn.Module, blocks: Iterable[tuple[str, nn.Module]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, float]]:
    """Run the model's forward twice, and time the second run. Returns name and seconds of each block in the order in
    which they run. The model stays as it is."""
    began: dict[str, float] = {}
    found: list[tuple[str, float]] = []
    hooks = []
    for name, block in blocks:

        def begin(*_: Any, name: str = name) -> None:
            began[name] = time.perf_counter()

        def end(*_: Any, name: str = name) -> None:
            found.append((name, time.perf_counter() - began[name]))

        hooks += [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), restored(model):
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
    return found
