"""The names of a job, as one worker knows them: `Table`.

A table is made of owners. An owner is one life of a worker, with what it offers. Only the owner changes that, one
change at a time, and numbers its changes. So a table needs no agreement on the order of changes of different workers:
for each owner it applies changes in the order of their numbers, holds back what comes early, and takes a full copy
whenever that is newer. Nothing here sends messages.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from typing import NamedTuple


class Offer(NamedTuple):
    """The thing behind a name at one worker."""

    is_value: bool
    group: str | None
    idempotent: bool
    unique: bool
    # The function returns a future (torch.distributed.rpc.functions.async_execution).
    asynchronous: bool


class Change(NamedTuple):
    """What an owner has changed since its change ``base``; with ``base`` None, all that it offers."""

    worker: str
    rank: int
    life: int
    base: int | None
    version: int
    role: str
    groups: tuple[str, ...]
    # Names by what is behind them: most have the same.
    added: tuple[tuple[Offer, tuple[str, ...]], ...]
    removed: tuple[str, ...]

    def offers(self) -> Iterator[tuple[str, Offer]]:
        for offer, names in self.added:
            for name in names:
                yield name, offer


@dataclasses.dataclass
class Owner:
    """One life of a worker, and what it offers."""

    worker: str
    rank: int
    life: int
    version: int
    role: str
    groups: tuple[str, ...]
    offers: dict[str, Offer] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"worker {self.worker!r} (rank {self.rank})"

    def full(self) -> Change:
        added = _by_offer(self.offers)
        return Change(self.worker, self.rank, self.life, None, self.version, self.role, self.groups, added, ())

    def full_with(self, change: Change) -> Change:
        """All that this owner will offer with a change of its own."""
        kept = {name: offer for name, offer in self.offers.items() if name not in change.removed}
        return change._replace(base=None, added=_by_offer(kept | dict(change.offers())), removed=())


def _by_offer(offers: dict[str, Offer]) -> tuple[tuple[Offer, tuple[str, ...]], ...]:
    names: dict[Offer, list[str]] = {}
    for name, offer in offers.items():
        names.setdefault(offer, []).append(name)
    return tuple((offer, tuple(of_offer)) for offer, of_offer in names.items())


class Table:
    """All owners and names that a worker knows. Not thread-safe: the caller holds a lock.

    It has no index of names. A worker that joins takes over those of all others, and looks few of them up.
    """

    def __init__(self) -> None:
        # By name of the worker: one life each.
        self.owners: dict[str, Owner] = {}
        self._ended: set[int] = set()
        # By life, then by the change that has to come first.
        self._early: dict[int, dict[int, Change]] = {}

    def names(self) -> set[str]:
        """All names that a worker offers."""
        return set().union(*(owner.offers for owner in self.owners.values()))

    def offers_of(self, name: str) -> dict[str, Offer]:
        """The offers of one name, by the workers that offer it."""
        return {worker: owner.offers[name] for worker, owner in self.owners.items() if name in owner.offers}

    def apply(self, change: Change) -> set[str]:
        """Take in what an owner has changed, once its earlier changes are here; the names that this concerns."""
        if change.life in self._ended:
            return set()
        concerned: set[str] = set()
        owner = self.owners.get(change.worker)
        if owner is not None and owner.life != change.life:
            # A worker has one life at a time, and the other one was told of first.
            concerned |= self.end(owner.life)
            owner = None
        version = 0 if owner is None else owner.version
        if change.base is None:
            if owner is None or change.version > version:
                concerned |= self._replace(owner, change)
        elif change.base > version:
            self._early.setdefault(change.life, {})[change.base] = change
        elif change.base == version:
            concerned |= self._extend(owner, change)
        early = self._early.get(change.life, {})
        while (known := self.owners.get(change.worker)) is not None and known.version in early:
            concerned |= self._extend(known, early.pop(known.version))
        return concerned

    def end(self, life: int) -> set[str]:
        """Forget a life of a worker for good; what is heard of it later is dropped. The names that this concerns."""
        self._ended.add(life)
        self._early.pop(life, None)
        owner = next((owner for owner in self.owners.values() if owner.life == life), None)
        if owner is None:
            return set()
        del self.owners[owner.worker]
        return set(owner.offers)

    def conflict(self, change: Change) -> str | None:
        """Why a change cannot be, in a sentence with the cure; None if it can."""
        wanted = dict(change.offers())
        for owner in self.owners.values():
            if owner.worker != change.worker:
                for name in sorted(wanted.keys() & owner.offers.keys()):
                    if why := self._why_not_both(name, wanted[name], owner):
                        return why
        return None

    def _why_not_both(self, name: str, offer: Offer, owner: Owner) -> str | None:
        other = owner.offers[name]
        what = "a value" if other.is_value else "a service"
        taken = f"the name {name!r} is taken: it is {what} of {owner}"
        if offer.is_value or other.is_value:
            return f"{taken}; choose another name, or have that worker unregister it first"
        if other.unique or offer.unique:
            return f"{taken}, and one of the two is registered with unique=True; choose another name, or leave it out"
        if offer.group != other.group:
            return (
                f"{taken}, in {'no group' if other.group is None else f'the group {other.group!r}'}: a replica must be "
                f"registered with group={other.group!r}, or another name chosen"
            )
        if offer.idempotent != other.idempotent:
            return (
                f"{taken}, with idempotent={other.idempotent}: a replica must be registered with the same, or another "
                f"name chosen"
            )
        if offer.asynchronous != other.asynchronous:
            decorated = "with" if other.asynchronous else "without"
            return (
                f"{taken}, {decorated} rpc.functions.async_execution: a replica must be alike, or another name chosen"
            )
        return None

    def close_to(self, name: str) -> list[str]:
        return difflib.get_close_matches(name, sorted(self.names()), n=3, cutoff=0.6)

    def snapshot(self) -> list[Change]:
        return [owner.full() for owner in self.owners.values()]

    def _replace(self, owner: Owner | None, change: Change) -> set[str]:
        concerned = set() if owner is None else set(owner.offers)
        made = Owner(change.worker, change.rank, change.life, 0, change.role, change.groups)
        self.owners[change.worker] = made
        return concerned | self._extend(made, change)

    def _extend(self, owner: Owner | None, change: Change) -> set[str]:
        if owner is None:
            owner = Owner(change.worker, change.rank, change.life, 0, change.role, change.groups)
            self.owners[change.worker] = owner
        for name in change.removed:
            owner.offers.pop(name, None)
        concerned = set(change.removed)
        for offer, names in change.added:
            owner.offers.update(dict.fromkeys(names, offer))
            concerned.update(names)
        owner.version, owner.role, owner.groups = change.version, change.role, change.groups
        return concerned
