"""Worker 1 takes more and more memory until the kernel kills it. Worker 0 prints the error of its call."""

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
