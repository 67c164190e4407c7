"""The public functions but for the calls themselves and `watch`."""

# mypy: allow-untyped-calls

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import WorkerInfo
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.futures import Future

from torch_ucx_rpc._arguments import check_flag, check_str, check_type, got, wrong_type
from torch_ucx_rpc._observe.statistics import ServiceStatistics
from torch_ucx_rpc.services import _calls
from torch_ucx_rpc.services._calls import unknown
from torch_ucx_rpc.services._directory import Directory, directory, role_of
from torch_ucx_rpc.services._errors import NameTaken, UnknownName
from torch_ucx_rpc.services._offered import Service, all_services, check_arguments, service_of
from torch_ucx_rpc.services._served import Served, served, value_of
from torch_ucx_rpc.services._table import Offer, Owner

_registering = threading.Lock()


class Member(NamedTuple):
    """A living worker, as `members` returns it."""

    name: str
    rank: int
    role: str
    groups: tuple[str, ...]
    services: tuple[str, ...]


# ---------------------------------------------------------------------------------------------------------- offering


def register(
    name: str,
    function: Callable[..., Any],
    *,
    group: str | None = None,
    idempotent: bool = False,
    unique: bool = False,
) -> None:
    """Let any worker call ``function`` by this name, on this worker.

    Several workers may register the same name: they are replicas, and a call goes to one of them. When this returns,
    every worker can call the name.

    Args:
        name (str): of the service, not empty.
        function: anything callable: a function, a bound method, a module. It need not be picklable, it stays here. One
            decorated with ``rpc.functions.async_execution`` returns a future, and is answered with what that gets.
        group (str): whose members alone may call it; this worker becomes one. (default: everybody may)
        idempotent (bool): executing a call twice does no harm, so that it is repeated with another replica when one is
            lost. (default: False)
        unique (bool): refuse replicas. (default: False)

    Raises `NameTaken`, saying by which worker, if the name is a value, has another group or another ``idempotent``, is
    unique, or is registered by this worker already; TypeError if ``function`` cannot be called. Nothing is registered
    then, on no worker.

    Example::

        >>> services.register("score", model.score, group="eval", idempotent=True)
    """
    check_str("name", name)
    register_all({name: function}, group=group, idempotent=idempotent, unique=unique)


def register_all(
    functions: Mapping[str, Callable[..., Any]],
    *,
    group: str | None = None,
    idempotent: bool = False,
    unique: bool = False,
) -> None:
    """Do the same with many names at once: all of them are registered, or none. It costs no more messages than one.

    Example::

        >>> services.register_all({"score": model.score, "rank": model.rank}, group="eval")
    """
    check_type("functions", Mapping, "a dict of functions by their names", functions)
    check_flag("idempotent", idempotent)
    check_flag("unique", unique)
    offers = {}
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(
                f"the function of {name!r} must be callable; {got(function)}; a value is offered with "
                f"services.pair({name!r}, value)"
            )
        is_async = hasattr(function, "_wrapped_async_rpc_function")
        offers[name] = (function, Offer(False, group, idempotent, unique, is_async))
    _offer(offers, group)


def pair(name: str, value: Any, *, group: str | None = None) -> None:
    """Let any worker `get` this value, which stays on this worker, by a name that nobody else has.

    Raises `NameTaken`, saying by which worker. ``unregister`` takes the name away again.

    Example::

        >>> services.pair("weights", tensor)
    """
    check_str("name", name)
    _offer({name: (value, Offer(True, group, False, True, False))}, group)


def _offer(offers: Mapping[str, tuple[Any, Offer]], group: str | None) -> None:
    for name in offers:
        check_str("each name", name)
    if group is not None:
        check_str("group", group)
    known = directory()
    by_offer: dict[Offer, list[str]] = {}
    added: dict[str, Served] = {}
    with _registering:
        for name in offers:
            if name in served:
                raise NameTaken(
                    f"the name {name!r} is taken: this worker, {known.info.name!r}, offers it already; call "
                    f"services.unregister({name!r}) first"
                )
        for name, (value, offer) in offers.items():
            # Others may call it before the decision has come back.
            served[name] = added[name] = Served(name, value, group)
            by_offer.setdefault(offer, []).append(name)
    try:
        known.change(
            added=tuple((offer, tuple(names)) for offer, names in by_offer.items()),
            groups=lambda groups: groups if group is None else groups | {group},
        )
    except BaseException:
        _keep_only_offered(known, added)
        raise


