"""A worker whose life launched.py measures: init_rpc, the first call of all pairs, shutdown; a launcher starts it.

    launched_program.py UCX|TENSORPIPE|none OPTIONS

OPTIONS are those of the backend, as JSON. With none it only imports torch.
"""

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.rpc as rpc

if TYPE_CHECKING:
    from torch._C._distributed_rpc import RpcBackendOptions


def nothing() -> None:
    """The callee of the smallest call."""


def live(backend: str, options: dict[str, Any], rank: int, workers: int) -> None:
    torch.set_num_threads(1)
    backend_options: RpcBackendOptions
    if backend == "UCX":
        from torch_ucx_rpc import UcxRpcBackendOptions

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
    rpc.shutdown()


def main() -> None:
    backend, options = sys.argv[1], json.loads(sys.argv[2])
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if backend != "none":
        live(backend, options, rank, workers)
    print(f"rank {rank} is done", flush=True)


if __name__ == "__main__":
    main()
