"""Worker 1 fails while the others wait for it: by an exception or by SIGKILL. With "wait" no worker fails."""

import os
import signal
import sys
import time

import torch.distributed.rpc as rpc

import torch_ucx_rpc

torch_ucx_rpc.init_rpc()
rank = rpc.get_worker_info().id
os.write(1, f"{rank} is up, pid {os.getpid()}\n".encode())
if sys.argv[1] == "wait":
    time.sleep(600)
if rank == 1:
    # The others have called worker 1 by then, as their errors show.
    time.sleep(1)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError("the cause")
rpc.rpc_sync("worker1", time.sleep, args=(600,), timeout=0)
