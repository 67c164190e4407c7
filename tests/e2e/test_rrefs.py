"""Remote references: their values, their copies on other workers, and their end."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
import torch.distributed.rpc as rpc
from torch.futures import Future

from tests.support.workers import agent, eventually, in_every_worker, in_worker0, over_shared_memory
from torch_ucx_rpc.errors import CallTimedOut, RRefLost


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, n: int, *, times: int = 1) -> int:
        self.count += n * times
        return self.count

    def where(self) -> str:
        return rpc.get_worker_info().name


def owned_here() -> int:
    gc.collect()
    return int(rpc._rref_context_get_debug_info()["num_owner_rrefs"])


def assert_all_freed(*workers: str) -> None:
    gc.collect()
    for worker in workers:
        eventually(lambda worker=worker: rpc.rpc_sync(worker, owned_here) == 0, f"{worker} owns nothing")


@in_worker0(of=2)
def test_the_value_of_an_rref_is_with_its_owner() -> None:
    rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
    assert rref.owner() == rpc.get_worker_info("worker1")
    assert rref.owner_name() == "worker1"
    assert not rref.is_owner()
    assert torch.equal(rref.to_here(), torch.full((2,), 2.0))
    # The owner confirms in a separate message, which may arrive after the value.
    eventually(rref.confirmed_by_owner, "the owner has confirmed")
    with pytest.raises(RuntimeError, match="localValue"):
        rref.local_value()


# Instead of each later RRef, plain torch marks the first one again, even if the first has been freed.
@over_shared_memory
@in_worker0(of=2)
def test_each_rref_whose_creation_timed_out_says_so() -> None:
    late = [rpc.remote("worker1", time.sleep, args=(2,), timeout=0.5) for _ in range(3)]
    for rref in late:
        eventually(rref._get_future().done, "its creation has timed out")
        with pytest.raises(RRefLost, match=r"timed out"):
            rref.to_here()
    assert rpc.remote("worker1", time.sleep, args=(0,)).to_here() is None
    eventually(lambda: rpc.rpc_sync("worker1", owned_here) == len(late), "the owner has made them")
    late.clear()
    del rref
    assert_all_freed("worker1")


made_late: list[bool] = []


def make_late(succeeds: bool) -> None:
    time.sleep(0.2)
    made_late.append(succeeds)
    assert succeeds


def count_made_late() -> int:
    return len(made_late)


# If a deletion arrives before the value, plain torch's owner forgets the deletion, and keeps the value for ever.
@over_shared_memory
@in_worker0(of=2, silent=False)
def test_an_rref_whose_creation_timed_out_is_freed_by_its_owner() -> None:
    for succeeds in (True, False, True):
        rref = rpc.remote("worker1", make_late, args=(succeeds,), timeout=0.02)
        with pytest.raises(CallTimedOut):
            rref._get_future().wait()
        del rref
    eventually(lambda: rpc.rpc_sync("worker1", count_made_late) == 3, "the owner has made them")
    assert_all_freed("worker1")


# When the value is made, torch writes to stderr that it has forgotten the RRef.
@over_shared_memory
@in_worker0(of=2, silent=False)
def test_an_rref_of_oneself_whose_creation_timed_out_says_so() -> None:
    for _ in range(2):
        mine = rpc.remote("worker0", time.sleep, args=(2,), timeout=0.5)
        eventually(mine._get_future().done, "its creation has timed out")
        with pytest.raises(RRefLost, match=r"timed out"):
            mine.to_here()
    eventually(lambda: agent().get_metrics()["agent.server_active_calls"] == "0", "the calls are over")


def make_later(value: object) -> object:
    time.sleep(2)
    return value


@rpc.functions.async_execution
def make_later_by_a_future() -> torch.futures.Future:
    return rpc.rpc_async("worker1", make_later, (5,))


# Plain torch forgets the RRef, so nothing ends a wait that has begun before.
@over_shared_memory
@in_worker0(of=2, silent=False)
def test_a_wait_for_ones_own_rref_ends_with_its_timeout() -> None:
    for make, arguments, value in ((make_later, (3,), 3), (make_later_by_a_future, (), 5)):
        mine = rpc.remote("worker0", make, arguments, timeout=0.3)
        with pytest.raises(RRefLost, match=r"its rpc.remote\(\) has timed out|creation .* timed out"):
            mine.to_here()
        assert agent().get_metrics()["agent.server_active_calls"] == "1", "the wait ended with the call"
        eventually(lambda: agent().get_metrics()["agent.server_active_calls"] == "0", "the call is over")
        with pytest.raises(RRefLost, match=r"timed out"):
            mine.to_here()
        assert rpc.remote("worker0", make, arguments).to_here() == value
        del mine
    assert_all_freed("worker0")


@over_shared_memory
@in_worker0(of=2)
def test_an_rref_to_a_local_object_is_local() -> None:
    counter = Counter()
    rref = rpc.RRef(counter)
    assert rref.is_owner()
    assert rref.local_value() is counter
    assert rref.to_here() is counter
    assert rref.rpc_sync().add(3) == 3
    mine = rpc.remote("worker0", Counter, args=(5,))
    assert mine.rpc_sync().add(1) == 6
    assert mine.to_here() is mine.local_value()


@in_worker0(of=2)
def test_proxies_call_methods_on_the_owner() -> None:
    rref = rpc.remote("worker1", Counter, args=(10,))
    assert rref.rpc_sync().where() == "worker1"
    assert rref.rpc_sync().add(1) == 11
    assert rref.rpc_async().add(2, times=2).wait() == 15
    assert rref.remote().add(5).to_here() == 20


@in_worker0(of=2)
def test_to_here_fetches_large_values() -> None:
    assert torch.equal(rpc.remote("worker1", torch.full, args=((3 << 20,), 7.0)).to_here(), torch.full((3 << 20,), 7.0))


def value_of(rref: rpc.RRef) -> object:
    return rref.to_here()


def add_to(rref: rpc.RRef, n: int) -> int:
    return rref.rpc_sync().add(n)


@in_worker0(of=3)
def test_rref_passes_to_a_third_worker_its_owner_and_back() -> None:
    theirs = rpc.remote("worker1", Counter)
    mine = rpc.RRef(Counter())
    for rref in (theirs, mine):
        assert rpc.rpc_sync("worker2", add_to, args=(rref, 1)) == 1
        assert rpc.rpc_sync("worker1", add_to, args=(rref, 1)) == 2
        assert rpc.rpc_sync("worker0", add_to, args=(rref, 1)) == 3
        # The third worker has not asked for the value yet.
        assert rpc.remote("worker2", add_to, args=(rref, 1)).to_here() == 4
    assert mine.local_value().count == 4


_kept: list[rpc.RRef] = []


def keep(rref: rpc.RRef) -> None:
    _kept.append(rref)


def let_go() -> None:
    _kept.clear()
    gc.collect()


def count_kept() -> int:
    return _kept[0].rpc_sync().add(0)


@in_worker0(of=3)
def test_a_fork_keeps_the_value_alive_when_the_creator_is_gone() -> None:
    rref = rpc.remote("worker1", Counter, args=(42,))
    rpc.rpc_sync("worker2", keep, args=(rref,))
    del rref
    gc.collect()
    assert rpc.rpc_sync("worker2", count_kept) == 42
    assert rpc.rpc_sync("worker1", owned_here) == 1
    rpc.rpc_sync("worker2", let_go)
    assert_all_freed("worker0", "worker1", "worker2")


@in_worker0(of=2)
def test_deleting_the_last_reference_frees_the_owners_object() -> None:
    rrefs = [rpc.remote("worker1", Counter, args=(i,)) for i in range(20)]
    for rref in rrefs:
        rref.to_here()
    assert rpc.rpc_sync("worker1", owned_here) == 20
    del rref
    rrefs.clear()
    assert_all_freed("worker1")


def make_nested(names: list[str]) -> rpc.RRef:
    """Make an RRef whose value is an RRef and so on, each on the next worker."""
    if not names:
        return rpc.RRef(Counter(7))
    return rpc.remote(names[0], make_nested, args=(names[1:],))


@over_shared_memory
@in_worker0(of=4)
def test_rrefs_of_rrefs_can_be_followed() -> None:
    value: object = make_nested(["worker1", "worker2", "worker3"])
    depth = 0
    while isinstance(value, rpc.PyRRef):
        value, depth = value.to_here(), depth + 1
    assert value.count == 7
    # Each of the four workers made one RRef. worker3 made a local one.
    assert depth == 4


@in_worker0(of=3)
def test_rrefs_in_containers_and_in_results_are_passed() -> None:
    rrefs = {"a": rpc.remote("worker1", Counter, args=(1,)), "b": [rpc.remote("worker2", Counter, args=(2,))]}
    returned = rpc.rpc_sync("worker2", same, args=(rrefs,))
    assert returned["a"].rpc_sync().add(0) == 1
    assert returned["b"][0].rpc_sync().add(0) == 2


def same(value: object) -> object:
    return value


def fail(message: str) -> None:
    raise ValueError(message)


@in_worker0(of=2, silent=False)
def test_an_rref_whose_creation_failed_raises_where_it_is_used() -> None:
    rref = rpc.remote("worker1", fail, args=("no such thing",))
    for use in (rref.to_here, lambda: rpc.rpc_sync("worker1", value_of, args=(rref,))):
        with pytest.raises(ValueError, match="no such thing"):
            use()


@torch.jit.script
def tenfold(rref: torch.distributed.rpc.RRef[torch.Tensor]) -> torch.Tensor:
    return rref.to_here() * 10


@in_worker0(of=2)
def test_torchscript_functions_take_rrefs() -> None:
    rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
    assert torch.equal(rpc.rpc_sync("worker1", tenfold, args=(rref,)), torch.full((2,), 20.0))


@over_shared_memory
@in_worker0(of=2, options={"num_worker_threads": 1})
def test_rref_in_an_abandoned_call_is_freed() -> None:
    for takes_it in (value_of, tenfold):
        rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
        rref.to_here()
        busy = rpc.rpc_async("worker1", time.sleep, (1.5,))
        # The owner of an RRef waits for news of each copy that was sent, and so does the copy's sender.
        with pytest.raises(RuntimeError, match="ran for more than"):
            rpc.rpc_sync("worker1", takes_it, args=(rref,), timeout=0.1)
        busy.wait()
        del rref
        assert_all_freed("worker1")


def lock_with(value: object) -> tuple:
    return rpc.RRef(value), torch.ones(12345), threading.Lock()


def kept_tensors() -> int:
    gc.collect()
    return sum(type(thing) is torch.Tensor and thing.numel() == 12345 for thing in gc.get_objects())


# Plain torch keeps the RRefs and tensors that it has pickled before it fails, and shutdown() waits for the RRefs.
@pytest.mark.ucx_only
@over_shared_memory
@in_worker0(of=2, silent=False)
def test_rrefs_in_messages_that_cannot_be_sent_are_freed() -> None:
    unsendable = (threading.Lock(), torch.ones(2, device="meta"))
    for argument in unsendable:
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            theirs, mine = rpc.remote("worker1", Counter), rpc.RRef(Counter())
            with pytest.raises((TypeError, RuntimeError), match="cannot"):
                call("worker1", print, args=([theirs, mine, torch.ones(12345), argument],))
            with pytest.raises((TypeError, RuntimeError), match="cannot"):
                theirs.rpc_sync().add(argument)
    with pytest.raises(RuntimeError, match="cannot pickle"):
        rpc.rpc_sync("worker1", lock_with, args=(Counter(),))
    del theirs, mine
    assert_all_freed("worker0", "worker1")
    assert kept_tensors() == 0
    assert rpc.rpc_sync("worker1", kept_tensors) == 0


def make_slowly() -> Counter:
    time.sleep(1)
    return Counter()


def rref_in_the_making() -> tuple[rpc.RRef, Future]:
    """Return an RRef that worker1 makes slowly, and a call to it that waits there."""
    rref = rpc.remote("worker1", make_slowly)
    call = rref.rpc_async().add(1)
    eventually(lambda: rpc.rpc_sync("worker1", owned_here) == 1, "worker1 knows the RRef")
    return rref, call


@pytest.mark.ucx_only
@over_shared_memory
@in_worker0(of=2)
def test_rref_in_the_making_outlives_a_message_that_failed() -> None:
    rref, call = rref_in_the_making()
    with pytest.raises(TypeError, match="cannot pickle"):
        rpc.rpc_sync("worker1", print, args=(rref, threading.Lock()))
    assert call.wait() == 1
    del rref, call
    assert_all_freed("worker1")


def owner_of(rref: rpc.RRef) -> str:
    return rref.owner_name()


# Over TensorPipe the call waits for its timeout.
@pytest.mark.ucx_only
@over_shared_memory
@in_worker0(of=3)
def test_rref_in_the_making_outlives_a_third_workers_reference() -> None:
    rref, call = rref_in_the_making()
    assert rpc.rpc_sync("worker2", owner_of, args=(rref,)) == "worker1"
    assert call.wait() == 1
    del rref, call
    assert_all_freed("worker1")


class CallsAndFails:
    """Its pickling makes a call, and then fails."""

    def __reduce__(self) -> tuple:
        assert rpc.rpc_sync("worker1", owned_here) >= 0
        raise TypeError("this stays where it is")


@pytest.mark.ucx_only
@over_shared_memory
@in_worker0(of=2)
def test_rrefs_are_freed_if_the_pickling_makes_a_call() -> None:
    mine = rpc.RRef(Counter())
    with pytest.raises(TypeError, match="stays where it is"):
        rpc.rpc_sync("worker1", print, args=([mine, CallsAndFails()],))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        rpc.rpc_sync("worker1", print, args=([mine],), timeout="soon")
    assert mine.to_here().add(1) == 1
    del mine
    assert_all_freed("worker0")


@in_every_worker(of=4)
def test_all_workers_hold_references_to_all_others(rank: int) -> None:
    rrefs = [rpc.remote(f"worker{peer}", Counter, args=(rank,)) for peer in range(4) for _ in range(25)]
    futures = [rref.rpc_async().add(1) for rref in rrefs]
    assert [future.wait() for future in futures] == [rank + 1] * 100
