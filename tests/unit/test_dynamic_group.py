"""A worker joins a group without a size while other workers give up ranks and take them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from torch_ucx_rpc._bootstrap import dynamic_group
from torch_ucx_rpc._bootstrap.deadline import Deadline
from torch_ucx_rpc._bootstrap.dynamic_group import DynamicGroup
from torch_ucx_rpc._bootstrap.member_list import MemberList
from torch_ucx_rpc._bootstrap.record import Record
from torch_ucx_rpc.errors import JoinTimedOut

from .test_members import record


class FakeAgent:
    """An agent that no member admits, and that has lost all members except the silent ones. It refuses two workers of
    one rank."""

    def __init__(self, silent: Sequence[Record] = ()) -> None:
        self.silent = [SimpleNamespace(id=one.rank) for one in silent]
        self.ranks: dict[int, int] = {}

    def add_records(self, records: Iterable[Record], members: Collection[Record]) -> None:
        self.ranks |= {one.session: one.rank for one in records}
        assert len(set(self.ranks.values())) == len(self.ranks)

    def _announce_join(self, record: str, members: Sequence[int]) -> None:
        assert self.ranks.keys() >= {*members}

    def _remove_member(self, session: int) -> None:
        rank = self.ranks.pop(session, None)
        self.silent = [one for one in self.silent if one.id != rank]

    def get_worker_infos(self) -> list[Any]:
        return self.silent

    _unadmitted = get_worker_infos

    def _set_membership(self, *callbacks: Callable[..., None], **key: bytes) -> None: ...


def test_a_lost_member_is_not_asked_after_another_took_its_rank() -> None:
    store, elsewhere = HashStore(), "another machine"
    MemberList(store, lost := record(1, 0, boot_id=elsewhere), None).add()
    agent = FakeAgent()
    group = DynamicGroup(store, record(0, 0), agent, None)
    group.enter()
    successor = SimpleNamespace(place="member/7", record=record(1, 0, boot_id=elsewhere).to_values())
    group._admit(json.dumps(vars(successor)))
    group.meet(Deadline(10))
    assert lost.session not in agent.ranks
    assert group.replaced == {(lost.name, lost.session)}


@pytest.mark.parametrize("fate", ["leaves", "is lost by others"])
def test_newcomer_waits_for_a_silent_member_that_others_have(fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_group, "_DOUBTED_S", 0.001)
    store = HashStore()
    others = MemberList(store, silent := record(1, 0, boot_id="another machine"), None)
    place = others.add()
    agent = FakeAgent([silent])
    group = DynamicGroup(store, record(0, 0), agent, None)
    group.enter()
    with pytest.raises(JoinTimedOut, match=silent.name):
        group.meet(Deadline(0.1))
    others.replace(place, None if fate == "leaves" else silent._replace(in_doubt=True))
    group.meet(Deadline(10))


def test_a_later_entry_of_a_name_replaces_the_earlier_one() -> None:
    store, elsewhere = HashStore(), "another machine"
    first, second = (record(1, 0, boot_id=elsewhere, in_doubt=True) for _ in range(2))
    for one in (first, second):
        MemberList(store, one, None).add()
    agent = FakeAgent()
    group = DynamicGroup(store, record(0, 0), agent, None)
    group.enter()
    assert group.replaced == {(first.name, first.session)}
