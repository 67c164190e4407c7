"""A name and who offers it, as the public functions show it: `Service`."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_ucx_rpc.services._directory import Directory


class Service(NamedTuple):
    """A name and the living workers that offer it, by rank; none when the name is gone."""

    name: str
    workers: tuple[str, ...]
    group: str | None = None
    idempotent: bool = False
    is_value: bool = False


def service_of(known: Directory, name: str) -> Service:
    owners = sorted((known.table.owners[worker] for worker in known.table.names.get(name, ())), key=lambda o: o.rank)
    if not owners:
        return Service(name, ())
    offer = owners[0].offers[name]
    return Service(name, tuple(owner.worker for owner in owners), offer.group, offer.idempotent, offer.is_value)


def check_name(what: str, name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a {what} is a str; {name!r} is none")
    if not name:
        raise ValueError(f"a {what} cannot be empty")
