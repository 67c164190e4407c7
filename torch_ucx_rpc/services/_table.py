"""Workers' offers by name, as values without a network: `Owner` and `Service`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Offer(NamedTuple):
    """A function or value that one worker offers under a name."""

    is_value: bool
    idempotent: bool = False
    # The function returns a future (torch.distributed.rpc.functions.async_execution).
    is_async: bool = False


class Owner(NamedTuple):
    """One life of a worker with all its offers. A later version replaces an earlier one."""

    worker: str
    rank: int
    life: int
    version: int
    offers: dict[str, Offer]

    def __str__(self) -> str:
        return f"worker {self.worker!r} (rank {self.rank})"

    def without(self, names: Iterable[str]) -> Owner:
        return self._replace(offers={name: offer for name, offer in self.offers.items() if name not in names})


class Service(NamedTuple):
    """A name and the living workers that offer it, by rank; no workers if the name is gone.

    Attributes:
        name (str): the name.
        workers (tuple[str, ...]): names of the workers, by rank.
        idempotent (bool): as the workers have registered it; False for a value.
        is_value (bool): `pair` has offered it, so `get` finds it; otherwise `call` calls it.
    """

    name: str
    workers: tuple[str, ...]
    idempotent: bool = False
    is_value: bool = False


def owners_of(owners: Mapping[str, Owner], name: str) -> list[Owner]:
    return sorted((one for one in owners.values() if name in one.offers), key=lambda one: one.rank)


def service_of(owners: Mapping[str, Owner], name: str) -> Service:
    found = owners_of(owners, name)
    offer = found[0].offers[name] if found else Offer(False)
    return Service(name, tuple(one.worker for one in found), offer.idempotent, offer.is_value)


def names_of(owners: Mapping[str, Owner]) -> list[str]:
    return sorted({name for one in owners.values() for name in one.offers})


def hint_for(owners: Mapping[str, Owner], name: str) -> str:
    """Return names similar to an unknown one, or the existing names, for an error."""
    names = names_of(owners)
    if close := difflib.get_close_matches(name, names, n=3):
        return f"close to it {'is' if len(close) == 1 else 'are'} {', '.join(map(repr, close))}"
    if names:
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        return f"the names that exist are {', '.join(map(repr, names[:10]))}{more}"
    return "no worker has registered any name"


def conflicts(owners: Mapping[str, Owner], claim: Owner) -> dict[str, str]:
    """Return the names that a worker cannot offer beside the others' offers, each with the reason and the remedy."""
    found = {}
    for owner in owners.values():
        if owner.worker != claim.worker:
            for name in claim.offers.keys() & owner.offers.keys():
                if why := _why_not_both(claim.offers[name], owner.offers[name]):
                    what = "a value" if owner.offers[name].is_value else "a service"
                    found[name] = f"the name {name!r} is taken: it is {what} of {owner}{why}"
    return found


def _why_not_both(offer: Offer, other: Offer) -> str | None:
    if offer.is_value or other.is_value:
        return "; choose another name, or have that worker unregister it first"
    if offer.idempotent != other.idempotent:
        return f", with idempotent={other.idempotent}: register the replica with the same value, or choose another name"
    if offer.is_async != other.is_async:
        decorated = "with" if other.is_async else "without"
        return f", {decorated} rpc.functions.async_execution: decorate all replicas or none, or choose another name"
    return None
