"""Gradients that travel together: `Bucket`."""

# mypy: allow-untyped-calls

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.futures import Future

from torch_ucx_rpc.reduction._messages import Answer
from torch_ucx_rpc.reduction._plan import Part


class Bucket:
    """Gradients that travel together, flat."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        self.buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        # Where each parameter begins and ends in the buffer.
        self.spans = list(itertools.pairwise(itertools.accumulate((p.numel() for p in parameters), initial=0)))
        self.views = [self.buffer[slice(*span)].view_as(p) for span, p in zip(self.spans, parameters, strict=True)]
        self.parts: list[Part] = []
        self.filled: set[int] = set()
        self.pushes: list[tuple[Part, Future[Answer]]] = []

    def takes_directly(self, index: int) -> bool:
        """Whether the result goes straight into the gradient of a parameter, and not into the buffer first."""
        gradient = self.parameters[index].grad
        return index in self.filled and gradient is not None and gradient.is_contiguous()

    def take(self, part: Part, result: Tensor) -> None:
        """Copy the result of a part into the gradients, or into the buffer for those that are not taken directly."""
        for index, (start, stop) in enumerate(self.spans):
            first, last = max(part.start, start), min(part.stop, stop)
            if first < last:
                target = self.parameters[index].grad if self.takes_directly(index) else self.views[index]
                assert target is not None
                target.view(-1)[first - start : last - start].copy_(result[first - part.start : last - part.start])


def make_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """In the order in which gradients come: from the last parameter on."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        nbytes = parameter.numel() * parameter.element_size()
        last = buckets[-1][0] if buckets else None
        is_alike = last is not None and last.dtype == parameter.dtype and last.device == parameter.device
        if not is_alike or size + nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += nbytes
    return [Bucket(bucket) for bucket in buckets]
