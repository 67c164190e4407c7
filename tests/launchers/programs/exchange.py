"""``exchange.py [MIB]``: each worker sends all others a small and a large tensor, and prints the lanes."""

import json
import os
import sys

import torch
import torch.distributed.rpc as rpc

import torch_ucx_rpc

LARGE = int(sys.argv[1] if len(sys.argv) > 1 else 8) << 18

torch_ucx_rpc.init_rpc()
me = rpc.get_worker_info()
others = [peer for peer in torch_ucx_rpc.statistics().peers if peer.name != me.name]
for other in others:
    for size in (1, LARGE):
        tensor = torch.arange(size, dtype=torch.float32)
        assert torch.equal(rpc.rpc_sync(other.name, torch.add, args=(tensor, 1)), tensor + 1)
lanes = {peer.name: sorted(peer.lanes) for peer in torch_ucx_rpc.statistics().peers if peer.name != me.name}
os.write(1, f"{json.dumps({'exchanged': me.name, 'pid': os.getpid(), 'lanes': lanes})}\n".encode())
rpc.shutdown()
