"""Whether a server listens at an address, without the Store's client, which would wait inside C++."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import sys
import time
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from torch_ucx_rpc._bootstrap.deadline import Deadline
from torch_ucx_rpc._bootstrap.network import interface_with
from torch_ucx_rpc.errors import JoinTimedOut

_LISTENING = "0A"  # in /proc/net/tcp
_ROW_BYTES = 150

# The number of looks into the kernel's table, in 0.3 s, for a server at an address of this host. Then connections are
# tried, as for other hosts.
_LOOKS = 5


def is_this_host(host: str) -> bool:
    """Whether an address of ``host``, a name or an address, is an address of this host.

    A successful bind proves nothing: ``net.ipv4.ip_nonlocal_bind`` allows it for any address.
    """
    return any(_is_own(address) for address in _addresses_of(host))


def _addresses_of(host: str) -> list[IPv4Address | IPv6Address]:
    """The addresses of a name; none if it does not resolve."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return []
    # A link-local address may name its interface: fe80::1%eth0.
    return [ip_address(str(address[0]).partition("%")[0]) for *_, address in found]


def _is_own(address: IPv4Address | IPv6Address) -> bool:
    return address.is_unspecified or interface_with(str(address)) is not None


def await_listener(host: str, port: int, server: str, deadline: Deadline, hint: str) -> None:
    """Return when a server listens. TCPStore would wait too, but in C++, and print a stack for each failure."""
    pause = 0.01
    for look in itertools.count():
        try:
            _check_listener(host, port, min(1.0, max(0.05, deadline.remaining())), trusts_table=look < _LOOKS)
            return
        except OSError as error:
            if deadline.passed():
                raise JoinTimedOut(
                    f"nobody listens at {host}:{port} after {deadline.timeout:g} s ({error}): {server} must be running "
                    f"there; check that it has started, and that MASTER_ADDR and MASTER_PORT, or the init_method, name "
                    f"its host and port and are the same for every worker.{hint}",
                    timeout=deadline.timeout,
                ) from error
        time.sleep(min(pause, deadline.remaining()))
        pause = min(2 * pause, 0.25)


def _check_listener(host: str, port: int, limit: float, *, trusts_table: bool) -> None:
    """Raise OSError unless a server listens there."""
    is_there = _is_listened_at_here(host, port)
    if is_there:
        return
    refused = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    if is_there is False and trusts_table:
        raise refused
    with socket.create_connection((host, port), timeout=limit) as connection:
        # The kernel may have given this end the same port: TCP then connects it to itself.
        if connection.getsockname() == connection.getpeername():
            raise refused


def _is_listened_at_here(host: str, port: int) -> bool | None:
    """Look up in the kernel's table whether a server of this host listens there; None for addresses of other hosts.

    This spares the Store a connection that it would have to answer. The table does not show servers behind a port or an
    address that the kernel hands on: a packet filter to a container of this host, for one, or IPVS to another host.
    """
    addresses = _addresses_of(host)
    if not addresses or not all(map(_is_own, addresses)):
        return None
    wanted = {text for address in addresses for text in _in_table(address)}
    try:
        for table in ("tcp", "tcp6"):
            for local in _listening(Path("/proc/net", table)):
                address, _, its_port = local.partition(":")
                if int(its_port, 16) == port and address in wanted:
                    return True
    except (OSError, ValueError):
        return None
    return False


def _listening(table: Path) -> Iterator[str]:
    """Yield the addresses with ports of the servers in this table of the kernel.

    They come first in it. The kernel takes some 4 ms to look for all connections, so this reads row by row, and stops
    at the first connection.
    """
    # The file does not exist if IPv6 is off.
    if not table.exists():
        return
    with table.open("rb", buffering=0) as file:
        begun = b""
        while chunk := file.read(_ROW_BYTES):
            *rows, begun = (begun + chunk).split(b"\n")
            for row in rows:
                _, local, _, state, *_ = row.decode("ascii").split()
                if state == _LISTENING:
                    yield local
                # The first row has the names of the columns.
                elif local != "local_address":
                    return


def _in_table(address: IPv4Address | IPv6Address) -> set[str]:
    """Return the addresses in /proc/net/tcp and tcp6 at which a server can be reached through ``address``."""

    def text(packed: bytes) -> str:
        words = (packed[start : start + 4] for start in range(0, len(packed), 4))
        return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)

    own = {text(address.packed), text(IPv6Address(0).packed)}
    if isinstance(address, IPv4Address):
        own |= {text(IPv4Address(0).packed), text(IPv6Address(f"::ffff:{address}").packed)}
    return own
