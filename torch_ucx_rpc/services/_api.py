"""The public functions, except the calls themselves."""

# mypy: allow-untyped-calls

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import WorkerInfo, get_rpc_timeout
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.futures import Future

from torch_ucx_rpc._arguments import check_callable, check_count, check_flag, check_str, check_timeout, check_type, got
from torch_ucx_rpc._observe.statistics import ServiceStatistics
from torch_ucx_rpc._threads import Thread
from torch_ucx_rpc.errors import ShutDown
from torch_ucx_rpc.services._calls import route_to, unknown
from torch_ucx_rpc.services._directory import Directory, directory
from torch_ucx_rpc.services._errors import NameTaken, UnknownName
from torch_ucx_rpc.services._served import Served, value_of
from torch_ucx_rpc.services._table import Offer, Service, names_of, owners_of, service_of

_logger = logging.getLogger(__name__)

# Seconds between a watch's checks for the shutdown of RPC.
_GLANCE_S = 1.0


class Member(NamedTuple):
    """A living worker, as `members` returns it.

    Attributes:
        name (str): its name.
        rank (int): its rank.
        role (str): its name without the number at the end: ``"trainer"`` for ``"trainer3"``.
        services (tuple[str, ...]): names that it offers, of functions and of values, sorted.
    """

    name: str
    rank: int
    role: str
    services: tuple[str, ...]


def role_of(worker: str) -> str:
    """Return the role of a worker: its name without the number at the end, and without a separator before it."""
    return worker.rstrip("0123456789").rstrip("-_:/.") or worker


# ---------------------------------------------------------------------------------------------------------- offering


def register(name: str, function: Callable[..., Any], *, idempotent: bool = False) -> None:
    """Offer ``function`` under this name: any worker can call it, and it runs on this worker.

    Several workers may register the same name: they are replicas, and a call goes to one of them. When this returns,
    every worker can call the name.

    Args:
        name (str): name of the service, not empty.
        function (callable): a function, a bound method, or a module. It stays on this worker, so it need not be
            picklable. If ``rpc.functions.async_execution`` decorates it, it returns a future, whose result is the
            answer.
        idempotent (bool): executing a call twice does no harm (default: False). If a replica is lost, its callers then
            repeat their calls with another replica.

    Raises `NameTaken`, which names the owner, if this worker already offers the name, or another worker offers it as a
    value. All replicas must have the same ``idempotent``, and be decorated with ``async_execution`` or not; else this
    also raises `NameTaken`. Raises TypeError if ``function`` cannot be called. An error leaves all workers' offers as
    they were.

    Example::

        >>> services.register("score", model.score, idempotent=True)
    """
    check_str("name", name)
    register_all({name: function}, idempotent=idempotent)


def register_all(functions: Mapping[str, Callable[..., Any]], *, idempotent: bool = False) -> None:
    """Register many names at once: all of them, or none. It costs no more messages than one `register`.

    Args:
        functions (Mapping): functions by their names; each as in `register`.
        idempotent (bool): the same for all of them, as in `register` (default: False).

    Raises the errors of `register`.

    Example::

        >>> services.register_all({"score": model.score, "rank": model.rank})
    """
    check_type("functions", Mapping, "a dict of functions by their names", functions)
    check_flag("idempotent", idempotent)
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(
                f"the function of {name!r} must be callable; {got(function)}; a value is offered with "
                f"services.pair({name!r}, value)"
            )
    _offer(functions, lambda one: Offer(False, idempotent, hasattr(one, "_wrapped_async_rpc_function")))


def pair(name: str, value: Any) -> None:
    """Let any worker `get` this value by a name that no other worker has. The value stays on this worker.

    Raises `NameTaken`, which names the owner, if any worker offers the name. `unregister` removes the name.

    Example::

        >>> services.pair("weights", tensor)
    """
    check_str("name", name)
    _offer({name: value}, lambda _: Offer(True))


def _offer(things: Mapping[str, Any], offer_of: Callable[[Any], Offer]) -> None:
    for name in things:
        check_str("each name", name)
    known = directory()
    added: dict[str, Served] = {}
    with known.lock:
        if taken := [name for name in things if name in known.served]:
            raise NameTaken(
                f"the name {taken[0]!r} is taken: this worker, {known.info.name!r}, offers it already; call "
                f"services.unregister({taken[0]!r}) first"
            )
        # Other workers may call a name before the decision arrives here.
        for name, value in things.items():
            known.served[name] = added[name] = Served(name, value)
    try:
        known.change(added={name: offer_of(value) for name, value in things.items()})
    finally:
        _keep_only_offered(known, added)


