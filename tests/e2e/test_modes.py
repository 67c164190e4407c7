"""The calling thread's modes change neither what it sends nor what it receives.

A waiting caller decodes its answer on its own thread, with that thread's modes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed.rpc as rpc
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.workers import in_worker0, over_shared_memory, run_workers

LARGE = 1 << 18


class Recording(TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def inside_transform(transform: Callable[..., object]) -> Callable[[Callable[[], None]], None]:
    def run(body: Callable[[], None]) -> None:
        def traced(x: torch.Tensor) -> torch.Tensor:
            body()
            return (x * 2).sum()

        transform(traced)(torch.ones(3))

    return run


def inside(make_mode: Callable[[], object]) -> Callable[[Callable[[], None]], None]:
    def run(body: Callable[[], None]) -> None:
        with make_mode():
            body()

    return run


@contextmanager
def recording_nothing() -> Iterator[None]:
    with Recording() as mode:
        yield
    assert not mode.seen, mode.seen


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[Callable[[], None]], None]] = {
    "inference": inside(torch.inference_mode),
    "no grad": inside(torch.no_grad),
    "default device": inside(lambda: torch.device("meta")),
    "deterministic": inside(deterministic),
    "autocast": inside(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "dispatch mode": inside(recording_nothing),
    "fake tensors": inside(FakeTensorMode),
    "functionalize": inside_transform(torch.func.functionalize),
    "vmap": inside_transform(torch.func.vmap),
    "grad": inside_transform(torch.func.grad),
}


def matrix() -> torch.Tensor:
    return torch.arange(24.0).reshape(4, 6) % 5


VALUES: dict[str, Callable[[], object]] = {
    "small": matrix,
    "large": lambda: torch.arange(float(LARGE)),
    "requires grad": lambda: matrix().requires_grad_(),
    "holes": lambda: torch.arange(float(LARGE))[::9],
    "borrowed memory": lambda: torch.from_numpy(np.arange(LARGE)),
    "transposed": lambda: matrix().t(),
    "conjugate": lambda: (matrix() * 1j).conj(),
    "negative": lambda: torch._neg_view(matrix()),
    "zero tensor": lambda: torch._efficientzerotensor(5),
    "quantized": lambda: torch.quantize_per_tensor(matrix(), 0.1, 3, torch.qint8),
    "per channel": lambda: torch.quantize_per_channel(matrix(), torch.ones(4), torch.zeros(4), 0, torch.quint4x2),
    "COO": lambda: matrix().to_sparse(),
    "CSR": lambda: matrix().to_sparse_csr(),
    "BSC": lambda: matrix().to_sparse_bsc((2, 3)),
    "array": lambda: np.arange(LARGE),
    "array backwards": lambda: np.arange(LARGE)[::-1],
    "small array": lambda: np.arange(5),
}


def make(name: str) -> object:
    return VALUES[name]()


def differences(name: str, value: object) -> list[str]:
    expected = make(name)
    if isinstance(expected, np.ndarray):
        return [] if type(value) is np.ndarray and np.array_equal(value, expected) else ["another array"]
    if type(value) is not type(expected):
        return [f"a {type(value)}"]
    found = [
        f"{what} is {getattr(value, what)}"
        for what in ("dtype", "device", "layout", "requires_grad", "shape")
        if getattr(value, what) != getattr(expected, what)
    ]
    if found:
        return found
    if value.is_inference():
        return ["an inference tensor"]
    if value._version != 0:
        return [f"version {value._version}"]
    plain = [t.detach() if t.layout is torch.strided else t.detach().to_dense() for t in (value, expected)]
    plain = [t.dequantize() if t.is_quantized else t.resolve_conj().resolve_neg() for t in plain]
    return [] if torch.equal(*plain) else ["other values"]


RESULTS: dict[str, Callable[[str], object]] = {
    "rpc_sync": lambda name: rpc.rpc_sync("worker1", make, args=(name,)),
    "rpc_async": lambda name: rpc.rpc_async("worker1", make, args=(name,)).wait(),
    "to_here": lambda name: rpc.remote("worker1", make, args=(name,)).to_here(),
    "rpc_sync to oneself": lambda name: rpc.rpc_sync("worker0", make, args=(name,)),
}


def call_within(rank: int, mode: str) -> None:
    if rank != 0:
        return
    within = MODES[mode]
    problems = []
    for name in VALUES:
        print(mode, name, flush=True)
        value = make(name)
        for way, receive in RESULTS.items():
            received: list[object] = []
            try:
                within(lambda receive=receive, name=name, received=received: received.append(receive(name)))
                problems += [f"{name} as result of {way}: {what}" for what in differences(name, received[0])]
            except Exception as error:
                problems.append(f"{name} as result of {way}: {error!r}")
        said: list[list[str]] = []
        try:
            within(lambda name=name, value=value, said=said: said.append(send(name, value)))
            problems += [f"{name} as argument: {what}" for what in said[0]]
        except Exception as error:
            problems.append(f"{name} as argument: {error!r}")
    assert not problems, "\n".join(problems)


def send(name: str, value: object) -> list[str]:
    return rpc.rpc_sync("worker1", differences, args=(name, value))


@pytest.mark.ucx_only
@pytest.mark.parametrize("mode", MODES)
def test_values_travel_alike_in_every_mode(mode: str) -> None:
    run_workers(2, call_within, mode, silent=False, timeout=150)


def numbers() -> torch.Tensor:
    return torch.arange(3.0)


@over_shared_memory
@in_worker0(of=2)
def test_results_in_inference_mode_can_be_used_in_training() -> None:
    weight = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        results = [
            rpc.rpc_sync("worker1", numbers),
            rpc.rpc_async("worker1", numbers).wait(),
            rpc.remote("worker1", numbers).to_here(),
            rpc.rpc_sync("worker1", torch.add, args=(torch.ones(3), 1)),
        ]
    for result in results:
        (weight * result).sum().backward()
        result.add_(1)


@over_shared_memory
@pytest.mark.ucx_only
@in_worker0(of=2)
def test_modes_of_a_waiting_caller_affect_no_other_thread() -> None:
    kinds: list[bool] = []

    def call() -> None:
        kinds.extend(rpc.rpc_sync("worker1", numbers).is_inference() for _ in range(100))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    with torch.inference_mode():
        kinds.extend(rpc.rpc_sync("worker1", numbers).is_inference() for _ in range(200))
    for thread in threads:
        thread.join()
    assert kinds == [False] * 500


@over_shared_memory
@in_worker0(of=2)
def test_callbacks_have_the_modes_of_the_thread_that_set_them() -> None:
    seen: list[tuple[bool, bool]] = []

    def look(future: torch.futures.Future[torch.Tensor]) -> bool:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return future.wait().is_inference()

    with torch.inference_mode():
        within = [rpc.rpc_async("worker1", numbers).then(look) for _ in range(20)]
        for _ in range(20):
            rpc.rpc_sync("worker1", numbers)
        assert torch.futures.wait_all(within) == [False] * 20
    assert set(seen) == {(True, False)}
    seen.clear()
    without = [rpc.rpc_async("worker1", numbers).then(look) for _ in range(20)]
    with torch.inference_mode():
        for _ in range(20):
            rpc.rpc_sync("worker1", numbers)
        assert torch.futures.wait_all(without) == [False] * 20
    assert set(seen) == {(False, True)}
