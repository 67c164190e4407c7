"""A worker whose life launched.py measures: init_rpc, the first call of all pairs, shutdown; a launcher starts it.

    launched_program.py UCX|TENSORPIPE|none OPTIONS

OPTIONS are those of the backend, as JSON. With none it only imports torch.
"""

import json
import os
import sys

import torch
import torch.distributed.rpc as rpc


def nothing() -> None:
    """The callee of the smallest call."""


def live(backend: str, options: dict[str, object], rank: int, workers: int) -> None:
    torch.set_num_threads(1)
    if backend == "UCX":
        from torch_ucx_rpc import UcxRpcBackendOptions as Options
    else:
        from torch.distributed.rpc import TensorPipeRpcBackendOptions as Options
    rpc.init_rpc(
        f"worker{rank}",
        backend=rpc.BackendType[backend],
        rank=rank,
        world_size=workers,
        rpc_backend_options=Options(**options),
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
