"""A group's list stays short although workers join and leave. A dead worker is awaited only once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore, PrefixStore, Store

from torch_ucx_rpc._bootstrap import member_list
from torch_ucx_rpc._bootstrap.member_list import MemberList
from torch_ucx_rpc._bootstrap.record import Record
from torch_ucx_rpc._bootstrap.secret import Secret, write_entry

from .test_members import record

SECRET = Secret(b"a secret of this test, long enough")


@pytest.fixture(params=[None, SECRET], ids=["open", "secret"])
def secret(request: pytest.FixtureRequest) -> Secret | None:
    chosen: Secret | None = request.param
    return chosen


def test_any_text_may_stand_where_a_tag_belongs() -> None:
    assert SECRET.has_made(SECRET.tag("text"), "text")
    assert not SECRET.has_made("\ud800", "text")


@pytest.fixture
def store() -> Store:
    return HashStore()


def raw(store: Store) -> PrefixStore:
    return PrefixStore("torch_ucx_rpc/dynamic", store)


def join(store: Store, rank: int, secret: Secret | None = None) -> tuple[MemberList, str, list[int]]:
    """Add a worker; return its list, its place, and the ranks of the earlier workers that it sees."""
    own = MemberList(store, record(rank, 0), secret)
    place = own.add()
    return own, place, [earlier.rank for earlier in own.earlier().values()]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Record how many places each reading of the list asks for."""
    sizes: list[int] = []
    read_records = member_list.read_records

    def counting(store: Store, keys: list[str], own: Record, secret: Secret | None) -> dict[str, Record]:
        sizes.append(len(keys))
        return read_records(store, keys, own, secret)

    monkeypatch.setattr(member_list, "read_records", counting)
    return sizes


def test_each_worker_sees_earlier_members_in_order(store: Store, secret: Secret | None) -> None:
    assert [join(store, rank, secret)[2] for rank in (3, 1, 2)] == [[], [3], [3, 1]]


def test_a_list_of_many_that_came_and_went_stays_short(store: Store, secret: Secret | None, reads: list[int]) -> None:
    join(store, 0, secret)
    before: tuple[MemberList, str] | None = None
    for rank in range(1, 50):
        own, place, earlier = join(store, rank, secret)
        assert earlier == [0, *([rank - 1] if before else [])]
        if before:
            before[0].strike(before[1])
        before = own, place
    # Three places: rank 0, which stays; a worker that has left since; and the last worker.
    assert max(reads) <= 3


def test_next_worker_learns_of_members_before_a_compaction(store: Store) -> None:
    lists = [join(store, rank) for rank in range(4)]
    lists[1][0].strike(lists[1][1])
    assert [join(store, rank)[2] for rank in (4, 5)] == [[0, 2, 3], [0, 2, 3, 4]]


def test_an_older_compaction_hides_no_member(store: Store) -> None:
    first, place, _ = join(store, 0)
    first.strike(place)
    join(store, 1)
    older = raw(store).get("compacted")
    join(store, 2)
    raw(store).set("compacted", older)
    assert join(store, 3)[2] == [1, 2]


def test_place_of_a_worker_that_died_early_is_awaited_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_list, "_WRITING_S", 0.5)
    join(store, 0)
    raw(store).add("arrivals", 1)
    begin = time.monotonic()
    assert join(store, 2)[2] == [0]
    assert time.monotonic() - begin >= 0.5
    # With and without a compaction, no worker waits for that place again.
    raw(store).set("compacted", "")
    monkeypatch.setattr(member_list, "_WRITING_S", 600.0)
    assert join(store, 3)[2] == [0, 2]


def test_a_worker_that_was_slow_to_fill_its_place_takes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_list, "_WRITING_S", 0.1)
    before, store = HashStore(), HashStore()
    raw(before).add("arrivals", 1)
    join(before, 1)
    # Give up the place of this worker before the worker writes its entry.
    raw(store).set("member/0", raw(before).get("member/0"))
    assert join(store, 0)[1:] == ("member/1", [])


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        json.dumps({"before": 2, "remaining": []}),
        json.dumps({"before": 2, "remaining": [7]}),
        json.dumps({"before": 2**62, "remaining": []}),
        json.dumps({"before": 2, "remaining": "member/0"}),
        json.dumps({"before": "2", "remaining": []}),
        write_entry({"before": 2, "remaining": []}, Secret(b"another secret, which is long enough")),
    ],
)
def test_a_forged_compaction_hides_no_member(store: Store, text: str) -> None:
    join(store, 0, SECRET)
    join(store, 1, SECRET)
    raw(store).set("compacted", text)
    assert join(store, 2, SECRET)[2] == [0, 1]


def test_a_worker_that_left_stays_off_the_list(store: Store) -> None:
    own, place, _ = join(store, 0)
    own.strike(place)
    own.replace(place, record(0, 0, in_doubt=True))
    assert own.at(place) is None
    assert own.present() == []
