"""A recurrent model in two places: embedding and decoder on a server, the LSTM between them at the trainer."""

import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import DistributedOptimizer

TOKENS = 20
WIDTH = 16


class EmbeddingTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(TOKENS, WIDTH)
        nn.init.normal_(self.encoder.weight, generator=torch.Generator().manual_seed(0))

    def forward(self, tokens):
        return self.encoder(tokens)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(WIDTH, TOKENS)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.2, 0.2, generator=torch.Generator().manual_seed(1))

    def forward(self, output):
        return self.decoder(output)


def parameter_rrefs_of(module_rref):
    return [rpc.RRef(parameter) for parameter in module_rref.local_value().parameters()]


class RNNModel(nn.Module):
    def __init__(self, server):
        super().__init__()
        self.server = server
        self.embedding = rpc.remote(server, EmbeddingTable)
        torch.manual_seed(2)
        self.rnn = nn.LSTM(WIDTH, WIDTH)
        self.decoder = rpc.remote(server, Decoder)

    def forward(self, tokens, hidden):
        embedded = self.embedding.rpc_sync(timeout=30).forward(tokens)
        output, hidden = self.rnn(embedded, hidden)
        return self.decoder.rpc_sync().forward(output), hidden

    def parameter_rrefs(self):
        remote = [rpc.rpc_sync(self.server, parameter_rrefs_of, args=(m,)) for m in (self.embedding, self.decoder)]
        return [*remote[0], *[rpc.RRef(parameter) for parameter in self.rnn.parameters()], *remote[1]]


def train():
    model = RNNModel("server")
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=2.0)
    torch.manual_seed(3)
    text = torch.randint(TOKENS, (9, 4))
    hidden = (torch.zeros(1, 4, WIDTH), torch.zeros(1, 4, WIDTH))
    losses = []
    for _ in range(20):
        hidden = tuple(state.detach() for state in hidden)
        with dist_autograd.context() as context_id:
            output, hidden = model(text[:-1], hidden)
            loss = nn.functional.cross_entropy(output.reshape(-1, TOKENS), text[1:].reshape(-1))
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(round(loss.item(), 3))
    assert losses[-1] < 0.8 * losses[0], losses
    print("losses:", losses)


def run(rank, world_size):
    torch.set_num_threads(1)
    rpc.init_rpc(
        "trainer" if rank == 0 else "server",
        backend=rpc.BackendType.TENSORPIPE,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=20),
    )
    if rank == 0:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run, args=(2,), nprocs=2)
