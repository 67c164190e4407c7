"""Jobs with a secret: calls work as without a secret, and processes that lack it stay outside."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc as rpc

from tests.support import workers
from tests.support.workers import agent, backend_options, eventually, init_rpc
from torch_ucx_rpc._bootstrap import members
from torch_ucx_rpc._bootstrap.secret import Entry
from torch_ucx_rpc.errors import CallTimedOut, RRefLost

# These tests run here with a secret.
from .test_calls import (  # noqa: F401
    test_all_workers_call_all_at_once,
    test_async_execution_answers_when_its_future_is_done,
    test_each_of_thousands_of_calls_gets_its_own_answer,
    test_exceptions_of_the_callee_keep_type_and_message,
    test_handlers_may_call_other_workers_and_back,
)
from .test_dynamic_groups import Steps, test_workers_join_and_leave_one_after_the_other  # noqa: F401
from .test_rrefs import owned_here, test_all_workers_hold_references_to_all_others  # noqa: F401
from .test_tensors import (  # noqa: F401
    test_tensors_arrive_as_they_were_sent,
    test_thousands_of_tensors_travel_in_one_call,
)
from .test_training import test_a_model_over_two_workers_trains_as_a_local_one  # noqa: F401

pytestmark = pytest.mark.ucx_only

SECRET = "TORCH_UCX_RPC_SECRET"
VALUE = "8f1d0c7a" * 8


@pytest.fixture(scope="module")
def run_workers(rpc_backend: str, transport: workers.Transport) -> Callable[..., list]:
    return functools.partial(workers.run_workers, backend=rpc_backend, transport=transport, env={SECRET: VALUE})


def refused() -> int:
    """Return the number of frames that this worker has refused."""
    return int(agent().get_metrics()["agent.frames_refused"])


# ---- Large things ----------------------------------------------------------------------------------------------------


def echo(*values: object) -> tuple[object, ...]:
    return values


def send_large_payloads(rank: int) -> int:
    if rank == 0:
        for size in (10_000, 300_000, 5_000_000):
            text = os.urandom(size)
            assert rpc.rpc_sync("worker1", echo, args=(text,)) == (text,)
        text, tensor = os.urandom(1_000_000), torch.randn(1_000_000)
        answer = rpc.rpc_sync("worker1", echo, args=(text, tensor))
        assert answer[0] == text
        assert torch.equal(answer[1], tensor)
    return refused()


def test_large_payloads_arrive(run_workers: Callable[..., list]) -> None:
    assert run_workers(2, send_large_payloads) == [0, 0]


def create_an_rref_too_late(rank: int) -> None:
    # Sealing the argument takes longer than the timeout.
    if rank == 0:
        late = [rpc.remote("worker1", echo, args=(bytes(16 << 20),), timeout=0.001) for _ in range(2)]
        for rref in late:
            with pytest.raises(CallTimedOut):
                rref._get_future().wait()
            with pytest.raises(RRefLost, match=r"rpc.remote\(\) timed out"):
                rref.to_here()
        # The shutdown waits only a second for an owner. The owner may take longer to receive so much.
        eventually(lambda: rpc.rpc_sync("worker1", owned_here) == len(late), "the owner has made them")


def test_rref_that_timed_out_before_torch_recorded_it_is_lost(run_workers: Callable[..., list]) -> None:
    run_workers(2, create_an_rref_too_late)


# ---- From a file -----------------------------------------------------------------------------------------------------


def call_with_file(rank: int, file: str) -> int:
    init_rpc(rank, rpc_backend_options=backend_options(secret_file=file))
    answer = rpc.rpc_sync(workers.worker_name(1 - rank), echo, args=(rank,))
    rpc.shutdown()
    return int(answer[0])


def test_the_secret_may_be_in_a_file(run_workers: Callable[..., list], tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text("another than that of the environment")
    assert run_workers(2, call_with_file, str(file), init=False) == [0, 1]


# ---- Others ----------------------------------------------------------------------------------------------------------


def initialize(rank: int, secrets: list[str | None]) -> str:
    os.environ.pop(SECRET)
    if secrets[rank] is not None:
        os.environ[SECRET] = str(secrets[rank])
    try:
        init_rpc(rank)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    rpc.shutdown()
    return "ok"


@pytest.mark.parametrize("other", [None, "another secret than the first"])
def test_worker_with_another_secret_or_none_is_refused(run_workers: Callable[..., list], other: str | None) -> None:
    for error in run_workers(2, initialize, [VALUE, other], init=False):
        assert error.startswith("JoinFailed: the workers do not share one secret: "), error
        assert "rank 0 ('worker0', pid " in error
        assert "rank 1 ('worker1', pid " in error


def test_impossible_secret_is_refused_before_any_wait(run_workers: Callable[..., list]) -> None:
    [error] = run_workers(1, initialize, ["short"], init=False)
    assert error.startswith("ValueError: TORCH_UCX_RPC_SECRET holds 5 bytes; a secret has 16 to 4096")


# ---- Groups without a size -------------------------------------------------------------------------------------------


def join_beside_a_member(rank: int, steps: Steps, make_joiner: Callable[[], None], count: int) -> str:
    """Worker 0 is a member. Worker 1 calls `make_joiner`, and tries to become a member. Return this worker's error, or
    "ok".

    In the end the member has refused ``count`` frames.
    """
    if rank == 0:
        init_rpc(rank, world_size=None)
        steps.done("joined")
        steps.wait_for("over")
        assert [info.name for info in agent().get_worker_infos()] == ["worker0"]
        eventually(lambda: refused() == count, f"{count} frames are refused")
        rpc.shutdown()
        return "ok"
    steps.wait_for("joined")
    make_joiner()
    try:
        init_rpc(rank, world_size=None, rpc_backend_options=backend_options(init_timeout=2))
    except RuntimeError as error:
        return str(error)
    finally:
        steps.done("over")
    raise AssertionError("it was admitted")


def take_another_secret() -> None:
    os.environ[SECRET] = "another secret than the first"


def believe_everything_without_the_secret() -> None:
    """Behave like a program that can read the Store and omits our checks."""
    take_another_secret()

    def believe(text: bytes, secret: object) -> Entry:
        outer = json.loads(text)
        return Entry(json.loads(outer["sealed"]))

    members.read_entry = believe


def test_a_joiner_with_another_secret_is_refused_naming_both(run_workers: Callable[..., list], tmp_path: Path) -> None:
    arguments = (join_beside_a_member, Steps(tmp_path), take_another_secret, 0)
    [member, error] = run_workers(2, *arguments, init=False)
    assert re.match(r"the workers do not share one secret: rank 1 \('worker1', .* another secret than rank 0 \(", error)
    assert member == "ok"


def test_a_stranger_that_asks_to_join_is_ignored(run_workers: Callable[..., list], tmp_path: Path) -> None:
    # The member refuses the stranger's join and its goodbye.
    arguments = (join_beside_a_member, Steps(tmp_path), believe_everything_without_the_secret, 2)
    # The member warns of this on stderr.
    [member, error] = run_workers(2, *arguments, init=False, silent=False)
    assert "has waited 2 s (init_timeout) to be admitted to the group by rank 0 ('worker0'" in error
    assert member == "ok"
