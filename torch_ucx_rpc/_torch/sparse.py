"""Sparse tensors in compressed layouts (CSR, CSC, BSR, BSC) as results of Python functions.

The agent sends them like any other tensor. But after a Python function has returned, torch asks every tensor of the
answer for its storage (``Message::getStorages``, torch 2.13). These tensors have none. So torch's RPC pickler replaces
them by their parts, which have storages.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_ucx_rpc._native import _C

_COLUMN_COMPRESSED = frozenset({torch.sparse_csc, torch.sparse_bsc})
COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_bsr}) | _COLUMN_COMPRESSED


def reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Reducer for pickle: builds ``tensor``, of a compressed layout, from strided tensors."""
    with _C.OutsideModes():
        if tensor.layout in _COLUMN_COMPRESSED:
            compressed, plain = tensor.ccol_indices(), tensor.row_indices()
        else:
            compressed, plain = tensor.crow_indices(), tensor.col_indices()
        values = tensor.detach().values()
    return _build, (compressed, plain, values, tuple(tensor.shape), tensor.layout, tensor.requires_grad)


def _build(
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    size: tuple[int, ...],
    layout: torch.layout,
    requires_grad: bool,
) -> torch.Tensor:
    with _C.OutsideModes():
        return torch.sparse_compressed_tensor(
            compressed, plain, values, size, layout=layout, requires_grad=requires_grad, check_invariants=True
        )
