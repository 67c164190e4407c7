"""`torch_ucx_rpc.native_op`: operators that numba compiles, on this worker and on others."""

from __future__ import annotations

import threading
import warnings

import numba
import pytest
import torch
from numba.core.runtime import _nrt_python, rtsys
from torch import Tensor
from torch.distributed.rpc import RRef

from torch_ucx_rpc import native_op


@native_op("native_op_tests::accumulate(Tensor(a!) self, Tensor other, *, float alpha=1) -> ()")
def accumulate(self, other, alpha):
    if self.shape != other.shape:
        raise ValueError("shapes differ")
    for i in range(self.size):
        self.flat[i] += alpha * other.flat[i]


@native_op("native_op_tests::scale_(Tensor(a!) self, float factor, int from_row=0, bool negate=False) -> Tensor(a!)")
def scale_(self, factor, from_row, negate):
    self[from_row:] *= -factor if negate else factor


@native_op("native_op_tests::outer(Tensor a, Tensor b) -> Tensor")
@numba.njit(fastmath=True)
def outer(a, b):
    return a.reshape(-1, 1) * b


@native_op("native_op_tests::first_column(Tensor matrix) -> Tensor")
def first_column(matrix):
    return matrix.copy()[:, 0]


@native_op("native_op_tests::backwards(Tensor row) -> Tensor")
def backwards(row):
    return row.copy()[::-1]


@native_op("native_op_tests::itself(Tensor self) -> Tensor")
def itself(self):
    return self


@native_op("native_op_tests::mean(Tensor self) -> float")
def mean(self):
    return self.sum() / self.size


@native_op("native_op_tests::count(Tensor self, int value) -> int")
def count(self, value):
    return (self == value).sum()


@native_op("native_op_tests::is_sorted(Tensor self) -> bool")
def is_sorted(self):
    for i in range(1, self.size):  # noqa: SIM110 - compiled as it stands
        if self[i] < self[i - 1]:
            return False
    return True


@native_op("native_op_tests::writes_what_it_reads(Tensor self) -> ()")
def writes_what_it_reads(self):
    self[0] = 1


@native_op("native_op_tests::returns_a_number(Tensor self) -> ()")
def returns_a_number(self):
    return 1


# ---- Arguments and results -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int8, torch.int64, torch.uint16, torch.complex64], ids=str
)
def test_computes_on_tensor_memory_of_every_numba_dtype(dtype: torch.dtype) -> None:
    target, source = torch.ones(3, 4).to(dtype), torch.arange(12).reshape(3, 4).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        assert accumulate(target, source, alpha=0.5) is None
        assert torch.equal(target, 1 + source / 2)
    else:
        torch.ops.native_op_tests.outer(target[0], source[0])
        assert torch.equal(outer(target[0], source[1]), torch.arange(4, 8).to(dtype).expand(4, 4))


def test_strides_of_the_tensors_are_respected() -> None:
    target, source = torch.zeros(6, 8), torch.arange(12.0).reshape(3, 4)
    accumulate(target[::2, 1::2], source)
    assert torch.equal(target[::2, 1::2], source)
    assert target.sum() == source.sum()
    corner = target[:3, :4].clone()
    accumulate(target.t()[:4, :3], source.t())
    assert torch.equal(target[:3, :4], corner + source)
    accumulate(torch.tensor(2.0), torch.tensor(3.0))


def test_scalars_have_defaults_and_the_written_tensor_returns() -> None:
    tensor = torch.ones(4, 2)
    assert scale_(tensor, 3) is tensor
    assert scale_(tensor, factor=2.0, from_row=2, negate=True) is tensor
    assert torch.equal(tensor, torch.tensor([3.0, 3, -6, -6])[:, None].expand(4, 2))


def test_results_are_new_tensors_or_numbers() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(outer(matrix[0], matrix[1]), torch.outer(matrix[0], matrix[1]))
    column = first_column(matrix)
    assert torch.equal(column, matrix[:, 0])
    assert column.stride() == (4,)
    assert mean(matrix) == 5.5
    assert count(matrix, 7) == 1
    assert is_sorted(matrix[0]) is True
    assert is_sorted(-matrix[0]) is False
    assert outer(torch.empty(0), torch.empty(0)).shape == (0, 0)


def test_the_memory_of_a_result_is_freed_with_the_tensor() -> None:
    _nrt_python.memsys_enable_stats()
    try:
        before = rtsys.get_allocation_stats()
        column = first_column(torch.ones(100, 100))
        during = rtsys.get_allocation_stats()
        assert during.mi_alloc - during.mi_free == before.mi_alloc - before.mi_free + 1
        del column
        after = rtsys.get_allocation_stats()
        assert after.mi_alloc - after.mi_free == before.mi_alloc - before.mi_free
    finally:
        _nrt_python.memsys_disable_stats()


# ---- What the schema promises ----------------------------------------------------------------------------------------