def _keep_only_offered(known: Directory, changed: Mapping[str, Served]) -> None:
    """Stop serving the changed names that this worker does not offer, since the change has failed or removed them."""
    with known.lock:
        for name, service in changed.items():
            # Another thread may have registered the name again.
            if name not in known.own.offers and known.served.get(name) is service:
                del known.served[name]


def unregister(name: str) -> None:
    """Stop offering a name on this worker; replicas on other workers stay. Running calls go on.

    Raises `UnknownName` if this worker does not offer it.
    """
    check_str("name", name)
    known = directory()
    service, offers = known.served.get(name), known.own.offers
    # A name that another thread is about to register does not count yet.
    if service is None or name not in offers:
        own = ", ".join(map(repr, sorted(offers))) or "nothing"
        raise UnknownName(f"this worker, {known.info.name!r}, does not offer {name!r}; it offers {own}")
    try:
        known.change(removed=(name,))
    finally:
        _keep_only_offered(known, {name: service})


# ----------------------------------------------------------------------------------------------------------- finding


def get(name: str) -> Any:
    """Return a reference (``rpc.RRef``) to a value that some worker offers with `pair`.

    Raises `UnknownName` if no worker offers it, TypeError if it is a service. The reference raises `NotServed` if the
    worker has withdrawn the value in the meantime.

    Example::

        >>> services.get("weights").to_here()
    """
    check_str("name", name)
    known = directory()
    # The value may have moved, and a reference to its old place would fail only when it is used.
    known.sync()
    if not (owners := owners_of(known.owners, name)):
        raise unknown(name)
    if not owners[0].offers[name].is_value:
        raise TypeError(f"{name!r} is a service of {owners[0]}, not a value: services.call({name!r}, ...) calls it")
    return rpc.remote(WorkerInfo(owners[0].worker, owners[0].rank), value_of, args=(name,))


def members(*, role: str | None = None) -> list[Member]:
    """Return the living workers by rank: all, or those with one role."""
    if role is not None:
        check_str("role", role)
    known = directory()
    known.sync()
    found = []
    for info in known.life.living():
        owner = known.owners.get(info.name)
        offers = owner.offers if owner is not None and owner.rank == info.id else {}
        found.append(Member(info.name, info.id, role_of(info.name), tuple(sorted(offers))))
    return [member for member in found if role in (None, member.role)]


def names() -> list[Service]:
    """Return a `Service` for each name that a living worker offers, sorted by name."""
    known = directory()
    known.sync()
    with known.lock:
        return [service_of(known.owners, name) for name in names_of(known.owners)]


def wait_for(name: str, *, replicas: int = 1, timeout: float = UNSET_RPC_TIMEOUT) -> Service:
    """Wait until enough workers offer a name, and return it as a `Service`.

    Args:
        name (str): name of a service or of a value.
        replicas (int): how many workers, at least (default: 1).
        timeout (float): limit in seconds, 0 for none (default: ``rpc_timeout``).

    Raises TimeoutError, which lists the workers that offer the name. Raises RuntimeError if no worker decides on names
    within ``timeout``, and ShutDown if RPC ends first.

    Example::

        >>> services.wait_for("score", replicas=2).workers
        ('evaluator0', 'evaluator1')
    """
    check_str("name", name)
    check_count("replicas", 1, "a number of workers", replicas)
    check_timeout(timeout)
    limit = get_rpc_timeout() if timeout is UNSET_RPC_TIMEOUT else float(timeout)
    deadline = time.monotonic() + limit
    known = directory()
    known.sync(limit or math.inf)
    with known.changed:
        while len((service := service_of(known.owners, name)).workers) < replicas:
            if not known.life.lasts():
                raise ShutDown("RPC has been shut down")
            left = deadline - time.monotonic()
            if limit and left <= 0:
                offering = ", ".join(map(repr, service.workers)) or "none"
                raise TimeoutError(
                    f"fewer than {replicas} workers offer {name!r} after {limit:g} s; it is offered by: {offering}"
                )
            known.changed.wait(min(left, _GLANCE_S) if limit else _GLANCE_S)
        return service


