"""UCXX: active messages, which move the array's memory, and name no function to call.

A setting makes UCXX use shared memory. Without it ("plain"), UCXX's connections use TCP.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

# UCX reads this when it is loaded.
LOG = Path(tempfile.mkdtemp(), "ucx")
os.environ.update(UCX_LOG_LEVEL="info", UCX_LOG_FILE=str(LOG))

import numpy as np  # noqa: E402

from benchmarks.peers.measuring import Figures, measured, server, serving_at, wait_for_the_end  # noqa: E402

if TYPE_CHECKING:
    import ucxx

LEAVES_THREADS = True


def load(name: str) -> None:
    global ucxx
    if name == "UCXX":
        os.environ["UCX_MM_ERROR_HANDLING"] = "y"
    import ucxx


def serve(name: str) -> None:
    load(name)

    async def main() -> None:
        async def echo(endpoint: ucxx.Endpoint) -> None:
            while True:
                await endpoint.am_send(np.asarray(await endpoint.am_recv()))

        listener = ucxx.create_listener(echo)
        serving_at(str(listener.port))
        await asyncio.get_running_loop().run_in_executor(None, wait_for_the_end)

    asyncio.run(main())


def measure(name: str) -> Figures:
    load(name)
    loop = asyncio.new_event_loop()
    with server(name) as port:
        endpoint = loop.run_until_complete(ucxx.create_endpoint("127.0.0.1", int(port)))

        async def send_and_receive(array: np.ndarray, echoes: int) -> list[np.ndarray]:
            sends = [asyncio.ensure_future(endpoint.am_send(array)) for _ in range(echoes)]
            answers = [np.asarray(await endpoint.am_recv()).view(array.dtype) for _ in range(echoes)]
            await asyncio.gather(*sends)
            return answers

        def echo_at_once(array: np.ndarray, echoes: int) -> list[np.ndarray]:
            return loop.run_until_complete(send_and_receive(array, echoes))

        return {**measured(lambda array: echo_at_once(array, 1)[0], echo_at_once), "lanes": lanes()}


def lanes() -> str:
    """Return the lanes of active messages of the last connection in UCX's log."""
    # UCX's output is in a buffer of the C library.
    ctypes.CDLL(None).fflush(None)
    found = re.findall(r"cfg#\d+.*\bam\(([^)]*)\)", LOG.read_text(encoding="utf-8", errors="replace"))
    return found[-1] if found else "unknown lanes"
