"""Arithmetic of the durations in ``statistics()``."""

from __future__ import annotations

import math

import pytest

from torch_ucx_rpc import Latencies
from torch_ucx_rpc._observe.statistics import BUCKET_ENDS_US


def test_percentiles_are_the_ends_of_the_buckets_that_hold_them() -> None:
    latencies = Latencies((0, 50, 0, 49, 1), 1000.0)
    assert latencies.count == 100
    assert latencies.mean_us == 10.0
    for percent, bucket in {0: 1, 50: 1, 50.5: 3, 99: 3, 99.5: 4, 100: 4}.items():
        assert latencies.percentile_us(percent) == BUCKET_ENDS_US[bucket], percent


def test_without_calls_there_are_no_durations() -> None:
    assert Latencies().count == 0
    assert math.isnan(Latencies().mean_us)
    assert math.isnan(Latencies().percentile_us(50))


def test_time_beyond_all_buckets_counts_as_infinite() -> None:
    latencies = Latencies((1, *[0] * (len(BUCKET_ENDS_US) - 1), 1), 1e9)
    assert latencies.percentile_us(50) == BUCKET_ENDS_US[0]
    assert latencies.percentile_us(51) == math.inf


@pytest.mark.parametrize("percent", [-1, 100.1, math.nan])
def test_an_impossible_percentage_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match="percent must be between 0 and 100"):
        Latencies((1,), 1.0).percentile_us(percent)


def test_difference_plus_the_earlier_snapshot_is_the_later() -> None:
    earlier, later = Latencies((1, 2), 3.0), Latencies((1, 5, 0, 7), 50.0)
    between = later - earlier
    assert between == Latencies((0, 3, 0, 7), 47.0)
    assert earlier + between == later
    assert later - later == Latencies((), 0.0)


def test_count_up_to_a_buckets_end_includes_that_bucket() -> None:
    latencies = Latencies((1, 2, 4), 10.0)
    assert [latencies.at_most_us(end) for end in BUCKET_ENDS_US[:4]] == [1, 3, 7, 7]
    assert latencies.at_most_us(BUCKET_ENDS_US[1] - 0.001) == 1