def _keep_only_offered(known: Directory, changed: Mapping[str, Served]) -> None:
    """After a change, which may have been interrupted: serve of these what the others have been told of."""
    with known.lock:
        offered = set(known.own.offers)
    with _registering:
        for name, service in changed.items():
            # Another thread may have registered the name anew.
            if name not in offered and served.get(name) is service:
                del served[name]


def unregister(name: str) -> None:
    """Take back what this worker offers by a name; replicas of others stay. Calls that run go on.

    Raises `UnknownName` if this worker does not offer it.
    """
    check_str("name", name)
    known = directory()
    service = served.get(name)
    with known.lock:
        offered = sorted(known.own.offers)
    # What another thread is about to register, nobody has been told of.
    if service is None or name not in offered:
        own = ", ".join(map(repr, offered)) or "nothing"
        raise UnknownName(f"this worker, {known.info.name!r}, does not offer {name!r}; it offers {own}")
    try:
        known.change(removed=(name,))
    finally:
        # Until all have heard of it they may call: the callee says that it is gone, and they call another replica.
        _keep_only_offered(known, {name: service})


def join(*groups: str) -> None:
    """Become a member of groups, whose names this worker may call from then on.

    A group is what keeps workers from calling by mistake what is not for them. It is no lock: each worker that belongs
    to the job may join, and says itself who it is. With a secret of the job (docs/security.md), nobody else can.
    """
    for group in groups:
        check_str("each of groups", group)
    directory().change(groups=lambda known: known | set(groups))


def leave(*groups: str) -> None:
    """Be a member of groups no more. Raises ValueError for one in which this worker offers a name."""
    for group in groups:
        check_str("each of groups", group)
    for service in list(served.values()):
        if service.group in groups:
            raise ValueError(
                f"this worker offers {service.name!r} in the group {service.group!r}: unregister that before leaving"
            )
    directory().change(groups=lambda known: known - set(groups))


def take_role(role: str) -> None:
    """Play this role, instead of that in the worker's name: the role of ``"trainer3"`` is ``"trainer"``."""
    check_str("role", role)
    directory().change(role=role)


# ----------------------------------------------------------------------------------------------------------- finding


def get(name: str) -> Any:
    """A reference (``rpc.RRef``) to the value that was given the name by `pair`, wherever it is.

    Raises `UnknownName` if nobody offers it, `NameContested` if two workers do that have lost each other, TypeError if
    it is a service. A fault at the owner, such as that
    the value is for a group of which this worker is no member, the RRef raises when it is used.

    Example::

        >>> services.get("weights").to_here()
    """
    check_str("name", name)
    known = directory()
    offers = known.look_up(name)
    with known.lock:
        owner = next((known.table.owners[worker] for worker in offers if worker in known.table.owners), None)
        if owner is None:
            raise unknown(known, name)
    if not offers[owner.worker].is_value:
        raise TypeError(f"{name!r} is a service of {owner}, and no value: services.call({name!r}, ...) calls it")
    return rpc.remote(WorkerInfo(owner.worker, owner.rank), value_of, args=(name, known.info.name))


def members(*, role: str | None = None, group: str | None = None) -> list[Member]:
    """The living workers by rank, or those of a role, of a group, or of both."""
    _check_filters(role=role, group=group)
    known = directory()
    known.sync()
    infos = known.life.living()
    with known.lock:
        found = [_member(info, known.table.owners.get(info.name)) for info in infos]
    return [
        member
        for member in found
        if (role is None or member.role == role) and (group is None or group in member.groups)
    ]


def _check_filters(**wanted: str | None) -> None:
    for what, name in wanted.items():
        if name is not None:
            check_str(what, name)


def _member(info: WorkerInfo, owner: Owner | None) -> Member:
    if owner is None or owner.rank != info.id:
        return Member(info.name, info.id, role_of(info.name), (), ())
    return Member(info.name, info.id, owner.role, tuple(sorted(owner.groups)), tuple(sorted(owner.offers)))


