"""A lifeline ends with its process."""

from __future__ import annotations

import os
import signal
import socket

from tests.unit.test_lifeline import _SOON_S, ends
from torch_ucx_rpc._bootstrap.lifeline import Lifeline


def test_killed_process_ends_connections_despite_its_child() -> None:
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        line = Lifeline("127.0.0.1")
        child = os.fork()
        if child != 0:
            os.write(writing, f"{line.port} {child}\n".encode())
        signal.pause()
    with os.fdopen(reading) as told:
        port, child = map(int, told.readline().split())
    os.close(writing)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_SOON_S) as connection:
            os.kill(parent, signal.SIGKILL)
            assert ends(connection)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(parent, 0)
