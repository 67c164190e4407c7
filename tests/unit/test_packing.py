"""Records with any contents survive packing, and take few bytes."""

from __future__ import annotations

import os
import random
import zlib

import pytest
import torch

from tests.unit.test_members import record
from torch_ucx_rpc._bootstrap.packing import pack, unpack
from torch_ucx_rpc._bootstrap.record import Record

CUDA = torch.device("cuda:1")


def records_of_a_job(workers: int) -> list[Record]:
    """Return records like those of workers on several hosts. Addresses on one host share most bytes."""
    numbers = random.Random(1)
    kind = numbers.randbytes(280)
    return [
        record(
            rank,
            workers,
            session=numbers.getrandbits(64),
            # UCX repeats a queue's address for each path to the queue.
            address=kind[:100] + (queue := numbers.randbytes(22)) + kind[100:] + queue[:12],
            pid=4000 + rank // 8 * 3,
            process_start_time=1_000_000 + rank // 8,
            host=f"node{rank // 8}",
        )
        for rank in range(workers)
    ]


@pytest.mark.parametrize("workers", [1, 2, 100])
def test_records_survive_packing(workers: int) -> None:
    records = records_of_a_job(workers)
    assert unpack(pack(records)) == records


def test_records_that_differ_in_everything_survive() -> None:
    records = [
        record(0, 2, name="ps", address=b"", devices=[CUDA], device_maps={"trainer": {CUDA: CUDA}}, device_count=2),
        record(1, 2, name="trainer", address=bytes(1000), session=2**64 - 1, user="7 in user:[1]", in_doubt=True),
    ]
    assert unpack(pack(records)) == records


def test_names_with_and_without_ranks_survive() -> None:
    for names in (["worker0", "worker1"], ["0", "1"], ["a", "b"], ["worker1", "worker0"], ["w00", "w01"]):
        records = [record(rank, 2, name=name) for rank, name in enumerate(names)]
        assert [one.name for one in unpack(pack(records))] == names


def test_a_record_of_a_large_job_takes_few_bytes() -> None:
    # 30 bytes are random: the session, and the bytes in which addresses differ.
    assert len(pack(records_of_a_job(512))) < 40 * 512


@pytest.mark.parametrize("damage", ["none of it", "short", "no record", "bomb"])
def test_other_bytes_are_refused(damage: str) -> None:
    packed = pack(records_of_a_job(3))
    wrong = {
        "none of it": os.urandom(100),
        "short": packed[:-5],
        "no record": zlib.compress(zlib.decompress(packed).replace(b'"pid"', b'"pie"')),
        "bomb": zlib.compress(bytes(1 << 20)),
    }[damage]
    with pytest.raises(ValueError, match=r"not the records? of (workers|a worker)"):
        unpack(wrong)
