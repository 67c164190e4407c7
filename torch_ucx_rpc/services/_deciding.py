"""What a worker does as the decider on names, and when another one is: `Decider`. `_directory` has the argument."""

# mypy: allow-untyped-calls

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch.distributed.rpc as rpc

from torch_ucx_rpc._workers.life import Life
from torch_ucx_rpc._workers.lost import was_lost
from torch_ucx_rpc.services._table import Change, Table

_logger = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """The answer to a claim. Without a leader: this worker does not decide; ask the right one."""

    leader: int | None = None
    refusal: str | None = None
    # The claim builds on what the decider does not know: repeat it with all.
    needs_all: bool = False


class Decider:
    """Of one life of this worker: whether it decides, and if not, which worker's decisions count here.

    Args:
        lock: guards the table, and what is known here of deciders.
        gather: called on the others with the number of this life, for all that they know, when this worker begins.
        learn: takes in what they say.
        apply: takes in a change that was granted; called with the lock held.
    """

    def __init__(
        self,
        life: Life,
        lock: threading.RLock,
        table: Table,
        gather: Callable[[int], list[Change]],
        learn: Callable[[Iterable[Change]], None],
        apply: Callable[[Change], None],
    ) -> None:
        self._life = life
        self._lock = lock
        self._table = table
        self._gather = gather
        self._learn = learn
        self._apply = apply
        self._is_leading = False
        self._begin_lock = threading.Lock()
        # The life of the decider that knows what this worker offers.
        self._bound_to: int | None = None

    def binds(self, leader: int) -> bool:
        """Whether the decisions of this life of a worker count here. The caller holds the lock."""
        return self._bound_to in (None, leader)

    def judge(self, change: Change) -> Verdict:
        """Grant what a worker claims, or refuse it."""
        if not self._lead():
            return Verdict()
        with self._lock:
            # Between the two somebody may have taken over.
            if not self._is_leading:
                return Verdict()
            owner = self._table.owners.get(change.worker)
            known = owner.version if owner is not None and owner.life == change.life else 0
            if change.base is not None and change.base != known and change.worker != self._life.info.name:
                return Verdict(leader=self._life.number, needs_all=True)
            refusal = self._table.conflict(change)
            if refusal is None:
                self._apply(change)
            return Verdict(self._life.number, refusal)

    def tell(self, owners: Iterable[str] | None) -> list[Change] | None:
        """All that is known of some owners, or of all; None from a worker that does not decide."""
        if not self._lead():
            return None
        with self._lock:
            if not self._is_leading:
                return None
            if owners is None:
                return self._table.snapshot()
            return [self._table.owners[worker].full() for worker in owners if worker in self._table.owners]

    def follow(self, leader: int) -> list[Change]:
        """Tell another decider everything, and decide no more."""
        with self._lock:
            self._is_leading = False
            self._bound_to = leader
            return self._table.snapshot()

    def _lead(self) -> bool:
        """Begin to decide, if this is the living worker with the lowest rank; False if it is not."""
        if self._is_leading and self._is_lowest():
            return True
        with self._begin_lock:
            own = self._life.info
            others = [info for info in self._life.living() if info.name != own.name]
            if any(info.id < own.id for info in others):
                self._is_leading = False
                return False
            if self._is_leading:
                return True
            gathered = []
            for info in others:
                try:
                    gathered.append((info, rpc.rpc_async(info, self._gather, args=(self._life.number,))))
                except RuntimeError as error:
                    _logger.debug("%s is gone: %s", info.name, error)
            for info, future in gathered:
                try:
                    self._learn(future.wait())
                except RuntimeError as error:
                    if not was_lost(error):
                        raise RuntimeError(
                            f"worker {own.name!r} decides on names now, and worker {info.name!r} does not say which "
                            f"it offers: {error}"
                        ) from error
            with self._lock:
                self._bound_to = self._life.number
                self._is_leading = True
            return True

    def _is_lowest(self) -> bool:
        return all(info.id >= self._life.info.id for info in self._life.living())
