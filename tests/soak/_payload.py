"""Tensors that their receiver can check: `Payload`."""

from __future__ import annotations

import functools
import random
from typing import NamedTuple

import torch

# Most tensors are small. The largest is larger than the workers' receive window.
_SIZES = ((0, 5), (1 << 10, 40), (32 << 10, 20), (1 << 20, 25), (8 << 20, 8), (40 << 20, 2))
_LARGEST = _SIZES[-1][0]
_LARGEST_SPARSE = 1 << 20
_KINDS = ("bytes", "float32", "bfloat16", "every third", "transposed", "COO", "CSR")
_ALIGNMENT = 64
# The number of different beginnings of a tensor of the largest size.
_OFFSETS = 1 << 14


class Payload(NamedTuple):
    """A description of a tensor that is short enough to travel beside it."""

    kind: str
    nbytes: int
    offset: int

    def make(self) -> torch.Tensor:
        raw = _noise()[self.offset : self.offset + self.nbytes]
        if self.kind == "bytes":
            return raw
        if self.kind == "every third":
            return raw[::3]
        rows = raw.view(torch.bfloat16 if self.kind == "bfloat16" else torch.int32)
        if self.kind in ("bfloat16", "float32"):
            return rows.view(rows.dtype if self.kind == "bfloat16" else torch.float32)
        rows = rows.view(4, len(rows) // 4)
        if self.kind == "transposed":
            return rows.t()
        masked = torch.where(rows % 3 == 0, rows, 0)
        return masked.to_sparse() if self.kind == "COO" else masked.to_sparse_csr()

    def differs_from(self, tensor: object) -> str:
        """Return the difference between a tensor and the description, or an empty text."""
        expected = self.make()
        if not isinstance(tensor, torch.Tensor):
            return f"a {type(tensor).__name__}"
        if (tensor.dtype, tensor.layout, tensor.shape) != (expected.dtype, expected.layout, expected.shape):
            return f"{tensor.dtype}, {tensor.layout}, {tuple(tensor.shape)}"
        for mine, other in zip(_parts(expected), _parts(tensor), strict=True):
            if mine.shape != other.shape or not torch.equal(_bits(mine), _bits(other)):
                return "other elements"
        return ""


def any_payload(choice: random.Random, at_most: int = _LARGEST) -> Payload:
    [ceiling] = choice.choices([size for size, _ in _SIZES], [weight for _, weight in _SIZES])
    kind = choice.choice(_KINDS)
    limit = min(ceiling, at_most, _LARGEST_SPARSE if kind in ("COO", "CSR") else _LARGEST)
    nbytes = choice.randint(0, limit // _ALIGNMENT) * _ALIGNMENT
    return Payload(kind, nbytes, choice.randrange(_OFFSETS) * _ALIGNMENT)


@functools.cache
def _noise() -> torch.Tensor:
    """Bytes that are the same in each process and have no period."""
    nbytes = _LARGEST + _OFFSETS * _ALIGNMENT
    words = torch.randint(-(2**63), 2**63 - 1, (nbytes // 8,), generator=torch.Generator().manual_seed(1))
    return words.view(torch.uint8)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout is torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (tensor,)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
