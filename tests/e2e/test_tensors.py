"""Tensors arrive as they were sent: all their bits and all their properties."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.rpc as rpc

from tests.support.swaps import SWAPS
from tests.support.workers import agent, in_worker0

# Larger than any tensor that may travel inside its message.
LARGE = 1 << 20

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTIZED = (torch.qint8, torch.quint8, torch.qint32)


def holds_plain_bytes(dtype: torch.dtype) -> bool:
    """Whether torch can make tensors of this dtype from bytes only. Quantized ones also need a scale."""
    if "qint" in str(dtype) or "quint" in str(dtype):
        return False
    try:
        return torch.zeros(16, dtype=torch.uint8).view(dtype).view(torch.uint8).numel() == 16
    except RuntimeError:
        return False


def random_bytes(n: int) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))


def random_bits(dtype: torch.dtype, n: int) -> torch.Tensor:
    """Return a tensor of random bytes, which include NaNs with payloads."""
    if dtype is torch.bool:
        return random_bytes(n) < 128
    return random_bytes(n * dtype.itemsize).view(dtype)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def complex_numbers(*shape: int) -> torch.Tensor:
    return torch.complex(numbers(*shape), numbers(*shape) + 1)


def sparse_matrix() -> torch.Tensor:
    return numbers(8, 12) * (numbers(8, 12) > 0.5)


def uncoalesced() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 0, 2], [1, 1, 0]]), torch.tensor([1.0, 2.0, 3.0]), (3, 4))


def per_channel(axis: int) -> torch.Tensor:
    channels = (5, 7)[axis]
    scales = torch.linspace(0.05, 0.5, channels, dtype=torch.float64)
    return torch.quantize_per_channel(numbers(5, 7), scales, torch.arange(channels), axis, torch.qint8)


def quantized_below_a_byte(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_channel(numbers(5, 7), torch.full((5,), 0.5), torch.ones(5), 0, dtype)


def mapped_read_only() -> torch.Tensor:
    """Memory that is read-only, for UCX too."""
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        file = Path(directory) / "bytes"
        file.write_bytes(random_bytes(4 * LARGE).numpy().tobytes())
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.memmap(file, mode="r"))


CASES: dict[str, Callable[[], torch.Tensor]] = {
    **{f"{dtype}": lambda dtype=dtype: random_bits(dtype, 37) for dtype in DTYPES if holds_plain_bytes(dtype)},
    "zero-dimensional": lambda: torch.tensor(3.5),
    "zero-dimensional view": lambda: numbers(4, 5)[2, 3],
    "no elements": lambda: torch.empty(0),
    "no elements in three dimensions": lambda: torch.empty(2, 0, 3, dtype=torch.int16),
    "no elements, slice of some": lambda: numbers(10)[5:5],
    "one byte": lambda: torch.tensor([7], dtype=torch.uint8),
    **{f"{n} bytes": lambda n=n: random_bytes(n) for n in (255, 4096, 8191, 65_537, LARGE + 1, 37 * LARGE)},
    "transposed": lambda: numbers(5, 7).t(),
    "transposed, large": lambda: numbers(1024, 700).t(),
    "permuted": lambda: numbers(3, 4, 5).permute(2, 0, 1),
    "channels last": lambda: numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "slice": lambda: numbers(100)[10:20],
    "slice of columns": lambda: numbers(50, 40)[:, 3:9],
    "slice of columns, large": lambda: numbers(1500, 1500)[:, 100:1300],
    "every third": lambda: numbers(100)[::3],
    "diagonal": lambda: numbers(30, 30).diagonal(),
    "expanded": lambda: numbers(5, 1).expand(5, 6),
    "expanded from one": lambda: torch.tensor(2.5).expand(100, 100),
    "overlapping windows": lambda: numbers(20).unfold(0, 5, 2),
    "conjugate": lambda: complex_numbers(6).conj(),
    "conjugate, large": lambda: complex_numbers(LARGE).conj(),
    "conjugate transposed": lambda: complex_numbers(4, 6).mH,
    "negative view": lambda: torch._neg_view(numbers(10)),
    "imaginary part of a conjugate": lambda: complex_numbers(10).conj().imag,
    "real part": lambda: complex_numbers(10).real,
    "requires grad": lambda: numbers(10).requires_grad_(),
    "requires grad, large": lambda: numbers(LARGE).requires_grad_(),
    "requires grad, complex": lambda: complex_numbers(10).requires_grad_(),
    **{f"per tensor {d}": lambda d=d: torch.quantize_per_tensor(numbers(5, 7), 0.1, 3, d) for d in QUANTIZED},
    "per tensor, transposed": lambda: torch.quantize_per_tensor(numbers(5, 7), 0.1, 3, torch.qint8).t(),
    "per tensor, large": lambda: torch.quantize_per_tensor(numbers(3000, 1000), 0.1, 3, torch.qint8),
    "per channel 0": lambda: per_channel(0),
    "per channel 1": lambda: per_channel(1),
    **{f"per channel, {d}": lambda d=d: quantized_below_a_byte(d) for d in (torch.quint4x2, torch.quint2x4)},
    "COO, coalesced": lambda: sparse_matrix().to_sparse().coalesce(),
    "COO, not coalesced": uncoalesced,
    "COO, hybrid": lambda: numbers(4, 5, 3).to_sparse(2),
    "COO, nothing in it": lambda: torch.zeros(3, 4).to_sparse(),
    "COO, large": lambda: numbers(2000, 500).to_sparse(),
    "COO, requires grad": lambda: uncoalesced().requires_grad_(),
    "CSR": lambda: sparse_matrix().to_sparse_csr(),
    "CSR, batched": lambda: numbers(2, 4, 5).to_sparse_csr(),
    "CSC": lambda: sparse_matrix().to_sparse_csc(),
    "BSR": lambda: sparse_matrix().to_sparse_bsr((2, 3)),
    "BSC": lambda: sparse_matrix().to_sparse_bsc((2, 3)),
    "NumPy's memory": lambda: torch.from_numpy(np.arange(1000.0)),
    "NumPy's memory, large": lambda: torch.from_numpy(np.arange(float(LARGE))),
    "NumPy's memory, strided": lambda: torch.from_numpy(np.arange(1000.0)[::2]),
    "a buffer's memory, unaligned": lambda: torch.frombuffer(bytearray(range(41)), dtype=torch.uint8, offset=3),
    "memory mapped for reading": mapped_read_only,
}


def parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The strided tensors inside a tensor."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return {"indices": tensor._indices(), "values": tensor._values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return {"crow": tensor.crow_indices(), "col": tensor.col_indices(), "values": tensor.values()}
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return {"ccol": tensor.ccol_indices(), "row": tensor.row_indices(), "values": tensor.values()}
    if tensor.is_quantized and tensor.qscheme() is not torch.per_tensor_affine:
        scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return {"integers": tensor.int_repr(), "scales": scales, "zero points": zero_points}
    if tensor.is_quantized:
        return {"integers": tensor.int_repr()}
    return {"elements": tensor}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def properties(tensor: torch.Tensor) -> dict[str, object]:
    found = {name: getattr(tensor, name) for name in ("dtype", "shape", "layout", "device", "requires_grad", "is_leaf")}
    if tensor.layout is torch.strided:
        # A tensor with gaps or overlaps may arrive contiguous. Other tensors keep their order, as in torch's own
        # copies.
        if tensor.is_quantized or torch.empty_like(tensor).stride() == tensor.stride():
            found["strides"] = tensor.stride()
    elif tensor.layout is torch.sparse_coo:
        found.update(coalesced=tensor.is_coalesced(), sparse_dim=tensor.sparse_dim())
    if tensor.is_quantized:
        found["scheme"] = tensor.qscheme()
        if tensor.qscheme() is torch.per_tensor_affine:
            found.update(scale=tensor.q_scale(), zero_point=tensor.q_zero_point())
        else:
            found["axis"] = tensor.q_per_channel_axis()
    return found


def differences(expected: torch.Tensor, actual: torch.Tensor) -> list[str]:
    found = [
        f"{name} is {properties(actual).get(name)} instead of {value}"
        for name, value in properties(expected).items()
        if properties(actual).get(name) != value
    ]
    if found:
        return found
    actual_parts = parts(actual)
    return [
        f"other {name}"
        for name, part in parts(expected).items()
        if not torch.equal(bits(part), bits(actual_parts[name]))
    ]


def differences_at_arrival(case: str, tensor: torch.Tensor) -> list[str]:
    return differences(CASES[case](), tensor)


def make(case: str) -> torch.Tensor:
    return CASES[case]()


@pytest.mark.ucx_only
# Not silent: torch's C++ warns once that some of these kinds are deprecated or experimental.
@in_worker0(of=2, timeout=120, silent=False)
def test_tensors_arrive_as_they_were_sent() -> None:
    failures = []
    for case in CASES:
        # If the call ends the process, this line shows the case.
        print(case, flush=True)
        for way, look in (
            ("as argument", lambda case=case: rpc.rpc_sync("worker1", differences_at_arrival, args=(case, make(case)))),
            ("as result", lambda case=case: differences(make(case), rpc.rpc_sync("worker1", make, args=(case,)))),
        ):
            try:
                found = look()
            except Exception as error:
                found = [f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"]
            failures += [f"{case}, {way}: {difference}" for difference in found]
    assert not failures, "\n".join(failures)


# ---- What travels ----------------------------------------------------------------------------------------------------


def discard(*_: object) -> None:
    pass


def bytes_sent(*arguments: object) -> int:
    before = int(agent().get_metrics()["agent.bytes_sent"])
    rpc.rpc_sync("worker1", discard, args=arguments)
    return int(agent().get_metrics()["agent.bytes_sent"]) - before


@pytest.mark.ucx_only
@in_worker0(of=2)
def test_only_the_elements_of_a_view_travel() -> None:
    huge = torch.zeros(16 * LARGE)
    nbytes = huge.nbytes
    assert nbytes <= bytes_sent(huge) < nbytes + 4096
    for view in (
        huge[:10],
        huge[-10:],
        huge[:: nbytes // 8],
        huge.view(4096, 4096)[:, 7],
        torch.tensor(1.0).expand(10**9),
    ):
        assert bytes_sent(view) < 64 << 10
    # Two views of the same part of one storage share bytes, which need not travel twice.
    assert bytes_sent(huge, huge.view(4096, 4096)) < nbytes + 4096
    # Overlapping views of different dtypes, whose distance is not a whole number of elements.
    octets = huge.view(torch.uint8)
    assert bytes_sent(octets[-15:-7], octets[-12:].view(torch.int32)) < 4096


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    a.fill_(1)
    b.fill_(2)
    return bool((a == 2).any())


def same_object(a: object, b: object) -> bool:
    return a is b


@pytest.mark.ucx_only
@in_worker0(of=2)
def test_tensors_on_one_storage_arrive_on_one_storage() -> None:
    for n in (64, LARGE):
        base = torch.zeros(n, 2)
        for a, b in ((base, base.t()), (base, base[n // 2 :]), (base[: n // 2 + 1], base[n // 2 :]), (base, base)):
            assert rpc.rpc_sync("worker1", shares_memory, args=(a, b))
        assert not rpc.rpc_sync("worker1", shares_memory, args=(base, base.clone()))
        assert not rpc.rpc_sync("worker1", shares_memory, args=(base[: n // 2], base[n // 2 :]))
    assert rpc.rpc_sync("worker1", same_object, args=(base, base))


def sum_all(tensors: list[torch.Tensor], more: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum(tensor.double().sum() for tensor in [*tensors, *more.values()])


def backwards(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors[::-1]


@in_worker0(of=2)
def test_thousands_of_tensors_travel_in_one_call() -> None:
    tensors = [torch.full((i % 50 + 1,), float(i)) for i in range(5000)]
    tensors[::1000] = [torch.full((LARGE,), float(i)) for i in range(0, 5000, 1000)]
    more = {f"{i}": torch.tensor(i) for i in range(1000)}
    assert rpc.rpc_sync("worker1", sum_all, args=(tensors, more)) == sum_all(tensors, more)
    for expected, actual in zip(tensors, reversed(rpc.rpc_sync("worker1", backwards, args=(tensors,))), strict=True):
        assert torch.equal(actual, expected)


@in_worker0(of=2)
def test_many_small_tensors_arrive_exactly() -> None:
    # More small tensors than the body has room for, and more above 32 KiB than may have their own spans.
    sizes = [2000] * 1000 + [9000] * 600 + [1, 0, 300_000]
    tensors = [torch.full((n,), float(i)) for i, n in enumerate(sizes)]
    for expected, actual in zip(tensors, reversed(rpc.rpc_sync("worker1", backwards, args=(tensors,))), strict=True):
        assert torch.equal(actual, expected)


def step(parameter: torch.nn.Parameter, module: torch.nn.Module, data: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.requires_grad
    return module(data).detach() @ parameter.detach()


def build(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 8)
    )


@in_worker0(of=2)
def test_parameters_and_modules_are_arguments_and_results() -> None:
    module, data = build(3).eval(), numbers(2, 1, 8, 8)
    parameter = torch.nn.Parameter(numbers(8, 3))
    torch.testing.assert_close(
        rpc.rpc_sync("worker1", step, args=(parameter, module, data)), step(parameter, module, data)
    )

    received = rpc.rpc_sync("worker1", build, args=(3,))
    assert isinstance(received, torch.nn.Sequential)
    for (name, expected), (other_name, actual) in zip(
        build(3).state_dict().items(), received.state_dict().items(), strict=True
    ):
        assert name == other_name
        assert torch.equal(actual, expected)
    assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in received.parameters())


# ---- Memory of what is received --------------------------------------------------------------------------------------


def write_and_resize(tensor: torch.Tensor) -> tuple[float, float]:
    tensor.fill_(2)
    first = tensor.sum().item()
    tensor.resize_(5 * tensor.numel()).fill_(3)
    second = tensor.sum().item()
    tensor.resize_(0)
    tensor.untyped_storage().resize_(0)
    return first, second


@pytest.mark.ucx_only
@in_worker0(of=2)
def test_received_tensors_can_be_written_and_resized() -> None:
    for n in (0, 3, 1000, LARGE):
        assert rpc.rpc_sync("worker1", write_and_resize, args=(torch.zeros(n),)) == (2.0 * n, 15.0 * n)
        returned = rpc.rpc_sync("worker1", torch.add, args=(torch.zeros(n), 1))
        assert write_and_resize(returned) == (2.0 * n, 15.0 * n)


_kept: list[torch.Tensor] = []


def keep(number: int, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert (tensor == number).all()
        tensor.fill_(1000 + number)
        _kept.append(tensor)


def kept_overlap() -> bool:
    spans = sorted((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in _kept if t.numel())
    return any(start + size > next_start for (start, size), (next_start, _) in itertools.pairwise(spans))


def kept_numbers() -> list[set[float]]:
    return [set(tensor.unique().tolist()) for tensor in _kept]


@in_worker0(of=2)
def test_messages_never_share_memory() -> None:
    # Kept tensors must not change while other buffers are reused.
    futures = []
    for number in range(60):
        small, large = torch.full((10,), float(number)), torch.full((LARGE // 4,), float(number))
        futures.append(rpc.rpc_async("worker1", keep, args=(number, small, large)))
        futures.append(rpc.rpc_async("worker1", discard, args=(small, large)))
    torch.futures.wait_all(futures)
    assert not rpc.rpc_sync("worker1", kept_overlap)
    numbers_seen = rpc.rpc_sync("worker1", kept_numbers)
    assert sorted(numbers_seen, key=min) == [{1000.0 + number} for number in range(60) for _ in range(2)]


@in_worker0(of=2)
def test_sent_tensor_may_be_written_once_the_call_returns() -> None:
    for n in (10, LARGE):
        tensor = torch.zeros(n)
        for i in range(20):
            tensor.fill_(i)
            assert torch.equal(rpc.rpc_sync("worker1", torch.add, args=(tensor, 1)), tensor + 1)


def be_output(tensor: torch.Tensor) -> None:
    more = torch.zeros(2 * tensor.numel())
    tensor.resize_(0)
    torch.add(more, more, out=tensor)


@pytest.mark.ucx_only
@in_worker0(of=2)
def test_a_tensor_may_get_other_memory_while_it_travels() -> None:
    n = 16 * LARGE  # so large that the memory is unmapped when it is freed
    for swap in (*SWAPS, be_output):
        for _ in range(3):
            tensor = torch.ones(n)
            call = rpc.rpc_async("worker1", torch.sum, args=(tensor,))
            swap(tensor)
            assert call.wait() == n, swap


# ---- Beyond what 32 bits count ---------------------------------------------------------------------------------------

_OVER_2_GIB = (2 << 30) + 4097


# 251 is prime, so bytes that are misplaced by 2**n differ.
_CHUNK = 251 << 16


def chunk() -> torch.Tensor:
    return torch.arange(251, dtype=torch.uint8).repeat(_CHUNK // 251)


def is_pattern(tensor: torch.Tensor) -> bool:
    expected = chunk()
    pieces = tensor.split(_CHUNK)
    return tensor.numel() == _OVER_2_GIB and all(torch.equal(piece, expected[: len(piece)]) for piece in pieces)


def large_pattern() -> torch.Tensor:
    tensor = torch.empty(_OVER_2_GIB, dtype=torch.uint8)
    pattern = chunk()
    for piece in tensor.split(_CHUNK):
        piece.copy_(pattern[: len(piece)])
    return tensor


def send_and_fetch_over_2_gib(rank: int) -> None:
    if rank == 0:
        assert rpc.rpc_sync("worker1", is_pattern, args=(large_pattern(),))
        assert is_pattern(rpc.rpc_sync("worker1", large_pattern))


@pytest.mark.field
@pytest.mark.timeout(400)
def test_tensors_larger_than_2_gib_arrive(run_workers: Callable[..., list]) -> None:
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line)
    if int(available.split()[1]) << 10 < 9 << 30:
        pytest.skip("needs 9 GiB of memory: twice 2 GiB in each of two workers, and some to spare")
    run_workers(2, send_and_fetch_over_2_gib, options={"rpc_timeout": 300}, timeout=300)
