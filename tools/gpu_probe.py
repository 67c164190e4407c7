"""Echo tensors between two workers: times, lanes, and what the driver says about their memory.

Prints each finding at once, as a line of JSON between lines of UCX's log. tools/gpu_check.py runs it with several
settings of UCX. By hand:

    UCX_PROTO_INFO=y python tools/gpu_probe.py
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import _get_current_rpc_agent

SIZES = (4 * 2**10, 2**20, 64 * 2**20)
CALLS = 10
# CU_POINTER_ATTRIBUTE_*: number and bytes.
ATTRIBUTES = {"memory type": (2, 4), "legacy IPC": (10, 4), "allowed handles": (14, 8), "managed": (8, 4)}


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def attributes_of(tensor: torch.Tensor) -> dict[str, int]:
    """Return the attributes that UCX asks for. A query that fails has the driver's error instead."""
    driver = ctypes.CDLL("libcuda.so.1")
    found = {}
    for name, (number, _) in ATTRIBUTES.items():
        value = ctypes.c_uint64(0)
        failed = driver.cuPointerGetAttribute(ctypes.byref(value), number, ctypes.c_uint64(tensor.data_ptr()))
        found[name] = -failed if failed else value.value
    begin, length = ctypes.c_uint64(0), ctypes.c_size_t(0)
    failed = driver.cuMemGetAddressRange_v2(
        ctypes.byref(begin), ctypes.byref(length), ctypes.c_uint64(tensor.data_ptr())
    )
    end = tensor.data_ptr() + tensor.nbytes
    return {**found, "range": length.value, "range covers it": int(not failed and end <= begin.value + length.value)}


def measure(name: str, device: str, target: str) -> None:
    has_gpu = torch.cuda.is_available()  # asking takes half a millisecond
    for size in SIZES:
        tensor = torch.zeros(size, dtype=torch.uint8, device=device)

        def call(tensor: torch.Tensor = tensor) -> float:
            began = time.perf_counter()
            rpc.rpc_sync("worker1", echo, (tensor,))
            if has_gpu:
                torch.cuda.synchronize()
            return 1e6 * (time.perf_counter() - began)

        first = call()
        times = sorted(call() for _ in range(CALLS))
        say(
            echo=name,
            to=target,
            bytes=size,
            first_us=round(first),
            p50_us=round(times[CALLS // 2]),
            worst_us=round(times[-1]),
        )


def work(rank: int, store: str) -> None:
    import torch_ucx_rpc

    has_gpu = torch.cuda.is_available()
    maps: dict[str, dict[int | str | torch.device, int]] = {f"worker{1 - rank}": {0: 0}} if has_gpu else {}
    options = torch_ucx_rpc.UcxRpcBackendOptions(init_method=store, device_maps=maps, rpc_timeout=15)
    began = time.perf_counter()
    rpc.init_rpc(f"worker{rank}", backend="UCX", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        say(init_rpc_s=round(time.perf_counter() - began, 2), ucx=torch_ucx_rpc._C.ucx_library())
        measure("cpu", "cpu", "cpu")
        if has_gpu:
            found = attributes_of(torch.zeros(2**20, device="cuda"))
            # The rule of csrc/transport/ucp/device_sharing.cpp. `staged_bytes` below shows its result.
            say(attributes=found, can_share=found["legacy IPC"] == 1 and found["range covers it"] == 1)
            measure("gpu", "cuda", "gpu")
        debug = _get_current_rpc_agent().get_debug_info()
        say(debug={name: value for name, value in sorted(debug.items()) if "lanes" in name or "device" in name})
    rpc.shutdown()


def main() -> int:
    if len(sys.argv) == 3:
        work(int(sys.argv[1]), sys.argv[2])
        return 0
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        store = Path(folder, "store").as_uri()
        workers = [subprocess.Popen([sys.executable, __file__, str(rank), store]) for rank in (0, 1)]
        for worker in workers:
            ending.callback(worker.kill)
        ended = [worker.wait() for worker in workers]
    say(ended=ended)
    return 0 if ended == [0, 0] else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