def test_an_operator_that_does_not_compile_raises_type_error() -> None:
    with pytest.raises(TypeError, match=r"accumulate .*self torch.bfloat16"):
        accumulate(torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2))
    with pytest.raises(TypeError, match=r"self torch.float32 of 2 dim.*other torch.complex64 of 1 dim"):
        accumulate(torch.zeros(2, 2), torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"returns .*1.*schema"):
        returns_a_number(torch.zeros(2))


def test_an_argument_that_is_not_marked_is_not_written() -> None:
    with pytest.raises(TypeError, match=r"(?s)writes_what_it_reads does not compile.*Cannot modify readonly array"):
        writes_what_it_reads(torch.zeros(2))


def test_exceptions_of_the_function_reach_the_caller() -> None:
    for other in (torch.zeros(3), torch.zeros(2, 1)):
        with pytest.raises(RuntimeError, match="native_op_tests::accumulate: ValueError: shapes differ"):
            accumulate(torch.zeros(2), other)


def test_a_result_on_the_memory_of_an_argument_is_refused() -> None:
    with pytest.raises(RuntimeError, match="itself returns memory of an argument"):
        itself(torch.zeros(2))
    with pytest.raises(RuntimeError, match="a stride of -4 bytes, which no tensor can have"):
        backwards(torch.zeros(2))


def test_tensors_with_grad_are_refused_under_recording() -> None:
    parameter = torch.zeros(3, requires_grad=True)
    for arguments in ((parameter, torch.ones(3)), (torch.ones(3), parameter)):
        with pytest.raises(RuntimeError, match=r"(self|other) requires grad"):
            accumulate(*arguments)
    with torch.no_grad():
        accumulate(parameter, torch.ones(3))
    assert torch.equal(parameter.detach(), torch.ones(3))


def test_autograd_notices_written_tensors() -> None:
    factor, x = torch.ones(3), torch.ones(3, requires_grad=True)
    product = (factor * x).sum()
    accumulate(factor, torch.ones(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_written_tensors_may_overlap_with_nothing_but_themselves() -> None:
    tensor = torch.arange(4.0)
    accumulate(tensor, tensor)
    assert torch.equal(tensor, 2 * torch.arange(4.0))
    for target, source in ((tensor[1:], tensor[:-1]), (torch.zeros(1).expand(4), tensor)):
        with pytest.raises(RuntimeError, match="single memory location"):
            accumulate(target, source)


def test_lazy_conjugates_are_resolved() -> None:
    source = torch.tensor([1 + 2j, 3 - 1j])
    target = torch.zeros(2, dtype=torch.complex64)
    accumulate(target, source.conj())
    assert torch.equal(target, source.conj().resolve_conj())


def test_other_devices_are_refused() -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match="accumulate"):
        accumulate(torch.zeros(2, device="meta"), torch.zeros(2, device="meta"))


def test_threads_writing_to_one_storage_lose_no_update() -> None:
    target, ones = torch.zeros(50_000), torch.ones(50_000)

    def update() -> None:
        for _ in range(100):
            accumulate(target, ones)

    threads = [threading.Thread(target=update) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(target, torch.full_like(target, 400))


# ---- Decoration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("native_op_tests::x(Tensor self", "schema must be that of an operator"),
        ("x(Tensor self) -> ()", "its name has no namespace"),
        ("native_op_tests::x(int n) -> ()", "it has no tensor among its arguments"),
        ("native_op_tests::x(Tensor? self) -> ()", "its argument self is of type Optional;"),
        ("native_op_tests::x(Tensor[] self) -> ()", "its argument self is of type List;"),
        ("native_op_tests::x(Tensor self, SymInt n) -> ()", "its argument n is of type SymInt;"),
        ("native_op_tests::x(Tensor self, str n) -> ()", "its argument n is of type String;"),
        ("native_op_tests::x(Tensor self) -> (Tensor, Tensor)", "it returns 2 values"),
        ("native_op_tests::x(Tensor self) -> str", "it returns a String;"),
        ("native_op_tests::x(Tensor(a) self) -> Tensor(a)", "no written argument has that mark"),
        ("native_op_tests::x(Tensor(a!) self) -> Tensor(b!)", "no written argument has that mark"),
    ],
)
def test_an_unsupported_schema_is_refused_at_once(schema: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        native_op(schema)


def test_the_function_must_have_the_parameters_of_the_schema() -> None:
    with pytest.raises(ValueError, match=r"\['self'\].*\['tensor'\]"):
        native_op("native_op_tests::y(Tensor self) -> ()")(lambda tensor: None)


def test_an_operator_is_defined_once() -> None:
    with pytest.raises(ValueError, match="native_op_tests::mean is an operator already"):
        native_op("native_op_tests::mean(Tensor self) -> float")(lambda self: 1.0)


def test_parallel_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="can have neither parallel nor forceobj"):
        native_op("native_op_tests::z(Tensor self) -> ()")(numba.njit(parallel=True)(lambda self: None))


# ---- TorchScript and other workers -----------------------------------------------------------------------------------

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.script` is")

    @torch.jit.script
    def update(parameter: RRef[Tensor], gradient: Tensor) -> float:
        accumulate(parameter.local_value(), gradient, alpha=2.0)
        return torch.ops.native_op_tests.mean(parameter.local_value())
