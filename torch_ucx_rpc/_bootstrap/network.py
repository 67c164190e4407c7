"""The network interface for UCX, unless the user chooses one: the interface that leads to the Store.

UCX takes the fastest interface of a host, even one that does not lead to the other hosts. Examples are a bridge of
containers, and a network card with another cable. The interface to the Store does lead to the other hosts. InfiniBand
is always included: its devices are not network interfaces, and hosts with InfiniBand usually reach the Store by
Ethernet.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_INTERFACES = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")
# An address for documentation (RFC 5737), which no host has. Packets to it would take the default route.
ELSEWHERE = "192.0.2.1"
# <linux/sockios.h>, <linux/if_arp.h>
_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_MOST_ADDRESSES = 4096
_ARPHRD_INFINIBAND = "32"


def default_devices(store: Store, ucx_path: str) -> str:
    """The value for UCX_NET_DEVICES, or an empty string to leave the choice to UCX.

    UCX chooses if the user has set the variable, or if the workers do not meet by TCP. UCX also chooses if they meet at
    a loopback address: rank 0 may know its own host by that address, while the others use another one.
    """
    host = host_of(store)
    if "UCX_NET_DEVICES" in os.environ or host is None:
        return ""
    interface = interface_to(host)
    if interface is None or interface == "lo":
        return ""
    return ",".join([interface, "lo", *infiniband_devices(ucx_path)])


def interface_to(host: str) -> str | None:
    """The interface by which packets to ``host`` leave; None if there is no route or no such name."""
    own = address_towards(host)
    return None if own is None else interface_with(own)


def address_towards(host: str) -> str | None:
    """This host's address as ``host`` sees it; None if there is no route or no such name."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        # This sends no packet: connecting a datagram socket only looks up the route.
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect(address)
            own: str = asking.getsockname()[0]
            return own.partition("%")[0]
    except (OSError, UnicodeError):
        return None


def meeting_address(store: Store) -> str | None:
    """This host's address for workers on other hosts; None if it has none, or if all workers are on this host.

    The address is that of the interface that leads to the Store. If the workers meet in a file, it is the address of
    the default route.
    """
    host = host_of(store) or (ELSEWHERE if _is_file(store) else None)
    address = None if host is None else address_towards(host)
    return None if address is None or ipaddress.ip_address(address).is_loopback else address


def infiniband_devices(ucx_path: str) -> list[str]:
    """Interfaces over InfiniBand; also InfiniBand and RoCE ports that are up, if the UCX at ``ucx_path`` can use them.

    UCX warns of devices in UCX_NET_DEVICES that it cannot use.
    """
    devices = sorted(p.parent.name for p in _INTERFACES.glob("*/type") if _read(p) == _ARPHRD_INFINIBAND)
    return devices + (active_ports() if has_verbs(ucx_path) else [])


def active_ports() -> list[str]:
    """InfiniBand and RoCE ports that are up, such as "mlx5_0:1"."""
    ports = sorted(_INFINIBAND.glob("*/ports/*"))
    return [f"{port.parent.parent.name}:{port.name}" for port in ports if "ACTIVE" in _read(port / "state")]


def has_verbs(ucx_path: str) -> bool:
    """Tell whether the UCX at ``ucx_path``, its libucp, has the module for InfiniBand."""
    return any((Path(ucx_path).resolve().parent / "ucx").glob("libuct_ib.so*"))


def host_of(store: Store) -> str | None:
    """The host of a TCPStore; None for other Stores."""
    # This import is here, since ``info`` uses this module even if torch cannot be imported.
    from torch._C._distributed_c10d import TCPStore

    innermost = _innermost(store)
    return innermost.host if isinstance(innermost, TCPStore) else None


def _is_file(store: Store) -> bool:
    from torch._C._distributed_c10d import FileStore

    return isinstance(_innermost(store), FileStore)


def _innermost(store: Store) -> Store:
    from torch._C._distributed_c10d import PrefixStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def interface_with(address: str) -> str | None:
    """The interface of this host that has the address, an IPv4 or IPv6 one; None if there is none."""
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        table = _read(Path("/proc/net/if_inet6")).splitlines()
        addresses = {ipaddress.ip_address(bytes.fromhex(line.split()[0])): line.split()[-1] for line in table}
        return addresses.get(wanted)
    # netdevice(7): struct ifconf has the size and the address of a buffer for structures of type ifreq. Each has a
    # name, a family and, 20 bytes in, an IPv4 address.
    room = array.array("B", bytes(_IFREQ_BYTES * _MOST_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _SIOCGIFCONF, struct.pack("iP", len(room), room.buffer_info()[0]))
    (used,) = struct.unpack_from("i", answer)
    for start in range(0, used, _IFREQ_BYTES):
        name, _, ipv4 = struct.unpack_from("16sI4s", room, start)
        if ipaddress.ip_address(ipv4) == wanted:
            # A second address of an interface may have a label: "eth0:1".
            return str(name.rstrip(b"\0").decode()).partition(":")[0]
    # All of 127.0.0.0/8 is loopback, but the kernel lists only one address.
    return "lo" if wanted.is_loopback else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
