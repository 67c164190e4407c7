"""A parameter server: one worker has the model, and trainers train it through an RRef, at their own pace.

The program uses torch.distributed.rpc and names no backend. It runs on the backend of its process.
"""

import argparse
import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer


class ParameterServer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        # The model has one layer: the backward of a second layer would need weights that another trainer may be
        # changing.
        self.model = nn.Linear(4, 1)

    def forward(self, batch):
        return self.model(batch)

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]


server = None
server_lock = threading.Lock()


def get_server():
    """Return the model of all trainers. The first request makes it."""
    global server
    with server_lock:
        if server is None:
            server = ParameterServer()
        return server


def train(name, rank, steps, lr):
    torch.manual_seed(rank)
    server = rpc.remote("ps", get_server)
    optimizer = DistributedOptimizer(torch.optim.SGD, server.rpc_sync().parameter_rrefs(), lr=lr)
    inputs = torch.randn(64, 4)
    targets = inputs.sum(dim=1, keepdim=True)
    losses = []
    for _ in range(steps):
        with dist_autograd.context() as context_id:
            loss = nn.functional.mse_loss(server.rpc_sync().forward(inputs), targets)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    print(f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Train a model that lives on worker 0, from all other workers.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.1)
    arguments = parser.parse_args()

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = "ps" if rank == 0 else f"trainer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world_size)
    if rank > 0:
        train(name, rank, arguments.steps, arguments.lr)
    # The server waits here, and serves the trainers, until they have also called shutdown().
    rpc.shutdown()


if __name__ == "__main__":
    main()
