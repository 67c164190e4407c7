"""How work is spread over the shards of a server: whole tensors (`spread`), and buckets of gradients (`plan`, `cut`).

Each bucket goes whole to one host, if that gives the hosts about equal shares: the answer is then the bucket's result
as it has come, without a copy. Otherwise each bucket is cut into as many parts as there are hosts. All trainers plan
alike, since all have the same tensors and buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Below it a message more costs more than what a host saves by having less.
_CUT_BYTES = 1 << 16
# How much more than its share a host may have before buckets are cut.
_UNEVEN = 1.3


def spread(sizes: Sequence[int], shards: int) -> list[int]:
    """The shard of each of these, so that all shards get about as much; the same in every process."""
    loads = [0] * shards
    assignment = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        shard = loads.index(min(loads))
        assignment[index] = shard
        loads[shard] += sizes[index]
    return assignment


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
