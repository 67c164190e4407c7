"""Finds out whether a server listens at an address. The Store's own client would wait inside C++."""

from __future__ import annotations

# getaddrinfo imports this codec. Forked workers share it if it is imported before the fork.
import encodings.idna  # noqa: F401
import errno
import os
import socket
import time
from ipaddress import IPv4Address, IPv6Address, ip_address

from torch_ucx_rpc._bootstrap.deadline import Deadline
from torch_ucx_rpc._bootstrap.network import interface_with
from torch_ucx_rpc.errors import JoinTimedOut


def is_this_host(host: str) -> bool:
    """Whether an address of ``host``, a name or an address, is an address of this host.

    A successful bind proves nothing: ``net.ipv4.ip_nonlocal_bind`` allows it for any address.
    """
    return any(_is_own(address) for address in _addresses_of(host))


def _addresses_of(host: str) -> list[IPv4Address | IPv6Address]:
    """The addresses of a name; none if it does not resolve."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: no host can have this name, such as "a..b"
        return []
    # A link-local address may name its interface: fe80::1%eth0.
    return [ip_address(str(address[0]).partition("%")[0]) for *_, address in found]


def _is_own(address: IPv4Address | IPv6Address) -> bool:
    return address.is_unspecified or interface_with(str(address)) is not None


def await_name(host: str, deadline: Deadline) -> None:
    """Return when an address of the name is known. TCPStore would try for longer, and print a stack for each failure.

    In a cluster the name of a new container may take some seconds to appear.
    """
    while not _addresses_of(host):
        if deadline.passed():
            raise JoinTimedOut(
                f"rank 0 runs on {socket.gethostname()}, where {host!r} is not the name of any host, after "
                f"{deadline.timeout:g} s: set MASTER_ADDR, or the host of the init_method, to the name or address of "
                f"rank 0's host.",
                timeout=deadline.timeout,
            )
        time.sleep(min(0.25, deadline.remaining()))


def await_listener(host: str, port: int, server: str, deadline: Deadline, hint: str) -> None:
    """Return when a server listens. TCPStore would wait too, but in C++, and print a stack for each failure."""
    pause = 0.01
    while True:
        try:
            _check_listener(host, port, min(1.0, max(0.05, deadline.remaining())))
            return
        except (OSError, UnicodeError) as error:
            if deadline.passed():
                raise JoinTimedOut(
                    f"no server listens at {host}:{port} after {deadline.timeout:g} s ({error}): {server} must be "
                    f"running there; check that it has started, and that MASTER_ADDR and MASTER_PORT, or the "
                    f"init_method, name its host and port and are the same for every worker.{hint}",
                    timeout=deadline.timeout,
                ) from error
        time.sleep(min(pause, deadline.remaining()))
        pause = min(2 * pause, 0.25)


def _check_listener(host: str, port: int, limit: float) -> None:
    """Raise OSError unless a server listens there. The connection costs this worker and the Store 50 us together."""
    with socket.create_connection((host, port), timeout=limit) as connection:
        # The kernel may have given this end the same port: TCP then connects it to itself.
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
