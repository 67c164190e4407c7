"""CUDA tensors on a real GPU: streams, device maps, memory, and PyTorch's parts on top of RPC.

The C++ tests with tests/cpp/support/device_fixture.h test the same rules without a GPU. Their device runs its streams
when the test says so.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.nn.api.remote_module import RemoteModule

import torch_ucx_rpc
from tests.support.workers import backend_options, eventually, in_worker0, init_rpc, run_program

pytestmark = [pytest.mark.ucx_only, pytest.mark.gpu]

SMALL, LARGE = 3, 1 << 20  # elements of int64: inside the message, and by rendezvous
LONG = 500_000_000  # a stream is busy for this many cycles: at least 0.25 s

SAME = {"device_maps": {"worker0": {0: 0}, "worker1": {0: 0}}}
RMM = {**SAME, "device_pool": "rmm"}
needs_rmm = pytest.mark.skipif(find_spec("rmm") is None, reason="needs rmm")
TO_GPU = {"device_maps": {"worker1": {"cpu": 0}}}
FROM_GPU = {"device_maps": {"worker1": {0: "cpu"}}}


def full(elements: int, value: int) -> torch.Tensor:
    return torch.full((elements,), value, dtype=torch.int64, device="cuda")


def is_all(tensor: torch.Tensor, value: int) -> bool:
    return bool(tensor.eq(value).all())


def total(tensor: torch.Tensor) -> int:
    return int(tensor.sum())


def slow_total(tensor: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(LONG // 20)
    return tensor.sum()


def add_one_slowly(tensor: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(LONG)
    return tensor + 1


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# ---- Streams ---------------------------------------------------------------------------------------------------------


@in_worker0(of=2, options=SAME)
def test_a_tensor_is_read_when_its_stream_has_made_it() -> None:
    for elements in (SMALL, LARGE):
        # The first call of each size is slow, and allocating pinned memory may wait for the GPU.
        rpc.rpc_sync("worker1", total, (full(elements, 1),))
        made = full(elements, 0)
        torch.cuda._sleep(LONG)
        made.fill_(7)
        is_made = torch.cuda.Event()
        is_made.record()
        future = rpc.rpc_async("worker1", total, (made,))
        assert not is_made.query(), "the call has waited for the GPU"
        del made
        assert future.wait() == 7 * elements


@in_worker0(of=2, options=SAME)
def test_an_answer_is_read_when_its_stream_has_made_it() -> None:
    for elements in (SMALL, LARGE):
        assert is_all(rpc.rpc_sync("worker1", add_one_slowly, (full(elements, 4),)), 5)


@in_worker0(of=2, options=SAME)
def test_a_waiting_callers_stream_is_ordered_after_the_answer() -> None:
    future = rpc.rpc_async("worker1", add_one_slowly, (full(LARGE, 4),))
    with torch.cuda.stream(torch.cuda.Stream()):
        result = future.wait() * 2
        torch.cuda.current_stream().synchronize()
    assert is_all(result, 10)


@in_worker0(of=2, options=SAME)
def test_a_callback_is_ordered_after_the_answer() -> None:
    future = rpc.rpc_async("worker1", add_one_slowly, (full(LARGE, 4),))
    assert is_all(future.then(lambda answered: answered.value() * 2).wait(), 10)


@in_worker0(of=2, options=SAME)
def test_a_blocking_wait_returns_when_the_data_are_there() -> None:
    # The first use of a kernel loads it. Loading may wait for all work of the GPU.
    assert is_all(add_one_slowly(rpc.rpc_sync("worker1", echo, (full(LARGE, 1),))), 2)
    for is_blocking in (False, True):
        future = rpc.rpc_async("worker1", echo, (full(LARGE, 4),)).then(lambda back: add_one_slowly(back.value()))
        result = torch_ucx_rpc.wait(future, blocking=is_blocking)
        assert torch.cuda.current_stream().query() == is_blocking
        assert is_all(result, 5)


def priority_of_the_current_stream(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream().priority


@in_worker0(of=2, options={**SAME, "stream_priority": -1})
def test_handlers_have_streams_of_the_requested_priority() -> None:
    assert rpc.rpc_sync("worker1", priority_of_the_current_stream, (full(SMALL, 1),)) == -1


def is_on_the_default_stream(tensor: torch.Tensor) -> bool:
    return torch.cuda.current_stream() == torch.cuda.default_stream()


@in_worker0(of=2, options=SAME)
def test_handlers_compute_on_streams_of_their_own() -> None:
    assert not rpc.rpc_sync("worker1", is_on_the_default_stream, (full(SMALL, 1),))


def compute_many_at_once(rank: int) -> None:
    if rank == 0:
        for elements in (SMALL, LARGE):
            futures = [rpc.rpc_async("worker1", slow_total, (full(elements, number),)) for number in range(20)]
            assert [int(future.wait()) for future in futures] == [number * elements for number in range(20)]


@pytest.mark.parametrize("options", [SAME, pytest.param(RMM, marks=needs_rmm)], ids=["torch", "rmm"])
def test_memory_is_not_reused_while_it_is_read(run_workers: Callable[..., list], options: dict) -> None:
    run_workers(2, compute_many_at_once, options=options)


# ---- Device maps -----------------------------------------------------------------------------------------------------


def device_of(tensor: torch.Tensor) -> str:
    assert total(tensor) == tensor.numel()
    return str(tensor.device)


def send_to_the_gpu(rank: int) -> None:
    init_rpc(rank, rpc_backend_options=backend_options(**(TO_GPU if rank == 0 else {})))
    if rank == 0:
        for elements in (SMALL, LARGE):
            ones = torch.ones(elements, dtype=torch.int64)
            assert rpc.rpc_sync("worker1", device_of, (ones,)) == "cuda:0"
            assert torch.equal(rpc.rpc_sync("worker1", echo, (ones,)), ones)
    rpc.shutdown()


def send_to_the_cpu(rank: int) -> None:
    init_rpc(rank, rpc_backend_options=backend_options(**(FROM_GPU if rank == 0 else {})))
    if rank == 0:
        for elements in (SMALL, LARGE):
            ones = full(elements, 1)
            assert rpc.rpc_sync("worker1", device_of, (ones,)) == "cpu"
            assert torch.equal(rpc.rpc_sync("worker1", echo, (ones,)), ones)
    rpc.shutdown()


@pytest.mark.parametrize("body", [send_to_the_gpu, send_to_the_cpu])
def test_tensors_travel_between_the_cpu_and_a_gpu(run_workers: Callable[..., list], body: Callable) -> None:
    run_workers(2, body, init=False, shutdown=False)


@in_worker0(of=2)
def test_without_a_device_map_a_cuda_tensor_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"worker 'worker1'.*set_device_map"):
        rpc.rpc_sync("worker1", total, (full(SMALL, 1),))
    assert rpc.rpc_sync("worker1", total, (torch.ones(SMALL),)) == SMALL


# ---- Whose memory is used --------------------------------------------------------------------------------------------


@needs_rmm
@in_worker0(of=2, options={**RMM, "device_pool_bytes": 2**30})
def test_tensors_arrive_in_rmms_pool() -> None:
    for elements in (0, SMALL, LARGE):
        arrived = rpc.rpc_sync("worker1", echo, (full(elements, 3),))
        assert torch_ucx_rpc.statistics().device_pool_in_use_bytes == arrived.nbytes
        doubled = arrived * 2
        del arrived
        eventually(lambda: torch_ucx_rpc.statistics().device_pool_held_bytes == 0, "all is given back")
        assert torch_ucx_rpc.statistics().device_pool_in_use_bytes == 0
        assert is_all(doubled, 6)


def share_a_resource(rank: int) -> None:
    import rmm
    from numba import cuda
    from rmm.allocators.numba import RMMNumbaManager

    cuda.set_memory_manager(RMMNumbaManager)
    torch.cuda.init()
    own = rmm.mr.TrackingResourceAdaptor(rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), 2**26))
    rmm.mr.set_current_device_resource(own)
    init_rpc(rank, rpc_backend_options=backend_options(**RMM))
    if rank == 0:
        arrived = rpc.rpc_sync("worker1", echo, (full(LARGE, 3),))
        allocated = own.get_allocated_bytes()
        assert allocated >= arrived.nbytes
        of_numba = cuda.device_array(LARGE)
        assert own.get_allocated_bytes() >= allocated + of_numba.nbytes
        assert is_all(arrived, 3)
    rpc.shutdown()


def test_tensors_and_numba_arrays_share_the_programs_resource(
    run_workers: Callable[..., list],
) -> None:
    pytest.importorskip("rmm")
    run_workers(2, share_a_resource, init=False, shutdown=False)


# A separate program, since torch's allocator cannot be replaced after the first CUDA tensor.
WITH_RMM_INSTEAD_OF_TORCHS = """
    import os, sys
    import rmm
    import torch
    from rmm.allocators.torch import rmm_torch_allocator

    rmm.mr.set_current_device_resource(rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), 2**26))
    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)

    import torch.distributed.rpc as rpc
    import torch_ucx_rpc

    def echo(tensor):
        return tensor

    rank = int(sys.argv[1])
    options = torch_ucx_rpc.UcxRpcBackendOptions(
        init_method=os.environ["STORE"], device_maps={f"worker{1 - rank}": {0: 0}}
    )
    rpc.init_rpc(f"worker{rank}", backend="UCX", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        for elements in (0, 3, 1 << 20):
            arrived = rpc.rpc_sync("worker1", echo, (torch.full((elements,), 3, device="cuda"),))
            assert arrived.numel() == elements
            assert arrived.eq(3).all()
            assert torch_ucx_rpc.statistics().device_pool_in_use_bytes == arrived.nbytes
    rpc.shutdown()
"""


@needs_rmm
def test_rmm_may_be_torchs_allocator(tmp_path: Path) -> None:
    for ended in run_program(WITH_RMM_INSTEAD_OF_TORCHS, ranks=(0, 1), env={"STORE": f"file://{tmp_path}/store"}):
        assert ended.returncode == 0, ended.stderr


# Separate programs, since torch reads the setting when it is loaded.
ECHO_AND_COUNT_STAGED = """
    import os, sys
    import torch
    import torch.distributed.rpc as rpc
    import torch_ucx_rpc

    def echo(tensor):
        return tensor

    def staged_bytes():
        return torch_ucx_rpc.statistics().device_staged_bytes

    rank = int(sys.argv[1])
    options = torch_ucx_rpc.UcxRpcBackendOptions(
        init_method=os.environ["STORE"], device_maps={f"worker{1 - rank}": {0: 0}}
    )
    rpc.init_rpc(f"worker{rank}", backend="UCX", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        sent = torch.full((1 << 20,), 3, device="cuda")
        for _ in range(3):
            assert rpc.rpc_sync("worker1", echo, (sent,)).eq(3).all()
        # Both workers have sent everything by now.
        print(torch.cuda.get_allocator_backend(), staged_bytes(), rpc.rpc_sync("worker1", staged_bytes))
    rpc.shutdown()
"""


@pytest.mark.parametrize(
    ("setting", "allocator"), [("backend:cudaMallocAsync", "cudaMallocAsync"), ("expandable_segments:True", "native")]
)
def test_memory_that_cannot_be_shared_arrives_too(tmp_path: Path, setting: str, allocator: str) -> None:
    env = {
        "PYTORCH_CUDA_ALLOC_CONF": setting,
        "PYTORCH_ALLOC_CONF": setting,
        "STORE": f"file://{tmp_path}/store",
    }
    programs = run_program(ECHO_AND_COUNT_STAGED, ranks=(0, 1), env=env)
    for ended in programs:
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.count("This is said once.") == 1
    sent = 3 * LARGE * torch.int64.itemsize
    # UCX may log more when a process ends.
    assert programs[0].stdout.splitlines()[0].split() == [allocator, str(sent), str(sent)]


# ---- What PyTorch builds on it ---------------------------------------------------------------------------------------


@in_worker0(of=2, options=SAME)
def test_rrefs_hold_cuda_tensors() -> None:
    rref = rpc.remote("worker1", add_one_slowly, (full(LARGE, 4),))
    assert is_all(rref.to_here(), 5)
    assert rref.rpc_sync().numel() == LARGE


@in_worker0(of=2, options=SAME)
def test_distributed_autograd_works_with_cuda_tensors() -> None:
    a, b = (torch.rand(64, 64, device="cuda", requires_grad=True) for _ in range(2))
    (a @ b).sum().backward()
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync("worker1", torch.matmul, (a, b)).sum()
        dist_autograd.backward(context, [loss])
        gradients = dist_autograd.get_gradients(context)
        assert torch.allclose(gradients[a], a.grad)
        assert torch.allclose(gradients[b], b.grad)


@in_worker0(of=2, options=SAME)
def test_a_remote_module_works_on_a_gpu() -> None:
    module = RemoteModule("worker1/cuda:0", torch.nn.Linear, args=(8, 5))
    result = module.forward(torch.ones(2, 8, device="cuda"))
    assert result.shape == (2, 5)
    assert result.device == torch.device("cuda:0")
