"""Gradients of torch's DistributedDataParallel by way of a server: `state` and `hook`; and `cut`, the way they go.

A bucket of 64 KiB or more is cut into as many parts as there are hosts, one for each; a smaller one goes whole to the
host that has had least of the step so far. So hosts get equal shares of large models, and small buckets cost one
message. All trainers cut alike, since all have the same buckets.
"""

# Without `from __future__ import annotations`: DistributedDataParallel looks at those of a hook, and takes no texts.

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from torch_ucx_rpc.reduction._client import Server, tensors_of
from torch_ucx_rpc.reduction._host import Answer, _expect

# Below it a message more costs more than what a host saves by having less.
_CUT_BYTES = 1 << 16


class Part(NamedTuple):
    """A part of a bucket, and the shard that sums it."""

    shard: int
    start: int
    stop: int


def cut(numel: int, itemsize: int, loads: list[int]) -> list[Part]:
    """The parts of a bucket; ``loads`` are the bytes that the shards have had of this step, and are added to."""
    shards = len(loads)
    if shards == 1 or numel * itemsize < _CUT_BYTES:
        shard = loads.index(min(loads))
        loads[shard] += numel * itemsize
        return [Part(shard, 0, numel)]
    # Where a cache line begins, which sums like.
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
        (part, server.push(f"{prefix}/{index}", part.shard, [buffer[part.start : part.stop]], quorum))
        for index, part in enumerate(parts)
    ]


class State:
    """What `state` returns: of one model, and one trainer."""

    def __init__(self, server: Server, quorum: int | None) -> None:
        self.server = server
        self.quorum = quorum
        self._name = server.name_for("ddp")
        self._loads = [0] * len(server.hosts)

    def push(self, bucket: GradBucket) -> Future[Tensor]:
        buffer: Tensor = bucket.buffer()
        parts = cut(buffer.numel(), buffer.element_size(), self._loads)
        if bucket.is_last():
            self._loads = [0] * len(self._loads)
        pushes = push_bucket(self.server, f"{self._name}/{bucket.index()}", buffer.detach(), parts, self.quorum)

        def join(_: Any) -> Tensor:
            for part, push in pushes:
                buffer[part.start : part.stop].copy_(tensors_of(push)[0])
            return buffer

        if len(pushes) == 1:
            return pushes[0][1].then(join)
        return torch.futures.collect_all([push for _, push in pushes]).then(join)


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
        server.call_all(_expect, server.spec.key, ranks, ())
        server.spec = server.spec._replace(expected=ranks, expected_names=())
    server.check_quorum(quorum)
    return State(server, quorum)


def hook(state: State, bucket: GradBucket) -> Future[Tensor]:
    """A communication hook of DistributedDataParallel that averages gradients by way of a server.

    torch's compression can go on top, as ``default_hooks.fp16_compress_wrapper(reduction.hook)``: then half the bytes
    travel, and sums are made of halves.
    """
    return state.push(bucket)
