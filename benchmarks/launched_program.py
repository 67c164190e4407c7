"""A worker that a launcher starts and whose life launched.py measures: init_rpc, the first call of all pairs, shutdown.

    launched_program.py UCX|TENSORPIPE OPTIONS [memory]

OPTIONS are the backend's options, as JSON. With "memory" the worker prints its memory (Pss) once all are connected.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.rpc as rpc

if sys.argv[1] == "UCX":
    from torch_ucx_rpc import UcxRpcBackendOptions
if TYPE_CHECKING:
    from torch._C._distributed_rpc import RpcBackendOptions


def nothing() -> None:
    """The callee of the smallest call."""


def pss_kib() -> int:
    found = re.search(r"^Pss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def live(backend: str, options: dict[str, Any], rank: int, workers: int, measures: bool) -> int:
    """Run the worker. Return its memory in KiB, or 0 if it is not measured."""
    torch.set_num_threads(1)
    backend_options: RpcBackendOptions
    if backend == "UCX":
        backend_options = UcxRpcBackendOptions(**options)
    else:
        backend_options = rpc.TensorPipeRpcBackendOptions(**options)
    rpc.init_rpc(
        f"worker{rank}",
        backend=rpc.BackendType[backend],
        rank=rank,
        world_size=workers,
        rpc_backend_options=backend_options,
    )
    torch.futures.wait_all([rpc.rpc_async(other, nothing) for other in range(workers) if other != rank])
    memory = pss_kib() if measures else 0
    rpc.shutdown()
    return memory


def main() -> None:
    backend, options = sys.argv[1], json.loads(sys.argv[2])
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    memory = live(backend, options, rank, workers, measures=sys.argv[3:] == ["memory"])
    print(f"rank {rank} is done, with {memory} KiB", flush=True)


if __name__ == "__main__":
    main()
