"""All kinds of traffic between two machines: calls, large tensors, RRefs, gradients, floods.

The variables LARGE_MIB and FLOOD_MIB give the sizes.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed.autograd as autograd
import torch.distributed.rpc as rpc
from _worker import RANK, join, lanes, leave, tell
from torch.distributed.optim import DistributedOptimizer

LARGE_MIB = int(os.environ.get("LARGE_MIB", "64"))
FLOOD_MIB = int(os.environ.get("FLOOD_MIB", "100"))
SMALL_CALLS = 100
DEPTH = 60


def random_bytes(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (LARGE_MIB << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def echo(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    assert torch.equal(tensor, random_bytes(seed))
    return tensor


def bounce(times: int) -> int:
    return 0 if times == 0 else 1 + rpc.rpc_sync(f"w{1 - RANK}", bounce, args=(times - 1,))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def rrefs(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def small_calls() -> None:
    begin = time.monotonic()
    for i in range(SMALL_CALLS):
        assert rpc.rpc_sync("w1", torch.add, args=(torch.tensor([i, 7]), 1)).tolist() == [i + 1, 8]
    tell(small_call_ms=(time.monotonic() - begin) * 1000 / SMALL_CALLS)


def large_tensors() -> None:
    tensor = random_bytes(7)
    begin = time.monotonic()
    assert torch.equal(rpc.rpc_sync("w1", echo, args=(tensor, 7)), tensor)
    tell(large_mib=LARGE_MIB, large_s=time.monotonic() - begin)


def rrefs() -> None:
    rref = rpc.remote("w1", torch.full, args=((1000, 1000), 2.0))
    assert torch.equal(rref.to_here(), torch.full((1000, 1000), 2.0))
    assert rref.rpc_sync().sum().item() == 2e6
    tell(rref_mib=4 * 1000 * 1000 / 2**20)


def gradients() -> None:
    model = rpc.remote("w1", Model)
    losses = []
    for _ in range(3):
        with autograd.context() as context:
            loss = model.rpc_sync().forward(torch.ones(64, 256)).pow(2).sum()
            autograd.backward(context, [loss])
            DistributedOptimizer(torch.optim.SGD, model.rpc_sync().rrefs(), lr=1e-5).step(context)
            losses.append(loss.item())
    tell(losses=losses)


def nested_calls() -> None:
    tell(depth=rpc.rpc_sync("w1", bounce, args=(DEPTH - 1,)) + 1)


def flood() -> None:
    tensors = [torch.full((1 << 18,), float(i)) for i in range(FLOOD_MIB)]
    begin = time.monotonic()
    answers = [rpc.rpc_async("w1", torch.add, args=(tensor, 1)) for tensor in tensors]
    for i, answer in enumerate(answers):
        assert torch.equal(answer.wait(), torch.full((1 << 18,), i + 1.0))
    tell(flood_mib=FLOOD_MIB, flood_s=time.monotonic() - begin)


join()
if RANK == 0:
    small_calls()
    large_tensors()
    rrefs()
    gradients()
    nested_calls()
    flood()
    tell(lanes=lanes())
leave()
