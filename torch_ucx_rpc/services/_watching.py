"""`watch`: callbacks that are told who offers a name, on a thread of their own."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable

from torch_ucx_rpc._arguments import check_callable, check_str
from torch_ucx_rpc.services import _calls, _directory
from torch_ucx_rpc.services._directory import Directory, directory
from torch_ucx_rpc.services._offered import Service, service_of

_logger = logging.getLogger(__name__)

_watchers: dict[int, tuple[str, Callable[[Service], None]]] = {}
_tokens = itertools.count()
# What there is to tell, and to which watchers.
_changes: queue.SimpleQueue[tuple[Service, list[int]]] = queue.SimpleQueue()
_teller: threading.Thread | None = None


def watch(name: str, on_change: Callable[[Service], None]) -> Callable[[], None]:
    """Have ``on_change(service)`` called with a `Service` whenever a worker begins or ends to offer a name.

    The first call tells how it is now, also if nobody offers it. Calls come one after the other, on a thread of their
    own; what they raise is logged. Returns a function that ends it, as the shutdown of RPC does: what has not been told
    by then is not told.

    Example::

        >>> stop = services.watch("score", lambda service: print(service.workers))
    """
    global _teller
    check_str("name", name)
    check_callable("on_change", "a function of a Service", on_change)
    known = directory()
    known.sync()
    token = next(_tokens)
    with known.lock:
        if _teller is None:
            _teller = threading.Thread(target=_tell, name="torch_ucx_rpc-watch", daemon=True)
            _teller.start()
        _watchers[token] = (name, on_change)
        _changes.put((service_of(known, name), [token]))

    def stop() -> None:
        with known.lock:
            _watchers.pop(token, None)

    return stop


def _tell() -> None:
    while True:
        service, tokens = _changes.get()
        for token in tokens:
            watcher = _watchers.get(token)
            if watcher is None:
                continue  # it has been stopped meanwhile
            try:
                watcher[1](service)
            except Exception:
                _logger.exception("a callback of services.watch(%r) has raised", service.name)


def _on_made(known: Directory) -> None:
    _watchers.clear()

    def on_change(concerned: set[str]) -> None:
        # With the lock of the directory held.
        _calls.forget(concerned)
        for name in {name for name, _ in _watchers.values()} & concerned:
            tokens = [token for token, (watched, _) in _watchers.items() if watched == name]
            _changes.put((service_of(known, name), tokens))

    known.on_change = on_change


_directory.made.append(_on_made)
