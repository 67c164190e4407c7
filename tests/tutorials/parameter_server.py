"""A parameter server: the model lives on one worker, and trainers run it there through an RRef, at their own pace."""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import DistributedOptimizer

TRAINERS = 2
STEPS = 15


class ParameterServer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        # One layer: the backward of a second would need weights that the other trainer may be changing.
        self.model = nn.Linear(4, 1)

    def forward(self, batch):
        return self.model(batch)

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def gradients(self, context_id):
        return {tuple(p.shape): g for p, g in dist_autograd.get_gradients(context_id).items()}


server = None
server_lock = threading.Lock()


def get_server():
    """The same one for every trainer, made when the first asks."""
    global server
    with server_lock:
        if server is None:
            server = ParameterServer()
        return server


def call_method(method, rref, *args):
    return method(rref.local_value(), *args)


def remote_method(method, rref, *args):
    return rpc.rpc_sync(rref.owner(), call_method, args=(method, rref, *args))


class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.server = rpc.remote("parameter_server", get_server)

    def forward(self, batch):
        return remote_method(ParameterServer.forward, self.server, batch)

    def parameter_rrefs(self):
        return remote_method(ParameterServer.parameter_rrefs, self.server)


def train(rank):
    torch.manual_seed(rank)
    trainer = Trainer()
    optimizer = DistributedOptimizer(torch.optim.SGD, trainer.parameter_rrefs(), lr=0.1)
    inputs = torch.randn(64, 4)
    targets = inputs.sum(dim=1, keepdim=True)
    losses = []
    for step in range(STEPS):
        with dist_autograd.context() as context_id:
            loss = nn.functional.mse_loss(trainer(inputs), targets)
            dist_autograd.backward(context_id, [loss])
            if step == 0:
                gradients = remote_method(ParameterServer.gradients, trainer.server, context_id)
                assert (1, 4) in gradients, "the server has no gradients of this trainer's step"
            optimizer.step(context_id)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses


def run(rank, world_size):
    torch.set_num_threads(1)
    name = "parameter_server" if rank == 0 else f"trainer_{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world_size)
    if rank > 0:
        train(rank)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run, args=(1 + TRAINERS,), nprocs=1 + TRAINERS)
    print("every trainer's loss fell")
