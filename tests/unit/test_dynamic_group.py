"""A worker that joins a group without a size while the ranks of others change hands."""

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

from .test_members import record


class AgentThatReachesNoMember:
    """Has lost all members that it asks for admission. Like the C++ agent, it refuses two workers of one rank."""

    def __init__(self) -> None:
        self.ranks: dict[int, int] = {}

    def add_records(self, records: Iterable[Record], members: Collection[Record]) -> None:
        self.ranks |= {one.session: one.rank for one in records}
        assert len(set(self.ranks.values())) == len(self.ranks)

    def _announce_join(self, record: str, members: Sequence[int]) -> None:
        assert self.ranks.keys() >= {*members}

    def _remove_member(self, session: int) -> None:
        self.ranks.pop(session, None)

    def get_worker_infos(self) -> list[Any]:
        return []

    _unacknowledged = get_worker_infos

    def _set_membership(self, *callbacks: Callable[..., None], **key: bytes) -> None: ...
    def _lose_member(self, session: int) -> None: ...


def test_a_lost_member_is_not_asked_after_another_took_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store, elsewhere = HashStore(), "another machine"
    MemberList(store, lost := record(1, 0, boot_id=elsewhere), None).add()
    agent = AgentThatReachesNoMember()
    group = DynamicGroup(store, record(0, 0), agent, None)
    group.enter()

    def replace_the_lost(_: str) -> bool:
        # Another thread may do this while the present one looks at the list.
        successor = SimpleNamespace(place="member/7", record=record(1, 0, boot_id=elsewhere).to_values())
        if lost.session in agent.ranks:
            group._admit(json.dumps(vars(successor)))
        return True

    monkeypatch.setattr(dynamic_group, "_TRY_AGAIN_S", 1e-6)
    monkeypatch.setattr(group, "_is_listed", replace_the_lost)
    group.meet(Deadline(10))
    assert lost.session not in agent.ranks
    assert group.replaced == {(lost.name, lost.session)}


def test_of_two_entries_of_one_name_the_earlier_is_replaced() -> None:
    store, elsewhere = HashStore(), "another machine"
    first, second = (record(1, 0, boot_id=elsewhere, in_doubt=True) for _ in range(2))
    for one in (first, second):
        MemberList(store, one, None).add()
    agent = AgentThatReachesNoMember()
    group = DynamicGroup(store, record(0, 0), agent, None)
    group.enter()
    assert group.replaced == {(first.name, first.session)}
