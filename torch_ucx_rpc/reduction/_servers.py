"""The servers that this worker uses, by name: `servers`."""

from __future__ import annotations

import threading

from torch_ucx_rpc._workers.life import Life, PerLife
from torch_ucx_rpc._workers.lost import Gone
from torch_ucx_rpc.reduction._meeting import meetings
from torch_ucx_rpc.reduction._server import Server


class Servers:
    """The servers that this worker uses, by name. Any thread may use it."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self._lock = threading.Lock()
        self._servers: dict[str, Server] = {}
        self._serving: dict[str, threading.Lock] = {}
        life.watch(self._on_gone)
        life.before_leaving(self._before_leaving)

    def get(self, name: str) -> Server | None:
        with self._lock:
            return self._servers.get(name)

    def serving(self, name: str) -> threading.Lock:
        """Held while a server is made or found: threads of this worker that ask at once are one trainer."""
        with self._lock:
            return self._serving.setdefault(name, threading.Lock())

    def keep(self, server: Server) -> None:
        with self._lock:
            self._servers[server.name] = server
        meetings().use(server)

    def _before_leaving(self) -> None:
        with self._lock:
            servers = list(self._servers.values())
        for server in servers:
            server.before_leaving()

    def _on_gone(self, gone: Gone) -> None:
        with self._lock:
            servers = list(self._servers.values())
        for server in servers:
            server.on_gone(gone.name)


servers = PerLife(Servers)