def watch(name: str, on_change: Callable[[Service], None]) -> Callable[[], None]:
    """Have ``on_change(service)`` called with a `Service` whenever a worker begins or ceases to offer a name.

    Args:
        name (str): name of a service or of a value.
        on_change (callable): a function of a `Service`.

    The first call has the present state, even if no worker offers the name. Calls come one after the other, on a thread
    of their own; their exceptions are logged. If the state changes during a call, the next call has the last state.
    Returns a function that ends the watch. The shutdown of RPC also ends it.

    Example::

        >>> stop = services.watch("score", lambda service: print(service.workers))
    """
    check_str("name", name)
    check_callable("on_change", "a function of a Service", on_change)
    known = directory()
    known.sync()
    is_over = threading.Event()

    def tell() -> None:
        last = None
        lasts = known.life.lasts
        while True:
            with known.changed:
                while (service := service_of(known.owners, name)) == last and lasts() and not is_over.is_set():
                    known.changed.wait(_GLANCE_S)
            if is_over.is_set() or not lasts():
                return
            last = service
            try:
                on_change(service)
            except Exception:
                _logger.exception("a callback of services.watch(%r) has raised", name)

    Thread(tell, name="torch_ucx_rpc-watch").start()
    return is_over.set


# ----------------------------------------------------------------------------------------------------------- calling


def call_role(
    role: str,
    function: Callable[..., Any] | str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> list[Future[Any]]:
    """Call a function on every living worker of a role, also on this one if it has the role. Returns futures, by rank.

    Args:
        role (str): workers' names without the number at the end, such as ``"trainer"``.
        function (callable or str): a function, which travels as in ``rpc_async``, so it must be importable on those
            workers. Or the name of a service: `call_role` then calls only the workers of the role that offer it.
        args (tuple or list): positional arguments (default: none).
        kwargs (Mapping): keyword arguments (default: None, none).
        timeout (float): limit of each call in seconds, 0 for none (default: ``rpc_timeout``).

    Raises `UnknownName` if no worker has the role (listing the roles), or none with the role offers the service. Raises
    TypeError for the name of a value. The futures raise the errors of ``rpc_async``.

    Example::

        >>> torch.futures.wait_all(services.call_role("trainer", load, args=(7,)))
    """
    check_str("role", role)
    if not callable(function):
        check_str("function", function)
    check_timeout(timeout)
    check_type("args", (tuple, list), "a tuple of arguments, as in args=(7,)", args)
    if kwargs is not None:
        check_type("kwargs", Mapping, "a dict of arguments by their names", kwargs)
    everybody = members()
    chosen = [member for member in everybody if member.role == role]
    if not chosen:
        roles = ", ".join(sorted({repr(member.role) for member in everybody}))
        raise UnknownName(f"no living worker has the role {role!r}; the roles are {roles}")
    if isinstance(function, str):
        route = route_to(function)
        chosen = [member for member in chosen if function in member.services]
        if not chosen:
            workers = ", ".join(repr(replica.info.name) for replica in route.replicas)
            raise UnknownName(f"no living worker of the role {role!r} offers {function!r}; it is offered by {workers}")
        args, function = (function, *args), route.function
    return [
        rpc.rpc_async(WorkerInfo(member.name, member.rank), function, tuple(args), dict(kwargs or {}), timeout)
        for member in chosen
    ]


# ------------------------------------------------------------------------------------------------------------ counts


def statistics() -> tuple[ServiceStatistics, ...]:
    """Return the counts of calls that this worker has served, by name; empty if RPC is not running."""
    # The directory of an earlier life does not count, even if a user still holds the agent of that life.
    known = directory.last() if directory.is_made() else None
    return () if known is None else _statistics_of(known)


def statistics_of(agent: Any) -> tuple[ServiceStatistics, ...]:
    """Return the counts for the worker of an agent, which may not be running."""
    known = directory.last()
    return () if known is None or not known.life.is_of(agent) else _statistics_of(known)


def _statistics_of(known: Directory) -> tuple[ServiceStatistics, ...]:
    with known.lock:
        return tuple(
            ServiceStatistics(
                name=name,
                replicas=service_of(known.owners, name).workers,
                calls=service.calls,
                errors=service.errors,
                open=service.open,
            )
            for name, service in sorted(known.served.items())
        )
