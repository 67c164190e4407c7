"""If a worker has no room for calls, they wait at their senders, but not for ever."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc as rpc

from tests.support.workers import agent, eventually, in_every_worker, in_worker0

pytestmark = pytest.mark.ucx_only

MIB = 2**20

SMALL_WINDOW = {"receive_window_bytes": 4 * MIB}

kept: list[torch.Tensor] = []


def make(number: int, mib: float = 1) -> torch.Tensor:
    return torch.full((int(mib * MIB) // 4,), float(number))


def is_all(tensor: torch.Tensor, number: float) -> bool:
    return bool(tensor.eq(number).all())


def echo(value: object) -> object:
    return value


def metric(name: str) -> int:
    return int(agent().get_metrics()[name])


# ---- Many at once ----------------------------------------------------------------------------------------------------

FLOOD_CALLS = 300
WINDOW = 64 * MIB


def peak_mib() -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def first(number: int, tensor: torch.Tensor) -> tuple[int, float]:
    assert is_all(tensor, float(tensor[0]))
    return number, float(tensor[0])


def flood() -> None:
    tensors = [make(number) for number in range(16)]
    calls = [rpc.rpc_async("worker0", first, (number, tensors[number % 16])) for number in range(FLOOD_CALLS)]
    # This call overtakes the queue: most earlier calls still wait when it is answered.
    waiting = [call for call in calls if not call.done()]
    assert rpc.rpc_sync("worker0", echo, ("small",)) == "small"
    assert sum(not call.done() for call in waiting) > len(waiting) / 2
    for number, call in enumerate(calls):
        assert call.wait() == (number, number % 16)


@pytest.mark.field
@in_worker0(of=4, options={"receive_window_bytes": WINDOW})
def test_a_flood_is_answered_exactly_in_bounded_memory() -> None:
    senders = [f"worker{rank}" for rank in (1, 2, 3)]
    for name in senders:
        rpc.rpc_sync(name, echo, (make(0),))
    forget_peak()
    before = peak_mib()
    torch.futures.wait_all([rpc.rpc_async(name, flood) for name in senders])
    grown = peak_mib() - before
    assert grown < 1.2 * WINDOW / MIB


# ---- What could stall the window -------------------------------------------------------------------------------------


def keep(tensor: torch.Tensor) -> float:
    kept.append(tensor)
    return float(tensor[0])


def drop_kept() -> list[bool]:
    right = [is_all(tensor, number) for number, tensor in enumerate(sorted(kept, key=lambda tensor: float(tensor[0])))]
    kept.clear()
    return right


@in_worker0(of=2, options=SMALL_WINDOW)
def test_handlers_may_keep_their_tensors() -> None:
    calls = [rpc.rpc_async("worker1", keep, (make(number),)) for number in range(40)]
    assert [call.wait() for call in calls] == list(range(40))
    assert rpc.rpc_sync("worker1", metric, ("pool.in_use_bytes",)) >= 40 * MIB
    assert rpc.rpc_sync("worker1", metric, ("window.in_use_bytes",)) == 0
    assert rpc.rpc_sync("worker1", drop_kept) == [True] * 40
    eventually(lambda: rpc.rpc_sync("worker1", metric, ("pool.in_use_bytes",)) == 0, "all that was kept is free")


def call_back(caller: str, tensor: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(caller, torch.add, (tensor, 1)) + 1


@in_every_worker(of=2, options=SMALL_WINDOW)
def test_handlers_may_call_back_with_their_tensors(rank: int) -> None:
    me, other = f"worker{rank}", f"worker{1 - rank}"
    calls = [rpc.rpc_async(other, call_back, (me, make(number))) for number in range(40)]
    for number, call in enumerate(calls):
        assert is_all(call.wait(), number + 2)


def shares_before_and_after_a_call(caller: str, tensor: torch.Tensor) -> tuple[int, int]:
    before = metric("window.in_use_bytes")
    assert rpc.rpc_sync(caller, echo, (1,)) == 1
    return before, metric("window.in_use_bytes")


@in_worker0(of=2, options=SMALL_WINDOW)
def test_calling_handler_returns_its_share_of_the_window() -> None:
    before, after = rpc.rpc_sync("worker1", shares_before_and_after_a_call, ("worker0", make(0)))
    assert before >= MIB
    assert after == 0


meeting = threading.Barrier(8)


def meet(tensor: torch.Tensor) -> torch.Tensor:
    meeting.wait(timeout=40)
    return tensor


@in_worker0(of=2, options=SMALL_WINDOW)
def test_handlers_may_wait_for_each_other() -> None:
    # Together the tensors are six times the window.
    calls = [rpc.rpc_async("worker1", meet, (make(number, mib=3),)) for number in range(8)]
    for number, call in enumerate(calls):
        assert is_all(call.wait(), number)


@in_worker0(of=2, options=SMALL_WINDOW)
def test_messages_larger_than_the_window_pass() -> None:
    calls = [
        rpc.rpc_async("worker1", echo, (make(number, mib=size),)) for number, size in enumerate([16, 1, 9, 0.5, 4.5])
    ]
    for number, call in enumerate(calls):
        assert is_all(call.wait(), number)
