"""`close_in_children`: sockets that a forked child closes.

A child has copies of all files of its parent. A listening socket among them would outlive the parent: its port would
stay taken, and its connections open.
"""

from __future__ import annotations

import os
import socket
import weakref

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(listener: socket.socket) -> None:
    """Let every forked child close ``listener``, as long as it exists here."""
    _sockets.add(listener)


def _close_all() -> None:
    for listener in list(_sockets):
        listener.close()


os.register_at_fork(after_in_child=_close_all)
