"""Data and model parallelism at once: trainers share a dense layer by DDP, and an embedding on a server by RPC."""

import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

TRAINERS = 2
MASTER = TRAINERS
SERVER = TRAINERS + 1

# The models stay here for the life of the process. In torch 2.13, the end of a DDP module can wait for a thread that
# waits for the GIL.
models = []


class HybridModel(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        torch.manual_seed(1)
        self.dense = DistributedDataParallel(nn.Linear(16, 4))

    def forward(self, indices, offsets):
        return self.dense(self.embedding.forward(indices, offsets))


def train(embedding, rank):
    model = HybridModel(embedding)
    models.append(model)
    parameters = [*embedding.remote_parameters(), *(rpc.RRef(p) for p in model.dense.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.2)
    torch.manual_seed(rank)
    indices = torch.randint(50, (24,))
    offsets = torch.arange(0, 24, 3)
    targets = torch.randint(4, (8,))
    losses = []
    for _ in range(20):
        with dist_autograd.context() as context_id:
            loss = nn.functional.cross_entropy(model(indices, offsets), targets)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses
    return [parameter.detach() for parameter in model.dense.parameters()]


def run(rank, world_size):
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['RPC_PORT']}", num_worker_threads=8
    )
    names = {MASTER: "master", SERVER: "server"}
    if rank < TRAINERS:  # done before the master can ask for training
        dist.init_process_group("gloo", rank=rank, world_size=TRAINERS)
    rpc.init_rpc(names.get(rank, f"trainer{rank}"), rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == MASTER:
        torch.manual_seed(0)
        embedding = RemoteModule("server", nn.EmbeddingBag, args=(50, 16), kwargs={"mode": "sum"})
        trained = [rpc.rpc_async(f"trainer{i}", train, args=(embedding, i)) for i in range(TRAINERS)]
        first, second = (future.wait() for future in trained)
        torch.testing.assert_close(first, second)
        print("every trainer's loss fell, and their dense layers are the same")
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    os.environ.setdefault("RPC_PORT", "29501")
    mp.spawn(run, args=(TRAINERS + 2,), nprocs=TRAINERS + 2)
