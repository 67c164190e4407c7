"""A worker joins without arguments, calls all others, and prints one line."""

import json
import os
import socket

import torch.distributed.rpc as rpc

import torch_ucx_rpc

torch_ucx_rpc.init_rpc()
me = rpc.get_worker_info()
names = sorted(info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos())
hosts = [rpc.rpc_sync(name, socket.gethostname) for name in names]
line = json.dumps({"name": me.name, "rank": me.id, "calls": names, "hosts": hosts, "on": socket.gethostname()})
# One write, because launchers may mix the lines of several workers.
os.write(1, f"{line}\n".encode())
rpc.shutdown()
