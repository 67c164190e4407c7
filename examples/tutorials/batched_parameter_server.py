"""A parameter server that answers when every trainer's gradients have arrived. No thread waits for them."""

import os
import threading

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn

TRAINERS = 2
STEPS = 10


class BatchedParameterServer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.lock = threading.Lock()
        self.updated = torch.futures.Future()
        self.came = 0

    def get_model(self):
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(server_rref, gradients):
        self = server_rref.local_value()
        with self.lock:
            self.came += 1
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad += gradient / TRAINERS
            updated = self.updated
            if self.came == TRAINERS:
                self.came = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.updated = torch.futures.Future()
                updated.set_result(self.model)
        return updated


def train(server_rref, rank):
    torch.manual_seed(rank)
    inputs = torch.randn(32, 4)
    targets = inputs.sum(dim=1, keepdim=True)
    model = server_rref.rpc_sync().get_model()
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        gradients = [parameter.grad for parameter in model.parameters()]
        model = rpc.rpc_sync(
            server_rref.owner(), BatchedParameterServer.update_and_fetch_model, args=(server_rref, gradients)
        )
    assert losses[-1] < losses[0] / 2, losses
    return losses[-1]


def run(rank, world_size):
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=30)
    name = "server" if rank == 0 else f"trainer_{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        server_rref = rpc.RRef(BatchedParameterServer())
        trained = [rpc.rpc_async(f"trainer_{rank}", train, args=(server_rref, rank)) for rank in range(1, world_size)]
        print("losses:", [round(loss, 5) for loss in torch.futures.wait_all(trained)])
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run, args=(1 + TRAINERS,), nprocs=1 + TRAINERS)
