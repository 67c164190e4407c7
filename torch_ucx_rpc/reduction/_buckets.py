"""Gradients that travel together: `Bucket`."""

# mypy: allow-untyped-calls

from __future__ import annotations

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
        self.views = self.views_of(self.buffer)
        self.parts: list[Part] = []
        self.filled: set[int] = set()
        self.pushes: list[tuple[Part, Future[Answer]]] = []

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The part of each parameter in a tensor such as the buffer."""
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]


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
