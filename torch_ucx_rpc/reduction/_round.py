"""One round of a piece: the tensors that have come, and their sum.

Sums are made in the order of the trainers' ranks, whatever order they come in. So N trainers get the same bits in every
run. Some trainers' tensors at a time are added, in one pass through memory, and the last pass divides too. A tensor
that has come from another worker takes the sum; it lives in memory of this process.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.futures import Future

from torch_ucx_rpc.reduction._messages import Answer, Push, Trainer


@dataclasses.dataclass
class Coming:
    """The tensors of one trainer in one round."""

    trainer: Trainer
    tensors: list[Tensor]
    is_owned: bool
    future: Future[Answer]
    is_added: bool = False

    def keep_copy(self) -> None:
        """Have tensors of its own, unless they are added, or are being added. The caller holds the lock."""
        if not (self.is_added or self.is_owned):
            self.tensors = [tensor.clone() for tensor in self.tensors]
            self.is_owned = True


class Round:
    """One round of a piece, until it is complete.

    The lock of the host guards it, but for the sum: that belongs to the thread that has set ``is_busy``.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.quorum: int | None = None
        self.came: dict[int, Coming] = {}
        # Whose tensors have come first, and what they were.
        self.first: tuple[Trainer, list[Any]] | None = None
        self.sum: list[Tensor] | None = None
        self.is_sum_owned = False
        self.is_busy = False
        # A thread reads the tensors that have come.
        self.is_adding = False
        # Nobody else's tensors will be in it. Those who come between then and its end wait for the result.
        self.is_closed = False
        self.late: list[Coming] = []
        # Lives of trainers that have pushed a later round: they will not be in this one.
        self.passed_by: set[int] = set()
        self.result: list[Tensor] | None = None
        # Whether other workers were asked for its result, and how many have not answered.
        self.has_asked = False
        self.asked = 0

    def add(self, batch: Sequence[Coming], divisor: int | None) -> None:
        """Add what has come, in that order; with a divisor, it is the last, and the sum becomes the mean."""
        tensors = [coming.tensors for coming in batch]
        owned = [coming.is_owned for coming in batch]
        for coming in batch:
            coming.tensors = []
        if self.sum is not None:
            tensors.insert(0, self.sum)
            owned.insert(0, self.is_sum_owned)
        # Of the first two either may take the sum: addition commutes, to the bit.
        index = owned.index(True) if True in owned[:2] else 0
        total = tensors.pop(index)
        self.is_sum_owned = owned[index]
        if not self.is_sum_owned and (tensors or divisor is not None):
            total = [tensor.clone() for tensor in total]
            self.is_sum_owned = True
        for position, tensor in enumerate(total):
            _add(tensor, [other[position] for other in tensors], divisor)
        self.sum = total


# Elements that are added at a time: few enough to stay in a core's cache until they are divided, and no more than torch
# adds on one thread (at::internal::GRAIN_SIZE). Several would wait for each other after each addition, and where
# trainers share the cores, for the whole time slice of another process. Pieces are added in parallel as it is.
_STEP = 32_768


def _add(total: Tensor, others: Sequence[Tensor], divisor: int | None) -> None:
    """``total += each of others``, then ``/= divisor``, with one pass through memory instead of one for each."""
    is_flat = all(tensor.is_contiguous() for tensor in (total, *others))
    if is_flat and total.device.type == "cpu" and total.numel() > _STEP:
        parts = [total.view(-1).split(_STEP), *(other.view(-1).split(_STEP) for other in others)]
    else:
        parts = [(total,), *((other,) for other in others)]
    for own, *rest in zip(*parts, strict=True):
        for other in rest:
            own.add_(other)
        if divisor is not None and divisor > 1:
            own.div_(divisor)


def why_not(push: Push, round_: Round) -> str | None:
    """Why tensors do not fit to those that have come before."""
    got = [(tuple(tensor.shape), tensor.dtype) for tensor in push.tensors]
    if round_.first is None:
        round_.first = (push.trainer, got)
        return None
    trainer, expected = round_.first
    return None if expected == got else shapes_differ(push.trainer, got, f"{trainer} has pushed", expected)


def shapes_differ(trainer: Trainer, got: Sequence[Any], whose: str, expected: Sequence[Any]) -> str:
    if len(got) != len(expected):
        what = f"{len(got)} tensors, and {whose} {len(expected)}"
    else:
        index = next(index for index, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1])
        what = f"{_shown(got[index])} as tensor {index}, and {whose} {_shown(expected[index])}"
    return f"{trainer} pushes gradients of {what}: all trainers of a server must have the same model"


def _shown(shape: Any) -> str:
    if shape and isinstance(shape[0], tuple):
        return f"{list(shape[0])} ({shape[1]})"
    return str(list(shape))
