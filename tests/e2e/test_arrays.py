"""Arrays of NumPy and of devices travel like tensors, without pickling, and arrive unchanged."""

from __future__ import annotations

import dataclasses
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch._jit_internal import _extract_tensors, _TensorExtractor
from torch.distributed.rpc.internal import _internal_rpc_pickler, deserialize, serialize

from tests.support.workers import agent, backend_options, eventually, in_worker0, init_rpc, run_program, worker_name
from tests.support.workers import run_workers as run_job
from torch_ucx_rpc._torch.arrays import _on_its_memory, _stream_of

# Larger than any array that is pickled, and than any tensor that travels inside the message.
LARGE = 1 << 17


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def random_items(dtype: Any, n: int = 70_000) -> np.ndarray:
    """Return an array of random bytes, which include NaNs with payloads."""
    dtype = np.dtype(dtype)
    bits = np.random.default_rng(1).integers(0, 256, n * dtype.itemsize, dtype=np.uint8)
    return (bits < 128) if dtype == np.bool_ else bits.view(dtype)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


RECORD = np.dtype([("key", "<i4"), ("values", ">f8", (2, 3)), ("name", "S5")])

TRAVELLING: dict[str, Callable[[], np.ndarray]] = {
    **{f"dtype {code}": lambda code=code: random_items(code) for code in "?bBhHiIlLqQefdFD"},
    "long double": lambda: numbers(LARGE, dtype=np.longdouble),
    "complex long double": lambda: numbers(LARGE, dtype=np.clongdouble),
    "other byte order": lambda: numbers(LARGE, dtype=np.dtype("f4").newbyteorder()),
    "dates": lambda: random_items("M8[us]"),
    "durations": lambda: random_items("m8[3h]"),
    "bytes": lambda: numbers(LARGE, dtype="S7"),
    "text": lambda: numbers(LARGE, dtype="U7"),
    "void": lambda: random_items("V11"),
    "records": lambda: random_items(RECORD),
    "aligned records": lambda: np.zeros(LARGE, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "a field of records": lambda: random_items(RECORD)["key"],
    "an array field of records": lambda: random_items(RECORD)["values"],
    "dtype with metadata": lambda: np.zeros(LARGE, np.dtype("f4", metadata={"unit": "m"})),
    "Fortran order": lambda: np.asfortranarray(numbers(300, 400)),
    "Fortran order, dates": lambda: np.asfortranarray(numbers(300, 400, dtype="M8[s]")),
    "permuted": lambda: numbers(30, 40, 50).transpose(2, 0, 1),
    "every third": lambda: numbers(LARGE)[::3],
    "columns": lambda: numbers(400, 500)[:, 100:300],
    "backwards": lambda: numbers(LARGE)[::-1],
    "backwards in one dimension": lambda: numbers(300, 400)[:, ::-2],
    "broadcast": lambda: np.broadcast_to(numbers(300), (400, 300)),
    "windows": lambda: np.lib.stride_tricks.sliding_window_view(numbers(LARGE), 5),
    "read-only": lambda: read_only(numbers(LARGE)),
    "read-only and backwards": lambda: read_only(numbers(LARGE))[::-1],
    "of bytes": lambda: np.frombuffer(bytes(LARGE), np.uint8),
    "unaligned": lambda: np.frombuffer(bytearray(4 * LARGE + 1), np.float32, offset=1),
    "of a tensor": lambda: torch.arange(LARGE).numpy(),
    "many dimensions": lambda: np.zeros((2,) * 17),
    "37 MiB": lambda: numbers(37 << 18),
}

PICKLED: dict[str, Callable[[], Any]] = {
    "small": lambda: numbers(1000),
    "zero-dimensional": lambda: np.array(3.5),
    "no elements": lambda: np.empty((3, 0, 2), np.int16),
    "items without bytes": lambda: np.empty(LARGE, "V0"),
    "objects": lambda: np.array([{"a": 1}, None, "text"] * 10_000, dtype=object),
    "records with objects": lambda: np.zeros(20_000, [("a", "i4"), ("b", object)]),
    "more dimensions than NumPy 1 had": lambda: (
        np.zeros((1,) * 40 + (LARGE,)) if np.__version__ >= "2" else np.zeros(1)
    ),
    "scalar": lambda: np.float32(2.5),
    "scalar, a date": lambda: np.datetime64("2020-01-01"),
    "matrix": lambda: np.ones((300, 400)).view(np.matrix),
    "masked": lambda: np.ma.masked_greater(numbers(LARGE), 1000),
    "record array": lambda: random_items(RECORD).view(np.recarray),
}

CASES = TRAVELLING | PICKLED


def properties(array: Any) -> dict[str, object]:
    found = {name: getattr(array, name) for name in ("dtype", "shape", "nbytes")} | {"type": type(array)}
    if isinstance(array, np.ndarray):
        # NumPy 2.2 makes {} of None when it unpickles the type of a date.
        found |= {"writeable": array.flags.writeable, "metadata": dict(array.dtype.metadata or {})}
        # Arrays with gaps or negative strides may arrive contiguous. Other arrays keep their order.
        if array.flags.forc:
            found |= {"C order": array.flags.c_contiguous, "Fortran order": array.flags.f_contiguous}
    return found


def differences(expected: Any, actual: Any) -> list[str]:
    theirs = properties(actual)
    found = [
        f"{name} is {theirs.get(name)} instead of {value}"
        for name, value in properties(expected).items()
        if theirs.get(name) != value
    ]
    if found:
        return found
    if isinstance(expected, np.ma.MaskedArray):
        found = [] if np.array_equal(expected.mask, actual.mask) else ["other mask"]
        # Compare masked elements too.
        found += [] if np.array_equal(expected.data, actual.data) else ["other data"]
        return found + ([] if expected.fill_value == actual.fill_value else ["other fill value"])
    if expected.dtype.hasobject or expected.dtype.char in "gG":  # their bytes include padding or addresses
        same = expected.tolist() == actual.tolist()
    else:
        same = expected.tobytes() == actual.tobytes()
    return [] if same else ["other elements"]


def differences_at_arrival(case: str, array: Any) -> list[str]:
    return differences(CASES[case](), array)


def make(case: str) -> Any:
    return CASES[case]()


@pytest.mark.ucx_only
@in_worker0(of=2, timeout=120)
def test_arrays_arrive_as_they_were_sent() -> None:
    failures = []
    for case in CASES:
        # If the call ends the process, this line shows the case.
        print(case, flush=True)
        sent = rpc.rpc_sync("worker1", differences_at_arrival, args=(case, make(case)))
        returned = differences(make(case), rpc.rpc_sync("worker1", make, args=(case,)))
        failures += [f"{case}, as argument: {difference}" for difference in sent]
        failures += [f"{case}, as result: {difference}" for difference in returned]
    assert not failures, "\n".join(failures)


@pytest.mark.ucx_only
@in_worker0(of=1)
def test_large_plain_arrays_are_not_pickled() -> None:
    for case in CASES:
        value = make(case)
        pickled, tensors = serialize(value)
        assert len(tensors) == (case in TRAVELLING), case
        assert not tensors or len(pickled) < 1000, case
    array = numbers(LARGE)
    (tensor,) = serialize(array)[1]
    assert tensor.data_ptr() == array.ctypes.data


def bytes_sent(*arguments: object) -> int:
    before = int(agent().get_metrics()["agent.bytes_sent"])
    rpc.rpc_sync("worker1", len, args=(arguments,))
    return int(agent().get_metrics()["agent.bytes_sent"]) - before


@pytest.mark.ucx_only
@in_worker0(of=2)
def test_only_the_elements_of_a_view_travel() -> None:
    array = numbers(1024, 1024)
    assert array.nbytes <= bytes_sent(array) < array.nbytes + 4096
    assert array.nbytes <= bytes_sent(array, array.T) < array.nbytes + 4096
    assert bytes_sent(array[:100]) < array[:100].nbytes + 4096
    assert bytes_sent(array[:, :100]) < array[:, :100].nbytes + 4096


# ---- Where arrays may stand ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    observations: np.ndarray
    named: dict[str, list[np.ndarray]]
    rewards: torch.Tensor


def batch() -> Batch:
    named = {"actions": [numbers(LARGE), numbers(LARGE, dtype=np.int64)], "few": [numbers(3)]}
    return Batch(numbers(300, 400), named, torch.arange(LARGE))


def reversed_batch(batch: Batch) -> Batch:
    return Batch(
        batch.observations[::-1],
        {name: arrays[::-1] for name, arrays in batch.named.items()},
        batch.rewards.flip(0),
    )


def assert_same(a: Batch, b: Batch) -> None:
    np.testing.assert_array_equal(a.observations, b.observations)
    np.testing.assert_equal(a.named, b.named)
    assert torch.equal(a.rewards, b.rewards)


@in_worker0(of=2)
def test_arrays_within_any_picklable_value_arrive() -> None:
    expected = reversed_batch(batch())
    assert_same(rpc.rpc_sync("worker1", reversed_batch, kwargs={"batch": batch()}), expected)
    assert_same(rpc.rpc_async("worker1", reversed_batch, args=(batch(),)).wait(), expected)
    rref = rpc.remote("worker1", reversed_batch, args=(batch(),))
    assert_same(rref.to_here(), expected)


def shares_memory(a: np.ndarray, b: np.ndarray) -> bool:
    a[...] = 1
    b[...] = 2
    return bool((a == 2).any())


def is_same(a: object, b: object) -> bool:
    return a is b


@pytest.mark.ucx_only
@in_worker0(of=2)
def test_shared_memory_is_shared_after_arrival() -> None:
    base = numbers(LARGE, 2)
    for a, b in ((base, base.T), (base, base[LARGE // 2 :]), (base[: LARGE // 2 + 1], base[LARGE // 2 :])):
        assert rpc.rpc_sync("worker1", shares_memory, args=(a, b))
    assert rpc.rpc_sync("worker1", shares_memory, args=(base, torch.from_numpy(base).numpy()))
    assert not rpc.rpc_sync("worker1", shares_memory, args=(base, base.copy()))
    assert rpc.rpc_sync("worker1", is_same, args=(base, base))


def one_more(array: np.ndarray) -> np.ndarray:
    array += 1
    return array


def refuses_to_be_written(array: np.ndarray) -> bool:
    try:
        array += 1
    except ValueError as error:
        return "read-only" in str(error)
    return False


@pytest.mark.ucx_only
@in_worker0(of=2)
def test_arrived_arrays_are_writable_if_the_sent_ones_were() -> None:
    array = numbers(LARGE)
    returned = rpc.rpc_sync("worker1", one_more, args=(array,))
    np.testing.assert_array_equal(returned, array + 1)
    returned += 1
    assert rpc.rpc_sync("worker1", refuses_to_be_written, args=(read_only(array),))
    # Sending the array has changed nothing on this worker.
    assert not array.flags.writeable
    np.testing.assert_array_equal(array, numbers(LARGE))


def gradient_of(array: np.ndarray, tensor: torch.Tensor) -> torch.Tensor:
    return (torch.from_numpy(array) * tensor).sum()


@in_worker0(of=2)
def test_arrays_travel_beside_tensors_that_require_grad() -> None:
    array, tensor = numbers(LARGE), torch.ones(LARGE, requires_grad=True)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [rpc.rpc_sync("worker1", gradient_of, args=(array, tensor))])
        assert torch.equal(dist_autograd.get_gradients(context)[tensor], torch.from_numpy(array))


class Owner:
    """Owns the memory of an array. Unlike an array, it supports weak references."""

    def __init__(self) -> None:
        self._memory = numbers(LARGE)
        self.__array_interface__ = self._memory.__array_interface__


@pytest.mark.ucx_only
@in_worker0(of=2)
def test_a_sent_array_is_released() -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    rpc.rpc_sync("worker1", len, args=(np.asarray(owner),))
    del owner

    def is_gone() -> bool:
        gc.collect()
        return alive() is None

    eventually(is_gone, "the agent releases an array that it has sent")


# ---- Where nothing changes -------------------------------------------------------------------------------------------


def test_arrays_are_pickled_where_no_agent_runs() -> None:
    import torch_ucx_rpc  # noqa: F401 - teaches torch's pickler

    pickled, tensors = serialize(numbers(LARGE))
    assert not tensors
    np.testing.assert_array_equal(deserialize(pickled, tensors), numbers(LARGE))


def echo_on_tensorpipe(rank: int) -> None:
    import torch_ucx_rpc  # noqa: F401 - teaches torch's pickler

    if rank == 0:
        array = numbers(LARGE)
        assert not serialize(array)[1]
        np.testing.assert_array_equal(rpc.rpc_sync("worker1", one_more, args=(array,)), array + 1)


def test_tensorpipe_in_the_same_process_pickles_arrays() -> None:
    run_job(2, echo_on_tensorpipe, backend="TENSORPIPE")


def test_sending_imports_no_library_of_arrays() -> None:
    (done,) = run_program("""
        import sys
        import torch
        before = set(sys.modules)
        import torch_ucx_rpc
        print(sorted({"numpy", "numba", "cupy", "rmm"} & (set(sys.modules) - before)))
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


# ---- Device memory ---------------------------------------------------------------------------------------------------


class DeviceBuffer:
    """A buffer that looks to the pickler like RMM's. RMM's own buffers need a GPU."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"version": 0, "shape": (LARGE,), "typestr": "|u1", "data": (1, False), "strides": None}


@pytest.mark.ucx_only
@in_worker0(of=1)
def test_without_device_maps_the_library_pickles_its_arrays() -> None:
    DeviceBuffer.__module__, name = "rmm.pylibrmm.device_buffer", DeviceBuffer.__module__
    reducer = _internal_rpc_pickler._dispatch_table[DeviceBuffer]
    DeviceBuffer.__module__ = name
    assert reducer(DeviceBuffer()) == DeviceBuffer().__reduce_ex__(4)


@pytest.mark.ucx_only
@pytest.mark.parametrize(
    ("handle", "stream"), [(None, "default"), (1, "default"), (2, "external 2"), (96, "external 96")]
)
def test_torch_waits_for_the_stream_that_an_array_names(
    monkeypatch: pytest.MonkeyPatch, handle: int | None, stream: str
) -> None:
    """RMM, numba and CuPy name a stream by handle 1, from which torch refuses to make a stream (seen on an H100)."""
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: f"external {handle}")
    assert _stream_of(handle, torch.device("cuda", 0)) == stream


@pytest.mark.ucx_only
def test_tensor_on_an_arrays_memory_stays_on_its_device() -> None:
    array = np.zeros(3)
    with torch.device("meta"):
        tensor = _on_its_memory(array)
    tensor[1] = 5
    assert array[1] == 5


class Unpicklable(DeviceBuffer):
    """Fails to pickle, like numba's arrays: a callee on an H100 could not return them."""

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("no default __reduce__ due to non-trivial __cinit__")


@pytest.mark.ucx_only
@in_worker0(of=1)
def test_future_finds_memory_of_arrays_without_pickling() -> None:
    of_rmm = type("DeviceBuffer", (Unpicklable,), {"__module__": "rmm.pylibrmm.device_buffer"})()
    tensor = torch.ones(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "as_tensor", lambda array: ("tensor of", array))
        assert _extract_tensors({"a": [of_rmm], "b": tensor}) == [("tensor of", of_rmm), tensor]
        assert _extract_tensors(np.zeros(LARGE)) == []
        assert _extract_tensors(np.array([tensor, 1], dtype=object)) == [tensor]
    written = io.BytesIO()
    _TensorExtractor(written, protocol=-1, tensors=[]).dump(np.zeros(LARGE))
    assert written.tell() < LARGE, "an array has been copied"


def echo(value: Any) -> Any:
    return value


def make_in_device_memory(library: str) -> Any:
    if library == "cupy":
        return pytest.importorskip("cupy").arange(LARGE)
    if library == "numba":
        return pytest.importorskip("numba.cuda").to_device(np.arange(LARGE))
    return pytest.importorskip("rmm").DeviceBuffer.to_device(np.arange(LARGE).tobytes())


def echo_in_device_memory(rank: int, library: str) -> None:
    other = worker_name(1 - rank)
    init_rpc(rank, rpc_backend_options=backend_options(device_maps={other: {0: 0}}))
    if rank == 0:
        array = make_in_device_memory(library)
        assert len(serialize(array)[1]) == 1
        returned = rpc.rpc_sync(other, echo, args=(array,))
        assert type(returned) is type(array)
        assert torch.equal(torch.as_tensor(returned), torch.as_tensor(array))
    rpc.shutdown()


@pytest.mark.ucx_only
@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "numba", "rmm"])
def test_arrays_in_device_memory_arrive_there_as_they_were(run_workers: Callable[..., list], library: str) -> None:
    make_in_device_memory(library)
    run_workers(2, echo_in_device_memory, library, init=False, shutdown=False)
