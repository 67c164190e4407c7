"""The end of processes that the agent does not report: `Lifelines` uses ports that the kernel closes with a process."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch_ucx_rpc._bootstrap.forks import close_in_children
from torch_ucx_rpc._bootstrap.network import address_towards, meeting_address
from torch_ucx_rpc._threads import Thread

_BACKLOG = 1024
# Seconds for a connection to a host that is down or cut off. After that the state is unknown.
_PATIENCE_S = 1.0
_LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """A port that is open as long as a process lives."""

    # Distinguishes network namespaces, each of which may have the same addresses.
    place: str
    host: str
    port: int


class Lifelines:
    """The port of this process, and connections to the ports of others.

    A refused connection proves the end of a process if its port was reachable from here before, or is in this network
    namespace. No other outcome proves anything.
    """

    def __init__(self, agent: Any) -> None:
        self._place = _place()
        host = _own_host(agent)
        self._listener = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
        )
        self._listener.setblocking(False)
        # A child with the open port would hide the end of this process.
        close_in_children(self._listener)
        self.own = Address(self._place, host, self._listener.getsockname()[1])
        self._reached: set[Address] = set()
        # Not a SimpleQueue: its get() does not wait in ``threading``, see `_threads`.
        self._asked: queue.Queue[tuple[Address, Callable[[], None]] | None] = queue.Queue()
        self._open: set[tuple[Address, object]] = set()
        Thread(self._work, name="torch_ucx_rpc-lifelines").start()

    def meet(self, address: Address) -> None:
        """Find out once whether this port can be reached from here."""
        if address.place != self._place and address not in self._reached:
            self.ask(address, _nothing)

    def ask(self, address: Address, on_end: Callable[[], None]) -> None:
        """Have ``on_end`` called, on a thread of this object, if the process of this port has ended."""
        if (address, on_end) not in self._open:
            self._open.add((address, on_end))
            self._asked.put((address, on_end))

    def drain(self) -> None:
        """Close connections that others have made. Call this now and then."""
        with contextlib.suppress(OSError):
            while True:
                self._listener.accept()[0].close()

    def close(self) -> None:
        self._listener.close()
        self._asked.put(None)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            address, on_end = asked
            if self._has_ended(address):
                on_end()
            self._open.discard(asked)

    def _has_ended(self, address: Address) -> bool:
        is_near = address.place == self._place
        if not is_near and _is_loopback(address.host):
            return False
        try:
            with socket.create_connection((address.host, address.port), timeout=_PATIENCE_S) as connection:
                # The kernel may have given this end the same port.
                if connection.getsockname() != connection.getpeername():
                    self._reached.add(address)
                    return False
        except ConnectionRefusedError:
            pass
        except OSError:
            return False
        return is_near or address in self._reached


def _nothing() -> None:
    """Do nothing: `meet` only wants to know whether the port answers."""


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:  # a sandbox hides them
        return os.urandom(8).hex()


def _own_host(agent: Any) -> str:
    """Return the address of this host for workers on other hosts; loopback if it has none."""
    store = getattr(agent, "store", None)
    if store is not None:
        return meeting_address(store) or _LOOPBACK
    master = os.environ.get("MASTER_ADDR")
    return (address_towards(master) if master else None) or _LOOPBACK


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")
