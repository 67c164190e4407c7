"""The relay: most workers of a large group take the packed records from one another, and only a few from the Store.

The ranks form a tree, in which each rank has up to `FAN_OUT` ranks below it. Rank 0 writes the packed records into the
Store, and the workers below it read them there. Every other worker connects to the one above it, and gets the same
bytes. So the Store sends the records to at most `FAN_OUT` workers, whatever the size of the group. The invariants:

1. A worker believes only bytes that have the digest in the verdict. So it does not matter who has sent them.
2. If anything goes wrong, a worker reads the records from the Store, where they remain. It does so when the worker
   above it has ended or is silent for `_PATIENCE_S`. That does not count as the loss of the worker above.
3. A worker waits only for the one above it, whose rank is lower. No worker waits for one below it: a thread serves the
   workers below. The thread ends when all have come, or when none has come for `_FAREWELL_S`.
4. A worker listens before it is in the list of arrivals. So if it is a member, those below it find its relay, unless
   the worker has ended or the relay is over.

For workers of the same host, the relay listens on a Unix socket with a name in Linux's abstract namespace. If the
workers meet over a network, it also listens on a TCP port. The relay reads nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import selectors
import socket
import threading
from typing import TYPE_CHECKING, Any

from torch_ucx_rpc._bootstrap.deadline import Deadline
from torch_ucx_rpc._bootstrap.forks import close_in_children
from torch_ucx_rpc._bootstrap.network import meeting_address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

FAN_OUT = 32
# Shorter than rank 0's wait for workers to read the verdict: a worker that has waited in vain still finds the Store.
_PATIENCE_S = 2.0
# Workers look for the verdict at least once a second, and then connect here. So this is longer than a second.
_FAREWELL_S = 4.0
# For a socket, 0 means "do not wait".
_LEAST_WAIT_S = 0.001
_BACKLOG = 2 * FAN_OUT


def above(rank: int) -> int:
    """Return the rank from which ``rank``, which is above 0, takes the records."""
    return (rank - 1) // FAN_OUT


def number_below(rank: int, world_size: int) -> int:
    """Return the number of workers that take the records from this one."""
    return max(0, min(FAN_OUT, world_size - 1 - FAN_OUT * rank))


class Relay:
    """Listens for ``below`` workers, at places that they can reach if they reach ``store``."""

    def __init__(self, store: Store, below: int) -> None:
        self._below = below
        self._listeners: list[socket.socket] = []
        # Where `take` finds this relay: the name of a Unix socket, or the host and port of a TCP one.
        self.places: list[str | tuple[str, int]] = []
        # Without a relay the workers below read the Store.
        if below:
            with contextlib.suppress(OSError):
                self._listen(store)

    def _listen(self, store: Store) -> None:
        name = f"torch_ucx_rpc_relay/{os.urandom(8).hex()}"
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners.append(unix)
        close_in_children(unix)
        unix.bind("\0" + name)
        unix.listen(_BACKLOG)
        self.places.append(name)
        if (host := meeting_address(store)) is not None:
            tcp = socket.create_server((host, 0), family=_family(host), backlog=_BACKLOG)
            self._listeners.append(tcp)
            close_in_children(tcp)
            self.places.append((host, tcp.getsockname()[1]))

    def serve(self, packed: bytes) -> None:
        """Send the bytes to each worker that comes, on a separate thread that ends by itself."""
        listeners, self._listeners = self._listeners, []
        if not listeners:
            return
        arguments = (listeners, self._below, packed)
        # A daemon, so that it does not hold up the end of the program.
        threading.Thread(target=_serve, args=arguments, name="torch_ucx_rpc-relay", daemon=True).start()

    def close(self) -> None:
        """End the connections of the workers below, unless a thread serves them."""
        for listener in self._listeners:
            listener.close()


def _serve(listeners: list[socket.socket], below: int, packed: bytes) -> None:
    with contextlib.ExitStack() as opened:
        selector = opened.enter_context(selectors.DefaultSelector())
        for listener in listeners:
            selector.register(opened.enter_context(listener), selectors.EVENT_READ, listener)
        while below > 0 and (ready := selector.select(_FAREWELL_S)):
            for key, _ in ready:
                try:
                    connection, _ = key.data.accept()
                except OSError:  # this process can open no more files
                    return
                below -= 1
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(_PATIENCE_S)
                    connection.sendall(packed)


def take(places: list[Any], size: int) -> bytes:
    """Return at most ``size`` bytes that the relay at these places sends; empty if the relay is absent or silent.

    The places are from the Store: they may be anything, and so may the bytes.
    """
    limit = Deadline(_PATIENCE_S)
    for place in places:
        with contextlib.suppress(LookupError, OSError, OverflowError, TypeError, ValueError):
            return _take(place, size, limit)
    return b""


def _take(place: Any, size: int, limit: Deadline) -> bytes:
    is_unix = isinstance(place, str)
    address = "\0" + place if is_unix else (place[0], place[1])
    family = socket.AF_UNIX if is_unix else _family(place[0])
    taken = bytearray()
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(limit.remaining() or _LEAST_WAIT_S)
        connection.connect(address)
        while len(taken) < size:
            connection.settimeout(limit.remaining() or _LEAST_WAIT_S)
            chunk = connection.recv(size - len(taken))
            if not chunk:
                break
            taken += chunk
    return bytes(taken)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
