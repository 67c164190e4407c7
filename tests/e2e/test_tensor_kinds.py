"""Every kind of tensor arrives equal, or the sender raises an error that names the kind, the place and the cure."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.workers import in_worker0, run_workers

LARGE = 1 << 20


class Plain(torch.Tensor):
    """A subclass with its own memory. torch pickles its bytes."""


class Wrapper(torch.Tensor):
    """A subclass that wraps another tensor, and defines its own pickling."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        unwrapped = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        return function(*unwrapped, **(kwargs or {}))

    def __reduce_ex__(self, protocol: int):
        return Wrapper, (self.inner,)


def numbers(n: int) -> torch.Tensor:
    return torch.arange(float(n))


def with_storage_of(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake(n: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(n)


def freed_values(n: int) -> torch.Tensor:
    tensor = numbers(n).to_sparse()
    with_storage_of(tensor._values(), 0)
    return tensor


def freed_scales(n: int) -> torch.Tensor:
    scales = torch.ones(n, dtype=torch.float64)
    tensor = torch.quantize_per_channel(numbers(n), scales, torch.zeros(n), 0, torch.qint8)
    with_storage_of(tensor.q_per_channel_scales(), 0)
    return tensor


FREED = r"reaches beyond its storage, which has 0 bytes of \d+ .*fill the storage again"
PLACE = r"cannot (send|pickle) .*in this (call|answer)"
SHRUNK = r"reaches beyond its storage, which has 400 bytes of \d+ .*fill the storage again"

# A kind, a maker for n elements, and the error's words for it.
KINDS: dict[str, tuple[Callable[[int], torch.Tensor], str]] = {
    "freed": (lambda n: with_storage_of(numbers(n), 0), FREED),
    "shrunk": (lambda n: with_storage_of(numbers(n), 400), SHRUNK),
    "freed view": (lambda n: with_storage_of(numbers(n)[10:], 0), FREED),
    "freed view with holes": (lambda n: with_storage_of(numbers(n)[::7], 0), FREED),
    "view beyond the end": (lambda n: with_storage_of(numbers(n)[n // 2 :], 400), SHRUNK),
    "freed, requires grad": (lambda n: with_storage_of(numbers(n).requires_grad_(), 0), FREED),
    "freed, conjugate": (lambda n: with_storage_of((numbers(n) * 1j).conj(), 0), FREED),
    "freed, quantized": (
        lambda n: with_storage_of(torch.quantize_per_tensor(numbers(n), 0.1, 0, torch.qint8), 0),
        FREED,
    ),
    "freed values of COO": (freed_values, "cannot send the values of tensor 1 of .*" + FREED),
    "freed scales": (freed_scales, "cannot send the scales of tensor 1 of .*" + FREED),
    "functionalized": (lambda n: torch._to_functional_tensor(numbers(n)), r"functionalized.*_from_functional_tensor"),
    "nested": (lambda n: torch.nested.nested_tensor([numbers(n), numbers(3)]), r"nested tensor; send tensor\.unbind"),
    "meta": (lambda n: torch.empty(n, device="meta"), r"meta device.*send its shape"),
    "mkldnn": (lambda n: numbers(n).to_mkldnn(), r"Mkldnn|Opaque.*to_dense"),
    "fake": (fake, r"has no memory of its own.*fake"),
    "wrapper": (lambda n: Wrapper(numbers(n)), r"has no memory of its own.*subclass that wraps other tensors"),
}
# A class with its own pickling arrives in calls of Python functions. Builtin operators take the tensor itself.
ARRIVES_IN_PYTHON = {"wrapper"}


def make(kind: str, n: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that some of these kinds are deprecated or experimental
        return KINDS[kind][0](n)


def first(tensor: torch.Tensor, *_: object) -> float:
    return float(tensor.reshape(-1)[0])


def send_builtin(kind: str, n: int) -> None:
    rpc.rpc_sync("worker1", torch.add, args=(make(kind, n), 1))


def send_in_context(kind: str, n: int) -> None:
    with dist_autograd.context():
        rpc.rpc_sync("worker1", first, args=(make(kind, n), numbers(3).requires_grad_()))


def return_in_context(kind: str, n: int) -> None:
    with dist_autograd.context():
        rpc.rpc_sync("worker1", make, args=(kind, n))


def fetch(kind: str, n: int) -> None:
    value = rpc.remote("worker1", make, args=(kind, n))
    rpc.rpc_sync("worker1", float, args=("1",))
    value.to_here()


WAYS: dict[str, Callable[[str, int], object]] = {
    "argument of rpc_sync": lambda kind, n: rpc.rpc_sync("worker1", first, args=(make(kind, n),)),
    "argument of rpc_async": lambda kind, n: rpc.rpc_async("worker1", first, args=(make(kind, n),)).wait(),
    "argument of remote": lambda kind, n: rpc.remote("worker1", first, args=(make(kind, n),)).to_here(),
    "argument of a builtin": send_builtin,
    "argument of a remote builtin": lambda kind, n: rpc.remote("worker1", torch.add, args=(make(kind, n), 1)).to_here(),
    "argument in a context": send_in_context,
    "argument to oneself": lambda kind, n: rpc.rpc_sync("worker0", first, args=(make(kind, n),)),
    "result of rpc_sync": lambda kind, n: rpc.rpc_sync("worker1", make, args=(kind, n)),
    "result of rpc_async": lambda kind, n: rpc.rpc_async("worker1", make, args=(kind, n)).wait(),
    "result in a context": return_in_context,
    "result of oneself": lambda kind, n: rpc.rpc_sync("worker0", make, args=(kind, n)),
    "value of an RRef": fetch,
}


def is_one_sentence(kind: str, said: str) -> bool:
    is_expected = re.search(KINDS[kind][1], said) and re.search(PLACE, said)
    return bool(is_expected and re.fullmatch(r"[^\n]*\.(\n\nAt:\n.*)?", said, re.DOTALL))  # with a stack, or without


def is_refused(way: str, kind: str) -> bool:
    return "builtin" in way or kind not in ARRIVES_IN_PYTHON


def complaints(way: str) -> list[str]:
    found = []
    for kind, n in itertools.product(KINDS, (1000, LARGE)):
        print(way, kind, n, flush=True)  # if the call ends the process, this line shows the case
        where = f"{kind}, {n}, as {way}"
        try:
            WAYS[way](kind, n)
        except RuntimeError as error:
            said = str(error)
            if not is_refused(way, kind) or not is_one_sentence(kind, said):
                found.append(f"{where}: {said}")
        except Exception as error:
            found.append(f"{where}: {error!r}")
        else:
            if is_refused(way, kind):
                found.append(f"{where}: was sent")
    return found


def find_no_complaints(rank: int, way: str) -> None:
    if rank == 0:
        found = complaints(way)
        assert not found, "\n".join(found)
        # Both workers still work.
        assert rpc.rpc_sync("worker1", first, args=(numbers(LARGE) + 1,)) == 1


@pytest.mark.ucx_only
@pytest.mark.parametrize("way", WAYS)
def test_unsendable_kinds_are_refused_with_place_and_cure(way: str) -> None:
    run_workers(2, find_no_complaints, way, silent=False, timeout=150)


# ---- Subclasses in Python, which torch pickles whole -----------------------------------------------------------------


def plain(nbytes: int | None) -> Plain:
    tensor = numbers(1000).as_subclass(Plain)
    tensor.note = "kept"
    return tensor if nbytes is None else with_storage_of(tensor, nbytes)


def note_and_sum(tensor: Plain) -> tuple[str, str, float]:
    return type(tensor).__name__, tensor.note, float(tensor.sum())


@pytest.mark.ucx_only
@in_worker0(of=2)
def test_subclass_arrives_whole_or_is_refused() -> None:
    whole = ("Plain", "kept", float(numbers(1000).sum()))
    assert rpc.rpc_sync("worker1", note_and_sum, args=(plain(None),)) == whole
    assert note_and_sum(rpc.rpc_sync("worker1", plain, args=(None,))) == whole
    for nbytes, expected in ((0, FREED), (400, SHRUNK)):
        expected = "cannot pickle a Plain in this call or answer.*" + expected
        with pytest.raises(RuntimeError, match=expected):
            rpc.rpc_sync("worker1", note_and_sum, args=(plain(nbytes),))
        with pytest.raises(RuntimeError, match=expected):
            rpc.rpc_sync("worker1", plain, args=(nbytes,))
        # Between the two calls, send objects that hold such a tensor.
        with pytest.raises(RuntimeError, match=expected):
            rpc.rpc_sync("worker1", len, args=([{"deep": plain(nbytes)}],))
    assert rpc.rpc_sync("worker1", note_and_sum, args=(plain(None),)) == whole


def freed_module() -> torch.nn.Module:
    module = torch.nn.Linear(3, 3)
    with_storage_of(module.weight, 0)
    return module


@pytest.mark.ucx_only
@in_worker0(of=2)
def test_module_with_a_freed_parameter_is_refused() -> None:
    for send in (
        lambda: rpc.rpc_sync("worker1", len, args=([freed_module()],)),
        lambda: rpc.rpc_sync("worker1", freed_module),
    ):
        with pytest.raises(RuntimeError, match=r"cannot send tensor \d of 2 in this (call|answer).*" + FREED):
            send()


# ---- TorchScript -----------------------------------------------------------------------------------------------------


@torch.jit.script
def compress(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_sparse_csr()


@torch.jit.script
def to_mkldnn(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_mkldnn()


@pytest.mark.ucx_only
@in_worker0(of=2, silent=False)
def test_results_of_torchscript_without_storage_are_refused() -> None:
    for function in (compress, to_mkldnn):
        with pytest.raises(RuntimeError, match=r"cannot send a tensor in this answer to worker 'worker0'.*to_dense"):
            rpc.rpc_sync("worker1", function, args=(torch.eye(3),))
        with pytest.raises(RuntimeError, match=r"cannot send a tensor in this answer to worker 'worker0'.*to_dense"):
            rpc.remote("worker1", function, args=(torch.eye(3),)).to_here()
    with pytest.raises(RuntimeError, match="cannot send tensor 1 of 1 in this call.*" + FREED):
        rpc.rpc_sync("worker1", compress, args=(with_storage_of(torch.eye(3), 0),))
