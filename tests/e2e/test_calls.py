"""Calls: rpc_sync, rpc_async and remote on Python functions, builtin operators and TorchScript functions."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed.rpc as rpc

from tests.support.workers import agent, in_every_worker, in_worker0, over_shared_memory

# Longer than a few calls on a loaded machine, and much shorter than a hang.
PROMPT_S = 15.0


def on_ucx() -> bool:
    return type(agent()).__name__ == "UcxRpcAgent"


def failure(kind: str, *elsewhere: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the type ``torch_ucx_rpc.errors.kind``, or on TensorPipe, which lacks it, the types ``elsewhere``."""
    if not on_ucx():
        return elsewhere
    # The import is here, since it changes torch, and TensorPipe must run without the package.
    from torch_ucx_rpc import errors

    return (getattr(errors, kind),)


def greet(name: str, *, greeting: str = "Hello") -> str:
    return f"{greeting}, {name}, from {rpc.get_worker_info().name}"


@torch.jit.script
def scaled_sum(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return (a + b) * scale


class Unusual(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text, "cannot be made of its args")


EXCEPTIONS = {
    exception.__name__: exception
    for exception in (ValueError, TypeError, RuntimeError, KeyError, FileNotFoundError, StopIteration, Unusual)
}


def fail(kind: str) -> None:
    raise EXCEPTIONS[kind]("this was to be")


class Failing:
    def fail(self, kind: str) -> None:
        fail(kind)


def fail_through(name: str, kind: str) -> None:
    rpc.rpc_sync(name, fail, args=(kind,))


@in_worker0(of=2)
def test_python_functions_are_called_with_arguments_and_keywords() -> None:
    expected = "Ahoy, you, from worker1"
    arguments = {"args": ("you",), "kwargs": {"greeting": "Ahoy"}}
    assert rpc.rpc_sync("worker1", greet, **arguments) == expected
    assert rpc.rpc_async("worker1", greet, **arguments).wait() == expected
    assert rpc.remote("worker1", greet, **arguments).to_here() == expected


@in_worker0(of=2)
def test_builtin_operators_are_called() -> None:
    a, b = torch.randn(3, 4), torch.randn(4)
    assert torch.equal(rpc.rpc_sync("worker1", torch.add, args=(a, b)), a + b)
    assert torch.equal(rpc.rpc_sync("worker1", torch.add, args=(a, b), kwargs={"alpha": 2}), a + 2 * b)
    assert torch.equal(rpc.rpc_async("worker1", torch.mul, args=(a, b)).wait(), a * b)
    assert torch.equal(rpc.remote("worker1", torch.sub, args=(a, b)).to_here(), a - b)


@in_worker0(of=2)
def test_torchscript_functions_are_called() -> None:
    a, b = torch.randn(5), torch.randn(5)
    assert torch.equal(rpc.rpc_sync("worker1", scaled_sum, args=(a, b)), a + b)
    assert torch.equal(rpc.rpc_async("worker1", scaled_sum, args=(a, b), kwargs={"scale": 3.0}).wait(), (a + b) * 3)
    assert torch.equal(rpc.remote("worker1", scaled_sum, args=(a, b, 0.5)).to_here(), (a + b) * 0.5)


@in_worker0(of=3)
def test_workers_are_addressed_by_name_rank_or_info() -> None:
    for target in ("worker2", 2, rpc.get_worker_info("worker2")):
        assert rpc.rpc_sync(target, greet, args=("you",)) == "Hello, you, from worker2"
    with pytest.raises(failure("UnknownWorker", RuntimeError, ValueError), match="worker7") as raised:
        rpc.rpc_sync("worker7", greet, args=("you",))
    if on_ucx():
        assert raised.value.name == "worker7"
    # A worker that has taken the rank of a former one is not called in its place.
    with pytest.raises(failure("UnknownWorker", RuntimeError, ValueError), match="former"):
        rpc.rpc_sync(rpc.WorkerInfo("former", 2), greet, args=("you",))


@over_shared_memory
@in_every_worker(of=2, silent=False)
def test_calls_to_oneself_work(rank: int) -> None:
    me = rpc.get_worker_info()
    a = torch.randn(1000)
    assert rpc.rpc_sync(me, greet, args=("me",)) == f"Hello, me, from worker{rank}"
    assert torch.equal(rpc.rpc_async(me, torch.add, args=(a, 1)).wait(), a + 1)
    assert torch.equal(rpc.rpc_sync(me, scaled_sum, args=(a, a)), a + a)
    assert rpc.remote(me, greet, args=("me",)).to_here() == f"Hello, me, from worker{rank}"
    with pytest.raises(ValueError, match="this was to be"):
        rpc.rpc_sync(me, fail, args=("ValueError",))


@over_shared_memory
@in_worker0(of=1)
def test_a_job_of_one_worker_works() -> None:
    assert rpc.rpc_sync("worker0", greet, args=("me",)) == "Hello, me, from worker0"


@in_worker0(of=2)
def test_each_of_thousands_of_calls_gets_its_own_answer() -> None:
    futures = [rpc.rpc_async("worker1", torch.add, args=(torch.tensor(i), 1)) for i in range(3000)]
    assert [int(future.wait()) for future in futures] == list(range(1, 3001))


@in_every_worker(of=4)
def test_all_workers_call_all_at_once(rank: int) -> None:
    futures = {
        (peer, i): rpc.rpc_async(f"worker{peer}", torch.add, args=(torch.full((100,), float(rank)), i))
        for i in range(50)
        for peer in range(4)
    }
    for (_, i), future in futures.items():
        assert torch.equal(future.wait(), torch.full((100,), float(rank + i)))


def call_onwards(names: list[str]) -> list[str]:
    here = rpc.get_worker_info().name
    return [here, *rpc.rpc_sync(names[0], call_onwards, args=(names[1:],))] if names else [here]


@in_worker0(of=3)
def test_handlers_may_call_other_workers_and_back() -> None:
    way = ["worker1", "worker2", "worker0", "worker1"]
    assert call_onwards(way) == ["worker0", *way]


@over_shared_memory
@in_worker0(of=2)
def test_callbacks_of_a_future_run_with_its_value() -> None:
    future = rpc.rpc_async("worker1", torch.add, args=(torch.ones(2), 1))
    assert torch.equal(future.then(lambda done: done.value() * 10).wait(), torch.full((2,), 20.0))

    called = threading.Event()
    rpc.rpc_async("worker1", torch.add, args=(torch.ones(2), 1)).add_done_callback(lambda _: called.set())
    assert called.wait(PROMPT_S)


@rpc.functions.async_execution
def add_on(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.futures.Future:
    return rpc.rpc_async(name, torch.add, args=(a, b)).then(lambda sum_: sum_.wait() * 10)


@rpc.functions.async_execution
def not_a_future() -> int:
    return 1


class Accumulator:
    """Answers each of ``of`` callers with the sum of all values, after the last call."""

    def __init__(self, of: int) -> None:
        self._left, self._sum = of, 0
        self._answer: torch.futures.Future = torch.futures.Future()
        self._lock = threading.Lock()

    @staticmethod
    @rpc.functions.async_execution
    def add(self_rref: rpc.RRef, number: int) -> torch.futures.Future:
        self = self_rref.local_value()
        with self._lock:
            self._left -= 1
            self._sum += number
            if self._left == 0:
                self._answer.set_result(self._sum)
        return self._answer


@over_shared_memory
@in_worker0(of=3)
def test_async_execution_answers_when_its_future_is_done() -> None:
    arguments = {"args": ("worker2", torch.ones(2), 1)}
    expected = torch.full((2,), 20.0)
    assert torch.equal(rpc.rpc_sync("worker1", add_on, **arguments), expected)
    assert torch.equal(rpc.rpc_async("worker1", add_on, **arguments).wait(), expected)
    assert torch.equal(rpc.remote("worker1", add_on, **arguments).to_here(), expected)
    with pytest.raises(RuntimeError, match=r"Functions decorated with @rpc\.async_function must return"):
        rpc.rpc_sync("worker1", not_a_future)


@over_shared_memory
@in_worker0(of=2)
def test_async_execution_holds_no_thread_while_it_waits() -> None:
    # The callers outnumber the threads that serve them.
    accumulator = rpc.remote("worker1", Accumulator, args=(100,))
    futures = [rpc.rpc_async("worker1", Accumulator.add, args=(accumulator, i)) for i in range(100)]
    assert [future.wait() for future in futures] == [sum(range(100))] * 100


# ---- Errors ----------------------------------------------------------------------------------------------------------


# torch prints the traceback of a failing function on the callee.
@over_shared_memory
@in_worker0(of=2, silent=False)
def test_exceptions_of_the_callee_keep_type_and_message() -> None:
    for kind, exception in EXCEPTIONS.items():
        future = rpc.rpc_async("worker1", fail, args=(kind,))
        for call in (
            lambda kind=kind: rpc.rpc_sync("worker1", fail, args=(kind,)),
            future.wait,
            future.value,  # a second time
            lambda future=future: torch.futures.collect_all([future]).wait()[0].wait(),
            lambda future=future: torch.futures.wait_all([future]),
            lambda kind=kind: rpc.remote("worker1", fail, args=(kind,)).to_here(),
            lambda kind=kind: rpc.remote("worker1", Failing).rpc_sync().fail(kind),
            lambda kind=kind: rpc.rpc_sync("worker1", fail_through, args=("worker0", kind)),
        ):
            with pytest.raises(exception, match="this was to be") as raised:
                call()
            assert (raised.type.__name__, raised.type.__module__) == (kind, exception.__module__)
            # The error names the worker, and has its stack.
            for word in (kind, "worker1", "in fail"):
                assert word in str(raised.value)


def fail_saying(text: str) -> None:
    raise LookupError(text)


# If the exception does not keep torch's description of it alive, to_here() ends the process.
@over_shared_memory
@in_worker0(of=2, silent=False)
def test_exceptions_with_long_texts_arrive() -> None:
    text = "long " * 10_000 + "to the end"
    for call in (
        lambda: rpc.rpc_sync("worker1", fail_saying, args=(text,)),
        lambda: rpc.remote("worker1", fail_saying, args=(text,)).to_here(),
    ):
        with pytest.raises((LookupError, RuntimeError), match="to the end"):
            call()


UNUSUAL_TEXTS = {r"no \Users here \x": r"no \Users here \x", "Größe 漢字": "Größe 漢字", "a\0b": r"a\x00b"}


# Plain torch raises a UnicodeDecodeError instead, or alters the text.
@pytest.mark.ucx_only
@over_shared_memory
@in_worker0(of=2, silent=False)
def test_exceptions_with_unusual_texts_arrive() -> None:
    for text, arrives in UNUSUAL_TEXTS.items():
        for call in (
            lambda text=text: rpc.rpc_sync("worker1", fail_saying, args=(text,)),
            lambda text=text: rpc.remote("worker1", fail_saying, args=(text,)).to_here(),
        ):
            with pytest.raises(LookupError) as raised:
                call()
            assert str(raised.value).rstrip().endswith(f"LookupError: {arrives}")


@over_shared_memory
@in_worker0(of=2, silent=False)
def test_callee_exceptions_are_tensorpipes_runtime_errors_too() -> None:
    for kind in ("RuntimeError", "KeyError", "FileNotFoundError", "Unusual"):
        with pytest.raises(RuntimeError, match="this was to be"):
            rpc.rpc_sync("worker1", fail, args=(kind,))
    with pytest.raises(KeyError) as raised:
        rpc.rpc_sync("worker1", fail, args=("KeyError",))
    copied = pickle.loads(pickle.dumps(raised.value))
    assert type(copied) is KeyError
    assert copied.args == raised.value.args


@over_shared_memory
@in_worker0(of=2)
def test_errors_of_operators_and_torchscript_are_raised() -> None:
    a, b = torch.ones(2), torch.ones(3)
    for call in (
        lambda: rpc.rpc_sync("worker1", torch.add, args=(a, b)),
        lambda: rpc.rpc_sync("worker1", scaled_sum, args=(a, b)),
        lambda: rpc.rpc_async("worker1", torch.add, args=(a, b)).wait(),
    ):
        with pytest.raises(RuntimeError, match="must match the size of tensor b"):
            call()


class Unpicklable:
    def __reduce__(self) -> tuple:
        raise TypeError("this stays where it is")


def unpicklable() -> Unpicklable:
    return Unpicklable()


@over_shared_memory
@in_worker0(of=2)
def test_an_unpicklable_argument_fails_its_call_only() -> None:
    with pytest.raises(TypeError, match="this stays where it is"):
        rpc.rpc_sync("worker1", greet, args=(Unpicklable(),))
    with pytest.raises(Exception, match="this stays where it is"):
        rpc.rpc_sync("worker1", unpicklable)
    assert rpc.rpc_sync("worker1", greet, args=("you",)) == "Hello, you, from worker1"


# ---- Time ------------------------------------------------------------------------------------------------------------

_released = threading.Event()


def wait_for_release() -> str:
    assert _released.wait(60)
    return "released"


def release() -> None:
    _released.set()


def assert_times_out(call: Callable[[], object], *, after: float, callee: str = "worker1") -> None:
    start = time.monotonic()
    with pytest.raises(failure("CallTimedOut", RuntimeError), match="RPC ran for more than") as raised:
        call()
    if on_ucx():
        assert raised.value.name == callee
        # A tiny timeout counts as a millisecond.
        assert raised.value.timeout == pytest.approx(max(after, 0.001))
    # Agents count in milliseconds.
    assert after - 0.01 <= time.monotonic() - start < after + PROMPT_S


@over_shared_memory
@in_worker0(of=2)
def test_a_call_ends_at_its_own_timeout() -> None:
    try:
        assert_times_out(lambda: rpc.rpc_sync("worker1", wait_for_release, timeout=0.2), after=0.2)
        assert_times_out(lambda: rpc.rpc_async("worker1", wait_for_release, timeout=0.2).wait(), after=0.2)
        call_of_oneself = functools.partial(rpc.rpc_sync, "worker0", wait_for_release, timeout=0.2)
        assert_times_out(call_of_oneself, after=0.2, callee="worker0")
        rref = rpc.remote("worker1", wait_for_release)
        assert_times_out(lambda: rref.to_here(timeout=0.2), after=0.2)
        # Other calls continue, and the value can be fetched later.
        assert rpc.rpc_sync("worker1", greet, args=("you",)) == "Hello, you, from worker1"
    finally:
        rpc.rpc_sync("worker1", release)
        release()
    assert rref.to_here() == "released"


@over_shared_memory
@pytest.mark.ucx_only
@in_worker0(of=2)
def test_timeouts_of_every_size_count() -> None:
    for endless in (math.inf, 1e10, 1e30):
        assert rpc.rpc_sync("worker1", divmod, args=(17, 5), timeout=endless) == (3, 2)
        assert rpc.remote("worker1", divmod, args=(17, 5), timeout=endless).to_here(timeout=endless) == (3, 2)
    try:
        for tiny in (1e-4, 1e-30):  # these must not round to 0, which means no limit
            assert_times_out(lambda timeout=tiny: rpc.rpc_sync("worker1", wait_for_release, timeout=timeout), after=0)
    finally:
        rpc.rpc_sync("worker1", release)
    for wrong in (-2.0, -math.inf, math.nan):
        with pytest.raises(ValueError, match="0 or more seconds"):
            rpc.rpc_sync("worker1", divmod, args=(17, 5), timeout=wrong)
    assert rpc.rpc_sync("worker1", divmod, args=(17, 5), timeout=rpc.constants.UNSET_RPC_TIMEOUT) == (3, 2)


@over_shared_memory
@in_worker0(of=2, options={"rpc_timeout": 0.5})
def test_calls_without_a_timeout_have_the_agents_timeout() -> None:
    assert rpc.get_rpc_timeout() == 0.5
    try:
        assert_times_out(lambda: rpc.rpc_sync("worker1", wait_for_release), after=0.5)
        # 0 means no limit, and an agent's limit can be changed while it runs.
        unlimited = rpc.rpc_async("worker1", wait_for_release, timeout=0)
        rpc._set_rpc_timeout(1.0)
        assert_times_out(lambda: rpc.rpc_sync("worker1", wait_for_release), after=1.0)
        assert not unlimited.done()
    finally:
        rpc._set_rpc_timeout(60.0)
        rpc.rpc_sync("worker1", release)
        rpc.rpc_sync("worker1", rpc._set_rpc_timeout, (60.0,))  # worker1 needs this for its shutdown
    assert unlimited.wait() == "released"


def hold(tensor: torch.Tensor) -> int:
    wait_for_release()
    return tensor.numel()


@pytest.mark.ucx_only
@in_worker0(of=2)
def test_a_late_answer_is_dropped_and_the_agent_goes_on() -> None:
    tensor = torch.ones(1 << 20)
    futures = [rpc.rpc_async("worker1", hold, args=(tensor,), timeout=0.3) for _ in range(10)]
    for future in futures:
        with pytest.raises(failure("CallTimedOut")) as raised:
            future.wait()
        assert (raised.value.name, raised.value.timeout) == ("worker1", pytest.approx(0.3))
    rpc.rpc_sync("worker1", release)
    for i in range(10):
        assert torch.equal(rpc.rpc_sync("worker1", torch.add, args=(tensor, i)), tensor + i)
    assert agent().get_metrics()["agent.calls_timed_out"] == "10"
    assert agent().get_metrics()["agent.client_active_calls"] == "0"


def interrupt_then_wait(pid: int) -> str:
    # The caller is waiting for the answer to this call.
    os.kill(pid, signal.SIGINT)
    return wait_for_release()


@pytest.mark.ucx_only
@in_worker0(of=2)
def test_ctrl_c_interrupts_a_blocked_call_and_the_agent_goes_on() -> None:
    for call in (
        lambda: rpc.rpc_sync("worker1", interrupt_then_wait, args=(os.getpid(),)),
        lambda: rpc.rpc_async("worker1", interrupt_then_wait, args=(os.getpid(),)).wait(),
        lambda: torch.futures.wait_all([rpc.rpc_async("worker1", interrupt_then_wait, args=(os.getpid(),))]),
        lambda: rpc.remote("worker1", interrupt_then_wait, args=(os.getpid(),)).to_here(),
    ):
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            call()
        assert time.monotonic() - start < PROMPT_S
        assert rpc.rpc_sync("worker1", greet, args=("you",)) == "Hello, you, from worker1"
    rpc.rpc_sync("worker1", release)


# ---- Surroundings ----------------------------------------------------------------------------------------------------


@over_shared_memory
@in_worker0(of=2)
def test_calls_may_come_from_any_thread() -> None:
    results: dict[int, torch.Tensor] = {}

    def call(i: int) -> None:
        results[i] = rpc.rpc_sync("worker1", torch.add, args=(torch.full((64,), float(i)), 1))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {i: result[0].item() for i, result in results.items()} == {i: i + 1.0 for i in range(32)}


@contextlib.contextmanager
def deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@over_shared_memory
@in_worker0(of=2)
def test_tensors_arrive_under_deterministic_algorithms() -> None:
    # In this mode torch fills new memory. It must not fill received tensors.
    with deterministic_algorithms():
        tensor = torch.randn(1000, 100)
        assert torch.equal(rpc.rpc_sync("worker1", torch.mul, args=(tensor, 1)), tensor)
