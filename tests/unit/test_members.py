"""Workers find each other in a Store, or all learn why not."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store

from torch_ucx_rpc._bootstrap import members
from torch_ucx_rpc._bootstrap.deadline import Deadline
from torch_ucx_rpc._bootstrap.dynamic_group import StaticGroup
from torch_ucx_rpc._bootstrap.members import gather_members
from torch_ucx_rpc._bootstrap.record import Record, process_facts


@pytest.fixture
def no_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for workers that are only entries in the Store: they read no farewell."""
    monkeypatch.setattr(members, "_FAREWELL_S", 0.01)


def record(rank: int, world_size: int, **changed: Any) -> Record:
    own = Record(
        rank=rank,
        name=f"worker{rank}",
        world_size=world_size,
        session=int.from_bytes(os.urandom(8), "little"),
        first_rref_id=0,
        first_context_id=0,
        address=bytes(range(256)),
        package_version="1.2.3",
        torch_version="2.13.0",
        device_maps={},
        reply_device_maps={},
        devices=[],
        device_count=0,
        lifeline_host="",
        lifeline_port=0,
        in_doubt=False,
        **process_facts(),
    )
    return own._replace(**changed)


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the text of the error that the call raises, or "ok"."""
    try:
        call(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


# ---- A group forms ---------------------------------------------------------------------------------------------------


def test_a_part_that_rank_0_did_not_write_is_refused() -> None:
    store = HashStore()
    member = record(0, 1)
    gather_members(store, member, 10)
    PrefixStore("torch_ucx_rpc", store).set(f"members/{member.session}/0", "something else")
    assert "found something in the Store that rank 0 did not write" in outcome(gather_members, store, record(0, 1), 10)


def test_one_worker_is_a_group() -> None:
    own = record(0, 1)
    assert gather_members(HashStore(), own, 1) == [own]


@pytest.mark.usefixtures("no_farewell")
def test_a_rank_beyond_the_world_is_refused() -> None:
    store = HashStore()
    PrefixStore("torch_ucx_rpc", store).add("arrivals", 1)
    PrefixStore("torch_ucx_rpc", store).set("arrival/0", json.dumps(record(7, 2).to_values()))
    assert "rank 7 ('worker7', pid " in outcome(gather_members, store, record(0, 2), 10)


@pytest.mark.usefixtures("no_farewell")
@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[]",
        "{}",
        json.dumps({**record(1, 2).to_values(), "pid": "7"}),
        json.dumps({**record(1, 2).to_values(), "address": "not base64"}),
        json.dumps({**record(1, 2).to_values(), "devices": ["abacus:0"]}),
        json.dumps({**record(1, 2).to_values(), "device_maps": {"worker0": ["cpu"]}}),
        json.dumps({**record(1, 2).to_values(), "more": 1}),
        "cos\nsystem\n(S'false'\ntR.",
    ],
)
def test_a_forged_entry_is_refused(text: str) -> None:
    store = HashStore()
    PrefixStore("torch_ucx_rpc", store).add("arrivals", 1)
    PrefixStore("torch_ucx_rpc", store).set("arrival/0", text)
    assert "found something in the Store that no worker wrote" in outcome(gather_members, store, record(0, 2), 10)


@pytest.mark.usefixtures("no_farewell")
def test_rank_0_stays_in_the_list_until_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    announce = members._announce

    def look_and_announce(store: Store, *args: Any) -> None:
        assert store.get("arrival/0"), "a worker whose time ends now does not see rank 0"
        announce(store, *args)

    monkeypatch.setattr(members, "_announce", look_and_announce)
    store = HashStore()
    assert "these ranks have not come: 1" in outcome(gather_members, store, record(0, 2), 0.1)
    assert not PrefixStore("torch_ucx_rpc", store).get("arrival/0")


def test_impossible_count_is_refused_before_any_listing() -> None:
    store = HashStore()
    PrefixStore("torch_ucx_rpc/dynamic", store).add("arrivals", 2**62)
    group = StaticGroup(store, record(0, 2), None)
    assert f"counts {2**62} workers that have joined, which no worker wrote" in outcome(group.refuse_mixture)


def test_a_worker_that_comes_after_the_start_gets_an_error() -> None:
    store = HashStore()
    member = record(0, 1)
    gather_members(store, member, 10)
    for late in (record(0, 1), record(1, 2)):
        error = outcome(gather_members, store, late, 10)
        assert f"{late} came too late: the group of 1 workers at this Store has formed without it" in error
        assert str(member) in error


# ---- Records ---------------------------------------------------------------------------------------------------------


def test_a_record_survives_the_way_through_json() -> None:
    own = record(
        3,
        4,
        device_maps={"worker1": {torch.device("cuda:0"): torch.device("cuda:1")}},
        reply_device_maps={"worker1": {torch.device("cuda:1"): torch.device("cpu")}},
        devices=[torch.device("cuda:0")],
        session=2**64 - 1,
    )
    assert Record.from_values(json.loads(json.dumps(own.to_values()))) == own


@pytest.mark.parametrize("field", Record._fields)
def test_a_record_without_a_field_is_refused(field: str) -> None:
    values = record(0, 1).to_values()
    del values[field]
    with pytest.raises(ValueError, match="not the record of a worker"):
        Record.from_values(values)


@pytest.mark.parametrize("field", Record._fields)
@pytest.mark.parametrize("value", [None, True, 1.5, [1]])
def test_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    if isinstance(getattr(record(0, 1), field), bool):
        value = int(value is True)  # not a bool
    with pytest.raises(ValueError, match="not the record of a worker"):
        Record.from_values({**record(0, 1).to_values(), field: value})


@pytest.mark.parametrize(("size", "longest"), [(2, 0.01), (24, 0.024), (64, 0.064), (5000, 1.0)])
def test_pauses_between_questions_stay_short(monkeypatch: pytest.MonkeyPatch, size: int, longest: float) -> None:
    # All workers together ask about 1,000 times a second. A worker notices the last arrival within one pause.
    pauses: list[float] = []
    monkeypatch.setattr(members.time, "sleep", pauses.append)
    for _ in itertools.islice(members.ask_again(size, Deadline(60)), 20):
        pass
    assert pauses[0] == max(0.001, size / 50_000)
    assert max(pauses) == pytest.approx(longest)
    assert pauses == sorted(pauses)