def names(*, group: str | None = None) -> list[Service]:
    """All names that living workers offer, or those of a group, sorted."""
    _check_filters(group=group)
    known = directory()
    known.sync()
    with known.lock:
        found = all_services(known)
    return [service for service in found if group is None or service.group == group]


# ----------------------------------------------------------------------------------------------------------- calling


def call_role(
    role: str,
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> list[Future[Any]]:
    """Call a function on every living worker of a role, this one included if it plays it: futures, by rank.

    ``function`` travels as in ``rpc_async``, so it must be importable there; a str is the name of a service, of which
    those are called that offer it.

    Raises `UnknownName` if no worker plays the role, saying which roles there are, or none of it offers the service.

    Example::

        >>> torch.futures.wait_all(services.call_role("trainer", load, args=(7,)))
    """
    check_str("role", role)
    check_callable_or_name(function)
    check_arguments(args, kwargs, timeout)
    # First of all, so that this worker knows what the decider knows of the name.
    route = _calls.route_to(function) if isinstance(function, str) else None
    chosen = members(role=role)
    if not chosen:
        roles = ", ".join(sorted({repr(member.role) for member in members()}))
        raise UnknownName(f"no living worker plays the role {role!r}; the roles are {roles}")
    if route is not None:
        offering = [member for member in chosen if function in member.services]
        if not offering:
            workers = ", ".join(repr(replica.info.name) for replica in route.replicas)
            raise UnknownName(f"no living worker of the role {role!r} offers {function!r}; {workers} offers it")
        chosen = offering
        args, function = (*route.prefix, *args), route.function
    return [
        rpc.rpc_async(WorkerInfo(member.name, member.rank), function, tuple(args), dict(kwargs or {}), timeout)
        for member in chosen
    ]


def call_group(
    group: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    names: Iterable[str] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> dict[str, Future[Any]]:
    """Call all services of a group at once, or those of them that ``names`` has, with the same arguments.

    Returns a future for each name. Raises `UnknownName` if the group has none of them.

    Example::

        >>> futures = services.call_group("eval", args=(x,))
        >>> futures["score"].wait()
    """
    check_str("group", group)
    check_arguments(args, kwargs, timeout)
    if names is not None:
        names = _list_of_names(names)
    known = directory()
    known.sync()
    with known.lock:
        found = all_services(known)
    of_group = {service.name for service in found if service.group == group and not service.is_value}
    wanted = sorted(of_group) if names is None else names
    for name in wanted:
        if name not in of_group:
            offered = ", ".join(map(repr, sorted(of_group))) or "none"
            raise UnknownName(f"{name!r} is no service of the group {group!r}; its services are {offered}")
    if not wanted:
        groups = ", ".join(sorted({repr(service.group) for service in found if service.group})) or "none"
        raise UnknownName(f"no living worker offers a service in the group {group!r}; the groups are {groups}")
    return {name: _calls.begin(name, tuple(args), dict(kwargs or {}), timeout) for name in wanted}


def check_callable_or_name(function: object) -> None:
    if not callable(function):
        check_str("function", function)


def _list_of_names(names: Any) -> list[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise wrong_type("names", "a list of names of services", names)
    listed = list(names)
    if not listed:
        raise ValueError(f"names must have a service; {got(names)}: leave it out to call all of the group")
    for name in listed:
        check_str("each of names", name)
    return listed


# ------------------------------------------------------------------------------------------------------------ counts


def statistics() -> tuple[ServiceStatistics, ...]:
    """What this worker has served, by name; nothing where RPC is not running or this worker offers nothing."""
    known = directory.last()
    # The agent of a former life may be held by somebody still.
    return () if known is None or known.life.is_over() or not directory.is_made() else _statistics_of(known)


def statistics_of(agent: Any) -> tuple[ServiceStatistics, ...]:
    """The same of the worker of an agent that may not be running."""
    known = directory.last()
    return () if known is None or not known.life.is_of(agent) else _statistics_of(known)


def _statistics_of(known: Directory) -> tuple[ServiceStatistics, ...]:
    with known.lock:
        return tuple(
            ServiceStatistics(
                name=service.name,
                group=service.group,
                replicas=service_of(known, name).workers,
                calls=service.calls,
                errors=service.errors,
                open=service.open,
            )
            for name, service in sorted(served.items())
        )
