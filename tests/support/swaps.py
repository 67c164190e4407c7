"""Changes that callers make to a tensor while it travels: it gets other memory, or none. `SWAPS` has all."""

from __future__ import annotations

import torch


def give_other_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(1, dtype=tensor.dtype)


def give_other_storage(tensor: torch.Tensor) -> None:
    tensor.set_()


def grow(tensor: torch.Tensor) -> None:
    tensor.resize_(2 * tensor.numel())


def free_storage(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


SWAPS = (give_other_data, give_other_storage, grow, free_storage)
