"""The lifeline: a TCP port by which workers on other hosts see at once that this process has ended.

A failed UCX connection does not say whether the process at its other end has died, or only the connection. Over
InfiniBand and RoCE a connection to a dead process fails only after some ten seconds. The lifeline shows at once that
the process has ended (``csrc/peers/lifelines``). Workers that use InfiniBand or RoCE connect to the lifeline at once.
Other workers connect to it after another connection has failed.

No thread accepts these connections. The kernel completes them, keeps them, and resets them when the process ends. So
this process reads no byte of a stranger, and spends no file on a connection. The kernel may refuse connections beyond
the backlog. Workers without a connection notice the end by the heartbeat.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from torch_ucx_rpc._bootstrap.forks import close_in_children
from torch_ucx_rpc._bootstrap.network import meeting_address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# The kernel lowers this to net.core.somaxconn.
_BACKLOG = 4096


class Lifeline:
    """A port of ``host``, an address of this machine. It is open until `close`, or the end of the process.

    Raises OSError if the address belongs to another machine, or no port is left.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        # A child with the open port would hide the end of this process.
        close_in_children(self._listener)

    def close(self) -> None:
        """End all connections."""
        self._listener.close()


def open_lifeline(store: Store) -> Lifeline | None:
    """Open a lifeline; None where no worker is on another host, or the system refuses the port."""
    host = meeting_address(store)
    try:
        return None if host is None else Lifeline(host)
    except OSError:
        return None
