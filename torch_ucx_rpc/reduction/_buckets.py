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

    def targets(self) -> list[Tensor]:
        """Where the results go: straight into gradients that lie as the buffer does, else into the buffer."""
        return [
            p.grad if index in self.filled and p.grad is not None and p.grad.is_contiguous() else view
            for index, (p, view) in enumerate(zip(self.parameters, self.views, strict=True))
        ]

    def take(self, part: Part, result: Tensor, targets: list[Tensor]) -> None:
        """Copy the result of a part to where it goes."""
        for (start, stop), target in zip(self.spans, targets, strict=True):
            first, last = max(part.start, start), min(part.stop, stop)
            if first < last:
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
