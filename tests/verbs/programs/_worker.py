"""Common parts of the programs of the two workers, w0 and w1, which write facts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed.rpc as rpc

import torch_ucx_rpc

RANK = int(os.environ["RANK"])
# Twice the time of the longest call on an emulated machine.
_RPC_TIMEOUT_S = 240
_START = time.monotonic()


def tell(**facts: Any) -> None:
    """Write a fact for the trial. It outlives the worker."""
    with Path(os.environ["FACTS"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")
    print(f"[{time.monotonic() - _START:7.2f} s, w{RANK}] {facts}", flush=True)


def join(life: int = 0) -> None:
    """Join the job. The workers meet on the first machine."""
    options = torch_ucx_rpc.UcxRpcBackendOptions(
        rpc_timeout=_RPC_TIMEOUT_S,
        reconnect_limit=float(os.environ.get("RECONNECT_LIMIT", "0")),
        init_method=f"tcp://n1:{29500 + life}",
    )
    begin = time.monotonic()
    rpc.init_rpc(f"w{RANK}", rank=RANK, world_size=2, rpc_backend_options=options)
    tell(init_s=time.monotonic() - begin)


def leave(timeout: float = _RPC_TIMEOUT_S) -> None:
    begin = time.monotonic()
    try:
        rpc.shutdown(timeout=timeout)
    except RuntimeError as error:
        tell(shutdown_error=str(error))
    tell(shutdown_s=time.monotonic() - begin)


def lanes() -> list[str]:
    """Return the lanes to the other worker."""
    (other,) = (peer for peer in torch_ucx_rpc.statistics().peers if peer.name != f"w{RANK}")
    return list(other.lanes)
