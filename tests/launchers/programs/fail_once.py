"""The group forms, and worker 1 fails. After torchrun has restarted all workers, none fails."""

import os
import time

import torch.distributed.rpc as rpc

import torch_ucx_rpc

torch_ucx_rpc.init_rpc()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
rank = rpc.get_worker_info().id
assert rpc.rpc_sync(f"worker{1 - rank}", os.getenv, args=("TORCHELASTIC_RESTART_COUNT",)) == attempt
if attempt == "0":
    if rank == 1:
        raise KeyError("the cause")
    rpc.rpc_sync("worker1", time.sleep, args=(600,), timeout=0)
rpc.shutdown()
os.write(1, f"{rank} is through, in attempt {attempt}\n".encode())
