"""Calls by name: the choice of a replica, and repetition when a replica is lost.

A call is one request to one replica. The first call of a name makes its `Route`; a change of the table drops it. With
several replicas a call takes the one with the fewest open calls of this worker; equal replicas take turns.
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

from torch_ucx_rpc._arguments import check_str, check_timeout
from torch_ucx_rpc._workers.futures import fail
from torch_ucx_rpc._workers.lost import was_lost
from torch_ucx_rpc.services._directory import directory
from torch_ucx_rpc.services._errors import ReplicasLost, UnknownName, was_not_served
from torch_ucx_rpc.services._served import serve, serve_async
from torch_ucx_rpc.services._table import Owner, hint_for

_SYNC, _ASYNC = RPCExecMode.SYNC, RPCExecMode.ASYNC

_counting = threading.Lock()


class Replica:
    """A worker that is called, in one of its lives."""

    __slots__ = ("info", "life", "open")

    def __init__(self, owner: Owner) -> None:
        self.info = WorkerInfo(owner.worker, owner.rank)
        self.life = owner.life
        # This worker's calls that the replica has not answered. While it is the only replica, this leaves out the calls
        # of `call`, and the plain ones of `call_async`.
        self.open = 0

    def __str__(self) -> str:
        return f"{self.info.name!r} (rank {self.info.id})"


class Route:
    """The replicas of a name, and how to call them."""

    __slots__ = ("_turn", "function", "idempotent", "is_plain", "name", "only", "replicas")

    def __init__(self, name: str, owners: list[Owner], replicas: list[Replica], tells_ends: bool) -> None:
        offer = owners[0].offers[name]
        self.name = name
        self.function: Callable[..., Any] = serve_async if offer.is_async else serve
        self.idempotent = offer.idempotent
        self.replicas = replicas
        self.only = replicas[0] if len(replicas) == 1 else None
        # A plain call needs no action at its end, in success or failure.
        self.is_plain = self.only is not None and not self.idempotent and tells_ends
        self._turn = 0

    def pick(self, tried: Sequence[Replica] = ()) -> Replica | None:
        """Pick the least loaded replica not tried yet, and count one more call on it."""
        best, replicas = None, self.replicas
        count = len(replicas)
        with _counting:
            start = self._turn
            for index in range(start, start + count):
                replica = replicas[index % count]
                if (best is None or replica.open < best.open) and replica not in tried:
                    best = replica
                    self._turn = index + 1
            if best is not None:
                best.open += 1
        return best

    def invoke(self, replica: Replica, mode: RPCExecMode, call: tuple[Any, ...]) -> Future[Any]:
        args, kwargs, timeout = call
        future: Future[Any] = api._invoke_rpc(replica.info, self.function, mode, (self.name, *args), kwargs, timeout)
        return future


def unknown(name: str) -> UnknownName:
    return UnknownName(f"no living worker offers {name!r}; {hint_for(directory().owners, name)}")


def route_to(name: str) -> Route:
    """Return the route of a name. Raises UnknownName if no worker offers it."""
    check_str("name", name)
    known = directory()
    made: Route | None = known.routes.get(name)
    if made is not None:
        return made
    owners = known.look_up(name)
    if not owners:
        raise unknown(name)
    if owners[0].offers[name].is_value:
        raise TypeError(f"{name!r} is a value of {owners[0]}, not a service: services.get({name!r}) returns it")
    with known.lock:
        replicas = [known.replicas.setdefault(owner.life, Replica(owner)) for owner in owners]
        route = Route(name, owners, replicas, known.life.tells_ends)
        # The table may have changed since the lookup.
        if known.look_here(name) == owners:
            known.routes[name] = route
    return route


def call(name: str, /, *args: Any, timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any) -> Any:
    """Call a service and return its result: one request to the least loaded living replica.

    The least loaded replica is the one with the fewest open calls of this worker.

    Args:
        name (str): name of the service.
        *args: positional arguments of the service.
        **kwargs: keyword arguments of the service.
        timeout (float): limit in seconds, 0 for none, as in ``rpc_sync`` (default: ``rpc_timeout``). If the service has
            a parameter of this name, pass that by position.

    If the replica of an idempotent service is lost, this worker repeats the call with another replica, until none is
    left. A replica that no longer offers the name has executed nothing, so this worker calls another one.

    Raises the service's exception. Raises `UnknownName` if no worker offers the name, TypeError for the name of a
    value, and CallTimedOut after ``timeout``. Raises `ReplicasLost` if the replica was lost and the call cannot be
    repeated, or if no called replica offers the name any more.

    Example::

        >>> services.call("score", torch.ones(3))
    """
    if timeout is not UNSET_RPC_TIMEOUT:
        check_timeout(timeout)
    route, request, tried = route_to(name), (args, kwargs, timeout), list[Replica]()
    if (replica := route.only) is not None:
        try:
            return route.invoke(replica, _SYNC, request).wait()
        except RuntimeError as error:
            _judge(route, replica, error, tried)
    while True:
        route, replica = _next(route, tried)
        try:
            return route.invoke(replica, _SYNC, request).wait()
        except RuntimeError as error:
            _judge(route, replica, error, tried)
        finally:
            _end(replica)


def call_async(name: str, /, *args: Any, timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any) -> Future[Any]:
    """Do `call`, with its arguments, without waiting. Returns a future of the result.

    Raises `UnknownName`, TypeError for the name of a value, and errors of pickling the arguments, at once. The future
    raises all other errors. For a single replica of a service that is not idempotent, this is the future of
    ``rpc_async`` with UCX: it raises WorkerLost or `NotServed` instead of `ReplicasLost`.
    """
    if timeout is not UNSET_RPC_TIMEOUT:
        check_timeout(timeout)
    route = route_to(name)
    if route.only is not None and route.is_plain:
        return route.invoke(route.only, _ASYNC, (args, kwargs, timeout))
    return _Pending(route, (args, kwargs, timeout)).future


class _Pending:
    """A call that can move to another replica, and keeps its future."""

    def __init__(self, route: Route, request: tuple[Any, ...]) -> None:
        self._route = route
        self._request = request
        self._tried: list[Replica] = []
        self.future: Future[Any] = Future(devices=directory().life.devices)
        self._start()

    def _start(self) -> None:
        while True:
            self._route, replica = _next(self._route, self._tried)
            try:
                call = self._route.invoke(replica, _ASYNC, self._request)
            except BaseException as error:
                _end(replica)
                _judge(self._route, replica, error, self._tried)
            else:
                call.add_done_callback(functools.partial(self._on_done, replica))
                return

    def _on_done(self, replica: Replica, done: Future[Any]) -> None:
        _end(replica)
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


def _end(replica: Replica) -> None:
    with _counting:
        replica.open -= 1


def _next(route: Route, tried: Sequence[Replica]) -> tuple[Route, Replica]:
    """Return the replica to call next, with the call counted as open."""
    try:
        if tried:
            route = route_to(route.name)
        if (replica := route.pick(tried)) is None:
            # New replicas may offer the name without this worker's knowledge.
            directory().sync()
            route = route_to(route.name)
            replica = route.pick(tried)
    except RuntimeError as error:
        raise _all_lost(route.name, tried) from error
    if replica is None:
        raise _all_lost(route.name, tried)
    return route, replica


def _all_lost(name: str, tried: Sequence[Replica]) -> ReplicasLost:
    workers, were = ", ".join(map(str, tried)), "was" if len(tried) == 1 else "were"
    return ReplicasLost(
        f"no replica of {name!r} is left: {workers} {were} called, and did not answer or did not offer it any more"
    )


def _judge(route: Route, replica: Replica, error: BaseException, tried: list[Replica]) -> None:
    """After a failed call: return if it may be repeated with another replica; otherwise raise."""
    tried.append(replica)
    if was_not_served(error, replica.info.name, route.name):
        return
    if not was_lost(error):
        raise error
    if not (known := directory()).life.tells_ends:
        # On UCX the agent reports which life has ended.
        known.drop(replica.info.name, replica.life)
    if not route.idempotent:
        raise ReplicasLost(
            f"worker {replica} was lost while it was called by {route.name!r}. The call may have been executed, so it "
            f"is not repeated with another replica: a repetition needs register(..., idempotent=True). ({error})"
        ) from error
