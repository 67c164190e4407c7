"""The end of other workers: `on_lost`, a callback for it, and tests by which the libraries recognize such failures.

The agent calls back (`_set_on_gone`), on one of its threads. Other backends never call a subscriber, which must notice
the end of a worker by a call that fails.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import itertools
import logging
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch._C._distributed_rpc import WorkerInfo, _get_current_rpc_agent, _is_current_rpc_agent_set

from torch_ucx_rpc._arguments import check_callable
from torch_ucx_rpc.errors import CallTimedOut, NotRunning, RpcError, UnknownWorker, WorkerLeft, WorkerLost

_logger = logging.getLogger(__name__)

_ENDED = ("left", "failed")


class Gone(NamedTuple):
    """The end of a worker. ``session`` distinguishes its lives under the same name.

    ``has_ended`` means that the kernel has reported the end of the process. Otherwise a failed worker may only be cut
    off.
    """

    session: int
    name: str
    rank: int
    failed: bool
    reason: str
    has_ended: bool = False


# The garbage collector may run a subscriber's end in a thread that has the lock.
_lock = threading.RLock()
_subscribers: dict[int, Callable[[Gone], None]] = {}
_tokens = itertools.count()
# The watched agent; subscriptions end with it.
_watched: weakref.ref[Any] | None = None


def current_agent() -> Any:
    """Return the running agent. Raises NotRunning without one."""
    if not _is_current_rpc_agent_set():
        raise NotRunning("RPC is not running: call torch.distributed.rpc.init_rpc first")
    return _get_current_rpc_agent()


def on_lost(callback: Callable[[WorkerInfo, str], None]) -> Callable[[], None]:
    """Have ``callback(worker, reason)`` called when a worker has died or cannot be reached any more.

    The callback runs on a thread of the agent, soon after the agent has noticed the end. It must not block. Its
    exceptions are logged. It is not called for workers that were lost before. Workers that leave the group are not
    lost; `statistics` shows them as ``"left"``. Backends other than UCX never call the callback.

    Args:
        callback (callable): a function of the lost worker (WorkerInfo) and the reason (str).

    Returns a function that ends the subscription, as the shutdown of RPC does. Raises NotRunning if RPC is not running.

    Example::

        >>> stop = torch_ucx_rpc.on_lost(lambda worker, reason: print(worker.name, reason))
    """
    check_callable("callback", "a function of a worker and a reason", callback)

    def tell(gone: Gone) -> None:
        if gone.failed:
            callback(WorkerInfo(gone.name, gone.rank), gone.reason)

    return subscribe(tell)


def subscribe(callback: Callable[[Gone], None]) -> Callable[[], None]:
    """Work like `on_lost`, but with all details of the end, and also for workers that leave."""
    global _watched
    agent = current_agent()
    token = next(_tokens)
    with _lock:
        is_first = _watched is None or _watched() is not agent
        if is_first:
            _subscribers.clear()
            _watched = weakref.ref(agent)
            if hasattr(agent, "_set_on_gone"):
                watched = _watched
                agent._set_on_gone(lambda *gone: _tell(watched, Gone(*gone)))
        _subscribers[token] = callback

    def unsubscribe() -> None:
        global _watched
        with _lock:
            if _subscribers.pop(token, None) is None or _subscribers:
                return
            # No callback is left. If the agent went on calling back, each goodbye would cost a thread and the GIL.
            watched_agent: Any = None if _watched is None else _watched()
            _watched = None
            if hasattr(watched_agent, "_set_on_gone"):
                watched_agent._set_on_gone(None)

    return unsubscribe


def ended() -> list[Gone]:
    """Return the workers whose end the agent has seen already; none on other backends."""
    agent = current_agent()
    return list(_ended_peers(agent).values()) if hasattr(agent, "_statistics") else []


def _ended_peers(agent: Any) -> dict[int, Gone]:
    return {
        peer["session"]: Gone(
            peer["session"],
            peer["name"],
            peer["rank"],
            peer["state"] == "failed",
            f"worker {peer['name']!r} (rank {peer['rank']}, pid {peer['pid']} on {peer['host']}) has "
            + ("died or cannot be reached any more" if peer["state"] == "failed" else "left the group"),
            peer["has_ended"],
        )
        for peer in agent._statistics()["peers"]
        if peer["state"] in _ENDED
    }


def _tell(agent: weakref.ref[Any], gone: Gone) -> None:
    with _lock:
        callbacks = list(_subscribers.values()) if _watched == agent else []
    for callback in callbacks:
        try:
            callback(gone)
        except Exception:
            _logger.exception("a callback for the end of worker %s has raised", gone.name)


# TensorPipe's texts for a callee that is gone.
_GONE = r"(?i)\beof\b|connection reset|connection refused|broken pipe|pipe closed|pipe not"
# The beginning of torch's text for an exception that a callee raised, with the name of its type.
_RAISED_THERE = r"(?:\w+(?:\.\w+)*: )?On WorkerInfo\([^\n]*\n(?P<type>\w+)\("


def was_lost(error: BaseException) -> bool:
    """True if a call failed because its callee has ended."""
    # An agent forgets the names of ended workers, and the libraries never call a name that has not existed.
    return _is_failure(error, WorkerLost, WorkerLeft, UnknownWorker)


def timed_out(error: BaseException) -> bool:
    """True if a call ran out of time."""
    return _is_failure(error, CallTimedOut)


def was_raised_there(error: BaseException, kind: type[BaseException]) -> bool:
    """True if the called function raised an exception of this type."""
    return isinstance(error, kind) or _type_in_text_of_tensorpipe(error) == kind.__name__


def _is_failure(error: BaseException, *kinds: type[RpcError]) -> bool:
    if isinstance(error, RpcError):
        # torch makes a new exception from the type and text of the callee's exception. Only an exception of a call made
        # here has the attributes.
        return isinstance(error, kinds) and error.name is not None
    return _type_in_text_of_tensorpipe(error) in {kind.__name__ for kind in kinds}


def _type_in_text_of_tensorpipe(error: BaseException) -> str | None:
    """Return the type of exception that a text of TensorPipe's agent stands for."""
    # That agent raises RuntimeError for every failure on either side, so only the text distinguishes them. A callee's
    # exception may quote any other text, so check for it first.
    text = str(error)
    if type(error) is not RuntimeError:
        return None
    if raised := re.match(_RAISED_THERE, text):
        return raised["type"]
    if "RPC ran for more than" in text:
        return CallTimedOut.__name__
    return WorkerLost.__name__ if re.search(_GONE, text) else None
