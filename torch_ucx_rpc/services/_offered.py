"""A name and who offers it, as the public functions show it: `Service`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch_ucx_rpc._arguments import check_type, wrong_type
from torch_ucx_rpc.services._directory import Directory
from torch_ucx_rpc.services._table import Owner


class Service(NamedTuple):
    """A name and the living workers that offer it, by rank; none when the name is gone."""

    name: str
    workers: tuple[str, ...]
    group: str | None = None
    idempotent: bool = False
    is_value: bool = False


def service_of(known: Directory, name: str) -> Service:
    return _of_owners(name, [known.table.owners[worker] for worker in known.table.offers_of(name)])


def all_services(known: Directory) -> list[Service]:
    """Sorted by name."""
    owners: dict[str, list[Owner]] = {}
    for owner in known.table.owners.values():
        for name in owner.offers:
            owners.setdefault(name, []).append(owner)
    return [_of_owners(name, owners[name]) for name in sorted(owners)]


def _of_owners(name: str, owners: list[Owner]) -> Service:
    if not owners:
        return Service(name, ())
    owners = sorted(owners, key=lambda owner: owner.rank)
    offer = owners[0].offers[name]
    return Service(name, tuple(owner.worker for owner in owners), offer.group, offer.idempotent, offer.is_value)


def check_timeout(value: Any) -> None:
    # Whatever torch takes: numbers of NumPy's, too.
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise wrong_type("timeout", "a number of seconds, 0 for no limit", value)


def check_arguments(args: Any, kwargs: Any, timeout: Any) -> None:
    """TypeError for what cannot be the arguments of a call, or its timeout."""
    check_timeout(timeout)
    check_type("args", (tuple, list), "a tuple of arguments, as in args=(7,)", args)
    if kwargs is not None:
        check_type("kwargs", Mapping, "a dict of arguments by their names", kwargs)
