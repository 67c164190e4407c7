"""Worker 1 takes more and more memory, until the kernel kills it; worker 0 prints its error."""

import os

import torch.distributed.rpc as rpc

import torch_ucx_rpc

MIB = 1 << 20


def take_all_memory():
    taken = []
    while True:
        taken.append(b"x" * MIB)


torch_ucx_rpc.init_rpc()
if rpc.get_worker_info().id == 0:
    try:
        rpc.rpc_sync("worker1", take_all_memory, timeout=0)
    except torch_ucx_rpc.errors.WorkerLost as error:
        os.write(1, f"{type(error).__name__}: {error}\n".encode())
    rpc.shutdown(graceful=False)
else:
    rpc.shutdown()
