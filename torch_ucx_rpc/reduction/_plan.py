"""The spread of work over the shards of a server: whole tensors (`spread`), and buckets of gradients (`plan`, `cut`).

If the sizes of all buckets are known, each bucket goes whole to one host, as long as that gives the hosts about equal
shares. The answer is then the bucket's result, without a copy. Otherwise `cut` divides each bucket: at most one part
for each host, and at most one for each MiB. All trainers plan alike, since all have the same tensors and buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# For a smaller part, the extra message costs more than the host saves. Measured between processes of one host.
_PART_BYTES = 1 << 20
# A part begins at a cache line.
_LINE_BYTES = 64
# How much more than its share a host may have before buckets are cut.
_UNEVEN = 1.3


def spread(sizes: Sequence[int], shards: int) -> list[int]:
    """Return a shard for each of these sizes, so that the sums of all shards are about equal. All processes get the
    same result."""
    loads = [0] * shards
    assignment = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        shard = loads.index(min(loads))
        assignment[index] = shard
        loads[shard] += sizes[index]
    return assignment


def difference(shapes: Sequence[tuple[int, ...]], expected: Sequence[tuple[int, ...]]) -> str:
    """Describe where these shapes differ from those of a server."""
    pairs = enumerate(zip(shapes, expected, strict=False))
    index = next((index for index, pair in pairs if pair[0] != pair[1]), min(len(shapes), len(expected)))
    return (
        f"there are {len(shapes)} tensors, of which number {index} is "
        f"{list(shapes[index]) if index < len(shapes) else 'missing'}; the server has {len(expected)}, and that one is "
        f"{list(expected[index]) if index < len(expected) else 'missing'}"
    )


class Part(NamedTuple):
    """A part of a bucket, with the shard that sums it."""

    shard: int
    start: int
    stop: int


def plan(sizes: Sequence[tuple[int, int]], shards: int) -> list[list[Part]]:
    """Return the parts of buckets, given as numbers and sizes of their elements."""
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
    """Cut a bucket into parts for the shards with the least load, so that these all reach the same level.

    ``loads`` are the bytes of this step that each shard has; this adds to them.
    """
    nbytes = numel * itemsize
    least = sorted(range(len(loads)), key=lambda shard: (loads[shard], shard))
    count = max(1, min(len(loads), nbytes // _PART_BYTES))
    # Shards above the level get nothing.
    while loads[least[count - 1]] * count > sum(loads[shard] for shard in least[:count]) + nbytes:
        count -= 1
    level = (sum(loads[shard] for shard in least[:count]) + nbytes) / count
    line = _LINE_BYTES // itemsize
    parts: list[Part] = []
    start = 0
    for place, shard in enumerate(least[:count]):
        width = -(-round((level - loads[shard]) / itemsize) // line) * line
        stop = numel if place == count - 1 else min(numel, start + width)
        if stop > start or not parts:
            parts.append(Part(shard, start, stop))
            loads[shard] += (stop - start) * itemsize
        start = stop
    return parts
