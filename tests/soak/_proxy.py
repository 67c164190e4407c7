"""A proxy for all TCP connections from a virtual host to the others, like a service mesh's: `Proxy`.

Netfilter (``nft``) redirects the connections to it. When the proxy dies, its connections end. Its port stays open, as
with systemd's sockets, so new connections wait. A port that refused them would look like the end of the callees.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading

from tests.support.labs import VirtualHost

_PORT = 15001
_MARK = 7
# From <linux/netfilter_ipv4.h> and, since Linux 6.15, <linux/tcp.h>.
_SO_ORIGINAL_DST, _TCP_RTO_MAX_MS = 80, 44
_RTO_MAX_MS = 1000
_PIECE = 1 << 20
_RULES = """
table ip proxy {
  chain out {
    type nat hook output priority -100
    meta mark != %d ip daddr {%s} meta l4proto tcp redirect to :%d
  }
}
"""


class Proxy:
    """The proxy of ``host`` to the hosts with these addresses, until ``close()``. At first the proxy lives."""

    def __init__(self, host: VirtualHost, addresses: list[str]) -> None:
        command = [sys.executable, "-m", "tests.soak._proxy"]
        self._process = host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._order("live")
        rules = _RULES % (_MARK, ", ".join(addresses), _PORT)
        host.run(["nft", "--file", "-"], input=rules, text=True, check=True)

    def die(self) -> None:
        self._order("die")

    def live_again(self) -> None:
        self._order("live")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _order(self, what: str) -> None:
        print(what, file=self._process.stdin, flush=True)
        if self._process.stdout.readline() != f"{what}\n":
            raise RuntimeError("the proxy has ended")


def _obey() -> None:
    """Keep the port open, and let a child serve it from each "live" to the next "die"."""
    listener = socket.create_server(("0.0.0.0", _PORT), backlog=1024)
    child = 0
    for line in sys.stdin:
        if line == "live\n" and not (child := os.fork()):
            _serve(listener)
        if line == "die\n":
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        print(line, end="", flush=True)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_lead, args=(connection,), daemon=True).start()


def _lead(client: socket.socket) -> None:
    target = client.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, _MARK)
    for end in (client, server):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # TCP's pauses double during a cut. This bounds the wait after the cut.
        with contextlib.suppress(OSError):
            end.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RTO_MAX_MS)
    try:
        server.connect((socket.inet_ntoa(target[4:8]), int.from_bytes(target[2:4], "big")))
    except OSError:
        client.close()
        return
    back = threading.Thread(target=_pass_on, args=(server, client), daemon=True)
    back.start()
    _pass_on(client, server)
    back.join()
    client.close()
    server.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    piece = bytearray(_PIECE)
    view = memoryview(piece)
    try:
        while count := source.recv_into(piece):
            target.sendall(view[:count])
        target.shutdown(socket.SHUT_WR)
    except OSError:
        # One connection is broken: shut both down, so that the threads of both directions end.
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    _obey()
