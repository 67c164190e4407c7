"""w0 watches w1 and its machine: it calls again and again, and has one call open all the time.

It calls for SECONDS, or until a call fails. The trial waits for the fact `ready`.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed.rpc as rpc
from _worker import RANK, join, lanes, leave, tell

SECONDS = float(os.environ["SECONDS_TO_CALL"])
# A worker that has lost the other worker must not wait for this call.
LEAVING_S = 90


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def watch() -> None:
    tensor = torch.ones(1 << 18)
    for _ in range(3):
        rpc.rpc_sync("w1", torch.add, args=(tensor, 1))
    open_call = rpc.rpc_async("w1", sleep, args=(SECONDS + 3,), timeout=0)
    tell(ready=True)
    slowest, calls, end = 0.0, 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        begin = time.monotonic()
        try:
            rpc.rpc_sync("w1", torch.add, args=(tensor, 1), timeout=0)
        except RuntimeError as error:
            tell(calls=calls, told_after_s=time.monotonic() - begin, error=str(error))
            break
        slowest = max(slowest, time.monotonic() - begin)
        calls += 1
        time.sleep(0.05)
    else:
        tell(calls=calls, slowest_s=slowest, lanes=lanes())
    begin = time.monotonic()
    try:
        open_call.wait()
        tell(open_call="answered")
    except RuntimeError:
        tell(open_call="failed", open_call_s=time.monotonic() - begin)


join()
if RANK == 0:
    watch()
leave(LEAVING_S if RANK == 0 else SECONDS + LEAVING_S)
