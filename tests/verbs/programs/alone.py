"""Transports that cannot connect: the error of the first call, and its time."""

from __future__ import annotations

import time

import torch
import torch.distributed.rpc as rpc
from _worker import RANK, join, leave, tell

join()
if RANK == 0:
    begin = time.monotonic()
    try:
        rpc.rpc_sync("w1", torch.add, args=(torch.ones(2), 1))
    except RuntimeError as error:
        tell(error=str(error))
    tell(told_after_s=time.monotonic() - begin)
leave(30)
