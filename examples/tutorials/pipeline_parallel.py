"""A pipeline: two workers each hold half of the model, and micro-batches go through both at the same time."""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import DistributedOptimizer


class Shard(nn.Module):
    def __init__(self, seed, *layers):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(*(layer(*arguments) for layer, *arguments in layers))
        self.lock = threading.Lock()

    def forward(self, input_rref):
        micro_batch = input_rref.to_here()
        with self.lock:
            return self.layers(micro_batch)

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Pipeline(nn.Module):
    def __init__(self, split_size, workers):
        super().__init__()
        self.split_size = split_size
        self.first = rpc.remote(workers[0], Shard, args=(0, (nn.Linear, 8, 32), (nn.Tanh,)))
        self.second = rpc.remote(workers[1], Shard, args=(1, (nn.Linear, 32, 8), (nn.Tanh,), (nn.Linear, 8, 1)))

    def forward(self, batch):
        outputs = []
        for micro_batch in batch.split(self.split_size):
            between = self.first.remote().forward(rpc.RRef(micro_batch))
            outputs.append(self.second.rpc_async().forward(between))
        return torch.cat(torch.futures.wait_all(outputs))

    def parameter_rrefs(self):
        return [*self.first.rpc_sync().parameter_rrefs(), *self.second.rpc_sync().parameter_rrefs()]


def train(split_size):
    model = Pipeline(split_size, ["worker1", "worker2"])
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=0.1)
    torch.manual_seed(2)
    inputs = torch.randn(24, 8)
    targets = inputs.mean(dim=1, keepdim=True)
    losses = []
    for _ in range(8):
        with dist_autograd.context() as context_id:
            loss = nn.functional.mse_loss(model(inputs), targets)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses
    return losses


def run(rank, world_size):
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=32)
    name = "master" if rank == 0 else f"worker{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        whole, split = train(split_size=24), train(split_size=4)
        torch.testing.assert_close(torch.tensor(whole), torch.tensor(split))
        print("losses:", [round(loss, 3) for loss in split])
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run, args=(3,), nprocs=3)
