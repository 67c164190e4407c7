"""Workers with the same secret meet. Workers with another secret are refused."""

from __future__ import annotations

import re

import pytest

from tests.support.workers import run_workers
from tests.unit.test_members import outcome, record
from tests.unit.test_secret import OTHER, SECRET
from torch_ucx_rpc._bootstrap.members import gather_members
from torch_ucx_rpc._bootstrap.rendezvous import create_store
from torch_ucx_rpc._bootstrap.secret import FILE_VARIABLE, VARIABLE, Secret

# ---- Strangers -------------------------------------------------------------------------------------------------------


def meet_with(rank: int, secrets: list[Secret | None]) -> str:
    store = create_store("env://", rank, len(secrets), 30)
    return outcome(gather_members, store, record(rank, len(secrets)), 30, secrets[rank])


def test_workers_that_share_a_secret_meet() -> None:
    assert run_workers(3, meet_with, [SECRET] * 3, init=False) == ["ok"] * 3


@pytest.mark.parametrize(
    ("secrets", "says"),
    [
        (
            [SECRET, None],
            ("rank 0 .* has a secret and rank 1 .* has none", "rank 1 .* has no secret and rank 0 .* has one"),
        ),
        (
            [None, SECRET],
            ("rank 0 .* has no secret and rank 1 .* has one", "rank 1 .* has a secret and rank 0 .* has none"),
        ),
        ([SECRET, OTHER], ("rank 0 .* has another secret than rank 1", "rank 1 .* has another secret than rank 0")),
    ],
)
def test_workers_without_a_common_secret_are_refused_by_name(
    secrets: list[Secret | None], says: tuple[str, str]
) -> None:
    for said, error in zip(says, run_workers(2, meet_with, secrets, init=False), strict=True):
        assert re.search(f"^JoinFailed: the workers do not share one secret: {said}", error), error
        assert f"by secret_file, {FILE_VARIABLE} or {VARIABLE}, or no secret." in error


def test_rank_0_tells_all_workers_of_a_wrong_secret() -> None:
    errors = run_workers(3, meet_with, [SECRET, SECRET, OTHER], init=False)
    assert errors[0] == errors[1]
    assert "rank 0 ('worker0', pid " in errors[0]
    assert "has another secret than rank 2 ('worker2', pid " in errors[0]
    assert "has another secret than rank 0 ('worker0', pid " in errors[2]
