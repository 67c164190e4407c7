"""The spread of buckets of gradients over the hosts of a server."""

from __future__ import annotations

import pytest

from torch_ucx_rpc.reduction._plan import Part, cut, plan, spread

MIB = 1 << 20


def test_tensors_are_spread_by_size() -> None:
    assert spread([10, 10, 10, 10], 2) == [0, 1, 0, 1]
    assert spread([1, 100, 1, 1], 2) == [1, 0, 1, 1]


def test_buckets_stay_whole_if_hosts_get_equal_shares() -> None:
    assert plan([(100, 4), (90, 4), (110, 4)], 3) == [[Part(1, 0, 100)], [Part(2, 0, 90)], [Part(0, 0, 110)]]
    assert plan([(2 * MIB, 4)], 1) == [[Part(0, 0, 2 * MIB)]]
    assert [len(parts) for parts in plan([(2 * MIB, 4), (MIB // 2, 4), (10, 4)], 2)] == [2, 2, 1]


def test_a_small_bucket_goes_whole_to_the_host_that_has_least() -> None:
    loads = [5, 0, 3]
    assert cut(MIB // 4 + 1000, 4, loads) == [Part(1, 0, MIB // 4 + 1000)]
    assert loads == [5, MIB + 4000, 3]
    assert plan([(1000, 4)], 4) == [[Part(0, 0, 1000)]]


def test_no_host_has_more_than_its_share_of_a_large_bucket() -> None:
    assert [(part.shard, part.stop - part.start) for part in cut(4 * MIB, 2, [0, 0, 0, 0])] == [
        (shard, MIB) for shard in range(4)
    ]


def test_a_large_bucket_makes_up_for_a_small_one() -> None:
    # The first bucket of DistributedDataParallel has 1 MiB.
    buckets = [(MIB // 4, 4), (9 * MIB // 4, 4)]
    first, second = plan(buckets, 4)
    loads = [0] * 4
    for part in (*first, *second):
        loads[part.shard] += 4 * (part.stop - part.start)
    assert len(first) == 1
    assert max(loads) - min(loads) <= 4 * 64


def test_a_host_with_far_more_than_the_others_gets_nothing() -> None:
    loads = [100 * MIB, 0, 0]
    parts = cut(MIB, 4, loads)
    assert {part.shard for part in parts} == {1, 2}
    assert loads == [100 * MIB, 2 * MIB, 2 * MIB]


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("numel", [0, 1, 3, MIB - 1, MIB + 1, 25 * MIB + 7])
@pytest.mark.parametrize("shards", [1, 2, 3, 5, 16])
def test_parts_cover_a_bucket_from_one_end_to_the_other(numel: int, itemsize: int, shards: int) -> None:
    loads = [7 * shard * shard * 1000 for shard in range(shards)]
    before = sum(loads)
    parts = cut(numel, itemsize, loads)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == numel
    assert len({part.shard for part in parts}) == len(parts)
    assert sum(loads) - before == numel * itemsize
    assert all(part.start * itemsize % 64 == 0 for part in parts)
