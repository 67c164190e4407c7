"""Calls by name: how one finds its replica, and what happens when a replica is lost.

A call is one request to one replica. All that is known of a name for calling it is its `Route`, which is made at the
first call and thrown away when an offer of that name changes. With one replica a call does nothing but look up the
route and invoke; with several it takes the one with the fewest calls of this worker that are not answered yet, and of
those with as few the one whose turn it is.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch._C._distributed_rpc import WorkerInfo
from torch.distributed.rpc import api
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.distributed.rpc.internal import RPCExecMode
from torch.futures import Future

from torch_ucx_rpc._arguments import check_str
from torch_ucx_rpc._workers.futures import fail
from torch_ucx_rpc._workers.lost import was_lost
from torch_ucx_rpc.services import _directory
from torch_ucx_rpc.services._directory import Directory, directory
from torch_ucx_rpc.services._errors import ReplicasLost, UnknownName, was_not_served
from torch_ucx_rpc.services._offered import check_timeout
from torch_ucx_rpc.services._served import serve, serve_async, serve_member, serve_member_async
from torch_ucx_rpc.services._table import Offer

_SYNC, _ASYNC = RPCExecMode.SYNC, RPCExecMode.ASYNC


class Replica:
    """A worker that is called, in one of its lives."""

    __slots__ = ("info", "life", "open")

    def __init__(self, info: WorkerInfo, life: int) -> None:
        self.info = info
        self.life = life
        # Calls of this worker that it has not answered.
        self.open = 0


class Route:
    """How a name is called."""

    __slots__ = ("_turn", "function", "idempotent", "is_plain", "name", "only", "prefix", "replicas")

    def __init__(self, name: str, offer: Offer, replicas: list[Replica], caller: str, tells_ends: bool) -> None:
        self.name = name
        self.replicas = replicas
        self.only = replicas[0] if len(replicas) == 1 else None
        self.idempotent = offer.idempotent
        # Nothing is to be done when a call ends, whichever way.
        self.is_plain = self.only is not None and not offer.idempotent and tells_ends
        in_group = offer.group is not None
        self.prefix = (name, caller) if in_group else (name,)
        self.function: Callable[..., Any]
        if offer.asynchronous:
            self.function = serve_member_async if in_group else serve_async
        else:
            self.function = serve_member if in_group else serve
        self._turn = 0

    def pick(self, tried: Sequence[Replica] = ()) -> Replica | None:
        """The least loaded replica of those that have not been tried."""
        best, replicas = None, self.replicas
        count, start = len(replicas), self._turn
        for index in range(start, start + count):
            replica = replicas[index % count]
            if (best is None or replica.open < best.open) and replica not in tried:
                best = replica
                self._turn = index + 1
        return best


# By name; of the agent that runs, as far as they have been called. And by life of a worker.
routes: dict[str, Route] = {}
_replicas: dict[int, Replica] = {}
_counting = threading.Lock()


def _begin(known: Directory) -> None:
    routes.clear()
    _replicas.clear()


_directory.made.append(_begin)


def forget(names: set[str]) -> None:
    """Of names whose offers have changed. The caller holds the lock of the directory."""
    for name in routes.keys() & names:
        del routes[name]


def _route_of(name: str) -> Route:
    check_str("name", name)
    known = routes.get(name) if directory.is_made() else None
    return known or route_to(name)


def route_to(name: str) -> Route:
    """The route of a name that has none yet; UnknownName if nobody offers it."""
    known = directory()
    offers = known.look_up(name)
    with known.lock:
        # Those that are here still.
        owners = [owner for worker in offers if (owner := known.table.owners.get(worker)) and name in owner.offers]
        owners.sort(key=lambda owner: owner.rank)
        if not owners:
            raise unknown(known, name)
        offer = owners[0].offers[name]
        if offer.is_value:
            raise TypeError(f"{name!r} is a value of {owners[0]}, and no service: services.get({name!r}) has it")
        replicas = []
        for owner in owners:
            replica = _replicas.get(owner.life)
            if replica is None:
                replica = _replicas[owner.life] = Replica(WorkerInfo(owner.worker, owner.rank), owner.life)
            replicas.append(replica)
        route = routes[name] = Route(name, offer, replicas, known.info.name, known.life.tells_ends)
        return route


def unknown(known: Directory, name: str) -> UnknownName:
    close = known.table.close_to(name)
    if close:
        hint = f"close to it {'is' if len(close) == 1 else 'are'} {', '.join(map(repr, close))}"
    elif names := sorted(known.table.names()):
        shown = ", ".join(map(repr, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        hint = f"the names that exist are {shown}"
    else:
        hint = "no worker has registered any name"
    return UnknownName(f"no living worker offers {name!r}; {hint}")


def call(name: str, /, *args: Any, timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any) -> Any:
    """Call a service and return its result: one request to the least loaded living replica.

    Args:
        name (str): of the service.
        *args: its positional arguments.
        **kwargs: its keyword arguments.
        timeout (float): in seconds, as of ``rpc_sync`` (default: ``rpc_timeout``; 0 for none). A parameter of the
            service that has this name can be given by position only.

    If the replica is lost and the service is idempotent, the call is repeated with another one, as often as there are
    replicas. A replica that does not offer the name any more has executed nothing, and another one is called too.

    Raises what the service raises; `UnknownName` if nobody offers the name; `NameContested` if two do of which only one
    may, since they have lost each other; `NotAMember` if it is for a group;
    `ReplicasLost` if the replica was lost and the call cannot be repeated. On backends other than UCX these come as
    the RuntimeError that torch makes of what a callee raises.

    Example::

        >>> services.call("score", torch.ones(3))
    """
    if timeout is not UNSET_RPC_TIMEOUT:
        check_timeout(timeout)
    route = _route_of(name)
    replica = route.only
    if replica is None:
        return _call_one_of(route, args, kwargs, timeout)
    try:
        return _invoke(route, replica, _SYNC, args, kwargs, timeout).wait()
    except RuntimeError as error:
        tried = [replica]
        _judge(route, replica, error, tried)
    return _call_one_of(route, args, kwargs, timeout, tried)


def _invoke(
    route: Route,
    replica: Replica,
    mode: RPCExecMode,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
) -> Future[Any]:
    future: Future[Any] = api._invoke_rpc(replica.info, route.function, mode, (*route.prefix, *args), kwargs, timeout)
    return future


def _call_one_of(
    route: Route, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float, tried: Sequence[Replica] = ()
) -> Any:
    tried = list(tried)
    while True:
        route, replica = _next(route, tried)
        try:
            return _invoke(route, replica, _SYNC, args, kwargs, timeout).wait()
        except RuntimeError as error:
            tried.append(replica)
            _judge(route, replica, error, tried)
        finally:
            with _counting:
                replica.open -= 1


def _next(route: Route, tried: Sequence[Replica]) -> tuple[Route, Replica]:
    """The replica to be called next, with the call counted as open."""
    if tried:
        directory()
        known = routes.get(route.name)
        try:
            route = known or route_to(route.name)
        except UnknownName as error:
            raise _all_lost(route.name, tried) from error
    with _counting:
        replica = route.pick(tried)
        if replica is not None:
            replica.open += 1
            return route, replica
    raise _all_lost(route.name, tried)


def _all_lost(name: str, tried: Sequence[Replica]) -> ReplicasLost:
    workers = ", ".join(f"{replica.info.name!r} (rank {replica.info.id})" for replica in tried)
    were = "was" if len(tried) == 1 else "were"
    return ReplicasLost(
        f"no replica of {name!r} is left: {workers} {were} called, and did not answer or did not offer it any more"
    )


def _judge(route: Route, replica: Replica, error: RuntimeError, tried: Sequence[Replica]) -> None:
    """After a failed call: return if it may be repeated with another replica, raise if not."""
    if was_not_served(error, replica.info.name, route.name):
        known = directory()
        with known.lock:
            routes.pop(route.name, None)
        return
    if not was_lost(error):
        raise error
    known = directory()
    if not known.life.tells_ends:
        # On UCX the agent says so, of which life it is.
        known.drop(replica.info.name, replica.life)
    if not route.idempotent:
        raise ReplicasLost(
            f"worker {replica.info.name!r} (rank {replica.info.id}) was lost while it was called by {route.name!r}. "
            f"The call may have been executed, so it is not repeated with another replica: that takes "
            f"register(..., idempotent=True). ({error})"
        ) from error


def call_async(name: str, /, *args: Any, timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any) -> Future[Any]:
    """The same as `call` without waiting: a future of the result.

    Raises `UnknownName` at once; everything else the future raises. Where there is one replica, and the call would not
    be repeated, that is the future of ``rpc_async``, with the errors of that: RuntimeErrors that name the worker.
    """
    return begin(name, args, kwargs, timeout)


def begin(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> Future[Any]:
    """`call_async` for arguments of any names."""
    if timeout is not UNSET_RPC_TIMEOUT:
        check_timeout(timeout)
    route = _route_of(name)
    if route.only is not None and route.is_plain:
        return _invoke(route, route.only, _ASYNC, args, kwargs, timeout)
    return _Pending(route, args, kwargs, timeout).future


class _Pending:
    """A call whose result somebody will wait for."""

    def __init__(self, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> None:
        self._route = route
        self._call = (args, kwargs, timeout)
        self._tried: list[Replica] = []
        self.future: Future[Any] = Future(devices=directory().life.devices)
        self._start()

    def _start(self) -> None:
        args, kwargs, timeout = self._call
        while True:
            self._route, replica = _next(self._route, self._tried)
            route = self._route
            try:
                call = _invoke(route, replica, _ASYNC, args, kwargs, timeout)
            except RuntimeError as error:
                self._end(replica)
                _judge(route, replica, error, self._tried)
                continue
            except BaseException:
                self._end(replica)
                raise
            call.add_done_callback(functools.partial(self._on_done, replica))
            return

    def _end(self, replica: Replica) -> None:
        with _counting:
            replica.open -= 1
        self._tried.append(replica)

    def _on_done(self, replica: Replica, done: Future[Any]) -> None:
        self._end(replica)
        try:
            try:
                value = done.value()
            except RuntimeError as error:
                _judge(self._route, replica, error, self._tried)
                self._start()
                return
        except Exception as error:
            fail(self.future, error)
        else:
            self.future.set_result(value)
