"""Failures of hosts during a test, ordered by its workers: `Fate`."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import TracebackType

from ._virtual_hosts import VirtualHosts


class Fate:
    """Cuts, heals and powers off hosts on the order of a worker. The worker runs on a host, and picks the moment.

    The pytest process runs it in a ``with``, and pickles it to the workers::

        with Fate(hosts) as fate:
            run_workers(2, body, fate, hosts=hosts)     # in the body: fate.of("b", "cut")
    """

    def __init__(self, hosts: VirtualHosts) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._directory = tempfile.TemporaryDirectory(prefix="fate-")
        self._address = str(Path(self._directory.name) / "socket")

    def __getstate__(self) -> str:
        return self._address

    def __setstate__(self, address: str) -> None:
        self._address = address

    def of(self, host: str, what: str, *args: float) -> None:
        """For workers: call the method ``what`` of a `VirtualHost`, such as "cut_for". Return when it is done."""
        # A Unix socket with a path can be reached from every network namespace.
        with Client(self._address) as desk:
            desk.send((host, what, args))
            assert desk.recv() == "done"

    def __enter__(self) -> Fate:
        self._listener = Listener(self._address)
        self._thread = threading.Thread(target=self._serve, name="fate")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with Client(self._address) as desk:
            desk.send(None)
        self._thread.join()
        self._listener.close()
        self._directory.cleanup()

    def _serve(self) -> None:
        while True:
            with self._listener.accept() as worker, contextlib.suppress(EOFError, ConnectionError):
                order = worker.recv()
                if order is None:
                    return
                host, what, args = order
                getattr(self._hosts[host], what)(*args)
                worker.send("done")
