"""Gradients of torch's DistributedDataParallel by way of a server: `state` and `hook`; and `plan`, the way they go.

Each bucket goes whole to one host, if that gives the hosts about equal shares: the answer is then the bucket's result
as it has come, without a copy. Otherwise each bucket is cut into as many parts as there are hosts. All trainers plan
alike, since all have the same buckets.
"""

# Without `from __future__ import annotations`: DistributedDataParallel looks at those of a hook, and takes no texts.

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from torch_ucx_rpc.reduction._host import expect
from torch_ucx_rpc.reduction._messages import Answer
from torch_ucx_rpc.reduction._pushes import push, tensors_of
from torch_ucx_rpc.reduction._server import Server, spread

# Below it a message more costs more than what a host saves by having less.
_CUT_BYTES = 1 << 16
# How much more than its share a host may have before buckets are cut.
_UNEVEN = 1.3


class Part(NamedTuple):
    """A part of a bucket, and the shard that sums it."""

    shard: int
    start: int
    stop: int


def plan(sizes: Sequence[tuple[int, int]], shards: int) -> list[list[Part]]:
    """The parts of buckets, of which the number of elements and their size are given."""
    nbytes = [numel * itemsize for numel, itemsize in sizes]
    whole = spread(nbytes, shards)
    loads = [0] * shards
    for size, shard in zip(nbytes, whole, strict=True):
        loads[shard] += size
    if max(loads) <= _UNEVEN * sum(loads) / shards:
        return [[Part(shard, 0, numel)] for (numel, _), shard in zip(sizes, whole, strict=True)]
    loads = [0] * shards
    return [cut(numel, itemsize, loads) for numel, itemsize in sizes]


def cut(numel: int, itemsize: int, loads: list[int]) -> list[Part]:
    """The parts of a bucket; ``loads`` are the bytes that the shards have had of this step, and are added to."""
    shards = len(loads)
    if shards == 1 or numel * itemsize < _CUT_BYTES:
        shard = loads.index(min(loads))
        loads[shard] += numel * itemsize
        return [Part(shard, 0, numel)]
    # Where a cache line begins.
    width = -(-numel // shards // 16) * 16
    parts = [
        Part(shard, shard * width, min(numel, (shard + 1) * width)) for shard in range(shards) if shard * width < numel
    ]
    for part in parts:
        loads[part.shard] += (part.stop - part.start) * itemsize
    return parts


def push_bucket(
    server: Server, prefix: str, buffer: Tensor, parts: Sequence[Part], quorum: int | None
) -> list[tuple[Part, Future[Answer]]]:
    """Push the parts of a flat tensor."""
    return [
        (part, push(server, f"{prefix}/{index}", part.shard, [buffer[part.start : part.stop]], quorum))
        for index, part in enumerate(parts)
    ]


class State:
    """What `state` returns: of one model, and one trainer."""

    def __init__(self, server: Server, quorum: int | None) -> None:
        self.server = server
        self.quorum = quorum
        self._name = server.name_for("ddp", self)
        self._loads = [0] * server.spec.shards
        # DistributedDataParallel makes other buckets after the first step, and says nothing of those to come: until two
        # steps have had the same, buckets are cut as they come.
        self._sizes: list[tuple[int, int]] = []
        self._sizes_before: list[tuple[int, int]] = []
        self._plan: list[list[Part]] | None = None

    def on_leave(self) -> None:
        """Nothing: no other trainer asks this one for anything."""

    def on_other_host(self, host: str) -> None:
        """Nothing, likewise."""

    def push(self, bucket: GradBucket) -> Future[Tensor]:
        """Push a bucket of DDP's gradients: the future of its mean over the trainers."""
        buffer: Tensor = bucket.buffer()
        size = (buffer.numel(), buffer.element_size())
        index = bucket.index()
        if self._plan is None:
            parts, layout = cut(*size, self._loads), "cut"
        else:
            parts, layout = self._plan[index], "planned"
        self._sizes.append(size)
        if bucket.is_last():
            self._end_step()
        pushes = push_bucket(self.server, f"{self._name}/{layout}/{index}", buffer.detach(), parts, self.quorum)
        if len(pushes) == 1:
            # DistributedDataParallel only reads it.
            return pushes[0][1].then(lambda pushed: tensors_of(pushed)[0])

        def join(_: Any) -> Tensor:
            for part, pushed in pushes:
                buffer[part.start : part.stop].copy_(tensors_of(pushed)[0])
            return buffer

        return torch.futures.collect_all([pushed for _, pushed in pushes]).then(join)

    def _end_step(self) -> None:
        if self._plan is None and self._sizes == self._sizes_before:
            self._plan = plan(self._sizes, self.server.spec.shards)
        self._loads = [0] * len(self._loads)
        self._sizes_before, self._sizes = self._sizes, []


def state(server: Server, quorum: int | None = None, process_group: dist.ProcessGroup | None = None) -> State:
    """What `hook` needs of a server, for one model.

    The first step waits for all ranks of the process group, whatever `serve` has been told.

    Args:
        server (Server): of `serve`.
        quorum (int): a step is complete with that many trainers, and the gradients are the mean of theirs. Those of
            late ones are dropped, and they get the sum of what they have missed. (default: all that are there)
        process_group: DistributedDataParallel's (default: the default group).

    Raises ValueError for a quorum above the number of trainers.

    Example::

        >>> ddp.register_comm_hook(reduction.state(server, quorum=3), reduction.hook)
    """
    if not isinstance(server, Server):
        raise TypeError(f"state takes what reduction.serve returns; {server!r} is something else")
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size(process_group)
        if quorum is not None and quorum > ranks:
            raise ValueError(
                f"quorum={quorum} can never be reached: the process group has {ranks} trainers; give at most that many"
            )
        server.call_all(expect, server.spec.key, ranks, ())
        server.spec = server.spec._replace(expected=ranks, expected_names=())
    server.check_quorum(quorum)
    return State(server, quorum)


def hook(state: State, bucket: GradBucket) -> Future[Tensor]:
    """A communication hook of DistributedDataParallel that averages gradients by way of a server.

    torch's compression can go on top, as ``default_hooks.fp16_compress_wrapper(reduction.hook)``: then half the bytes
    travel, and sums are made of halves.
    """
    return state.push(bucket)
