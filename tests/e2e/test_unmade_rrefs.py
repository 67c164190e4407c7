"""If `rpc.remote` fails at the owner before a value exists, every use of the RRef raises the owner's error."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

from tests.support import workers
from tests.support.workers import agent, eventually
from torch_ucx_rpc.errors import OutOfResources, RRefLost

pytestmark = pytest.mark.ucx_only


class CannotArrive:
    """An argument whose unpickling calls ``function(*args)``."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.reduced = function, args

    def __reduce__(self) -> Any:
        return self.reduced


class Refusing:
    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}

    def __setstate__(self, state: object) -> NoReturn:
        raise ValueError("refused here")


def out_of_memory() -> NoReturn:
    raise MemoryError("no room here")


def take(*args: object) -> int:
    return len(args)


def with_argument(argument: object) -> Callable[[str], rpc.RRef]:
    return lambda owner: rpc.remote(owner, take, args=(torch.ones(3), argument))


def unknown_function(owner: str) -> rpc.RRef:
    def known_here(*args: object) -> None:
        return None

    known_here.__qualname__ = known_here.__name__
    globals()["known_here"] = known_here
    return rpc.remote(owner, known_here)


def unknown_script(owner: str) -> rpc.RRef:
    @torch.jit.script
    def script_of_this_worker_alone(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    return rpc.remote(owner, script_of_this_worker_alone, args=(torch.ones(2),))


# The arguments of rpc.remote, and the error of the owner.
FAILURES: dict[str, tuple[Callable[[str], rpc.RRef], type[Exception], str]] = {
    "setstate raises": (with_argument(Refusing()), ValueError, "refused here"),
    "missing module": (with_argument(CannotArrive(__import__, "no_such")), ModuleNotFoundError, "no_such"),
    "system exit": (with_argument(CannotArrive(sys.exit, 5)), RuntimeError, "SystemExit: 5"),
    "out of memory": (with_argument(CannotArrive(out_of_memory)), MemoryError, "no room here"),
    "unknown function": (unknown_function, AttributeError, "known_here"),
    "unknown script": (unknown_script, RuntimeError, "script_of_this_worker_alone"),
}


def value_of(rref: rpc.RRef) -> object:
    return rref.local_value() if rref.is_owner() else rref.to_here()


# The ways to ask for the value: by the creator, by a third worker, and by the owner.
WAYS: dict[str, Callable[[rpc.RRef], object]] = {
    "to_here": lambda rref: rref.to_here(),
    "rpc_sync": lambda rref: rref.rpc_sync().bit_length(),
    "third worker": lambda rref: rpc.rpc_sync("worker2", value_of, (rref,)),
    "owner": lambda rref: rpc.rpc_sync(rref.owner_name(), value_of, (rref,)),
}
# After these uses, torch itself keeps an RRef whose function has raised.
ASYNCHRONOUS: dict[str, Callable[[rpc.RRef], object]] = {
    "rpc_async": lambda rref: rref.rpc_async().bit_length().wait(),
    "remote": lambda rref: rref.remote().bit_length().to_here(),
}


def references() -> dict[str, str]:
    gc.collect()
    known: dict[str, str] = rpc._rref_context_get_debug_info()
    return {name: known[name] for name in ("num_owner_rrefs", "num_pending_users", "num_forks") if known[name] != "0"}


def assert_no_references() -> None:
    names = ("worker0", "worker1", "worker2")
    # All workers collect garbage each time: the error's frames hold the RRef on the worker that raised it.
    eventually(
        lambda: [rpc.rpc_sync(name, references) for name in names] == [{}, {}, {}], "no worker has a reference left"
    )


def error_of(use: Callable[[rpc.RRef], object], rref: rpc.RRef) -> tuple[type[Exception] | None, str]:
    """Return only the type and text: the exception itself would keep frames that hold the RRef."""
    try:
        use(rref)
    except Exception as error:
        return type(error), str(error)
    return None, ""


def assert_raises(uses: Iterable[Callable[[rpc.RRef], object]], rref: rpc.RRef, name: str) -> None:
    _, expected, part = FAILURES[name]
    for use in uses:
        found, text = error_of(use, rref)
        assert found is not None
        assert issubclass(found, expected)
        assert part in text


def ways_for(name: str) -> list[Callable[[rpc.RRef], object]]:
    # If a script fails, torch makes an RRef of another type. Then torch refuses references that reach the owner.
    return [use for way, use in WAYS.items() if name != "unknown script" or way in ("to_here", "third worker")]


def ask_in_every_way(name: str, owner: str) -> None:
    make, _, _ = FAILURES[name]
    for use in ways_for(name):
        assert_raises([use], make(owner), name)
    rref = make(owner)
    eventually(rref.confirmed_by_owner, "the owner has answered")
    assert_raises(ways_for(name), rref, name)


def ask(rank: int, name: str, owner: str) -> None:
    if rank != 0:
        return
    ask_in_every_way(name, owner)
    assert_no_references()
    if name != "unknown script":
        assert_raises(ASYNCHRONOUS.values(), FAILURES[name][0](owner), name)


# worker0 itself knows the function and the script that other workers do not know.
@pytest.mark.parametrize(
    ("name", "owner"),
    [(name, "worker1") for name in FAILURES] + [(name, "worker0") for name in FAILURES if "unknown" not in name],
)
def test_every_use_raises_the_owners_error(name: str, owner: str) -> None:
    began = time.monotonic()
    workers.run_workers(3, ask, name, owner, silent=False)
    assert time.monotonic() - began < 60, "the shutdown waited for a reference"


def ask_within_a_context(rank: int) -> None:
    if rank != 0:
        return
    for name, (make, _, _) in FAILURES.items():
        with dist_autograd.context():
            rref = make("worker1")
            assert_raises(ways_for(name), rref, name)
            del rref
    assert_no_references()


def test_an_autograd_context_does_not_change_the_error() -> None:
    workers.run_workers(3, ask_within_a_context, silent=False)


def ask_with_a_timeout(rank: int) -> None:
    if rank != 0:
        return
    rref = rpc.remote("worker1", take, args=(Refusing(),), timeout=20)
    assert_raises([lambda rref: rref.to_here(timeout=20)], rref, "setstate raises")
    del rref
    assert_no_references()


def test_a_timeout_does_not_change_the_error() -> None:
    workers.run_workers(3, ask_with_a_timeout, silent=False)


@workers.over_shared_memory
@workers.in_worker0(of=2, silent=False)
def test_calls_raise_the_error_with_its_type_too() -> None:
    for call in (rpc.rpc_sync, lambda *args: rpc.rpc_async(*args).wait()):
        with pytest.raises(ValueError, match="refused here"):
            call("worker1", take, (torch.ones(3), Refusing()))


def unpickled_tensors() -> int:
    gc.collect()
    return sum(type(thing) is torch.Tensor and thing.numel() == 12345 for thing in gc.get_objects())


@workers.over_shared_memory
@workers.in_worker0(of=2, silent=False)
def test_arguments_that_cannot_be_unpickled_are_freed() -> None:
    for _ in range(8):
        with pytest.raises(ValueError, match="refused here"):
            rpc.rpc_sync("worker1", take, (torch.ones(12345), Refusing()))
    assert rpc.rpc_sync("worker1", unpickled_tensors) == 0


_gate = threading.Event()


def wait_at_gate() -> None:
    _gate.wait()


def occupy_a_thread() -> None:
    rpc.rpc_sync("worker0", wait_at_gate)


# All threads of the owner wait, so it refuses the request unread.
@workers.over_shared_memory
@workers.in_worker0(of=3, options={"num_worker_threads": 4, "max_worker_threads": 4}, silent=False)
def test_an_rref_is_lost_if_its_owner_had_no_thread_for_it() -> None:
    blocked = [rpc.rpc_async("worker1", occupy_a_thread) for _ in range(4)]
    eventually(lambda: agent().get_metrics()["agent.server_active_calls"] == "4", "all threads of the owner wait")
    rref = rpc.remote("worker1", take)
    found, text = error_of(WAYS["to_here"], rref)
    assert found is OutOfResources
    assert "no thread left" in text
    _gate.set()
    for call in blocked:
        call.wait()
    for use in WAYS.values():
        found, text = error_of(use, rref)
        assert found is not None
        assert issubclass(found, RRefLost)
        assert "this RRef will never have a value: worker 'worker1' has no thread left" in text
    del rref
    assert_no_references()
