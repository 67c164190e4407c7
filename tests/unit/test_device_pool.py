"""The memory of CUDA devices: RMM's own entry points and resources, and the errors without RMM or a GPU.

Without a GPU, RMM runs only resources that call back into Python.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc

from torch_ucx_rpc import UcxRpcBackendOptions
from torch_ucx_rpc._devices import pool as device_pool
from torch_ucx_rpc._native import _C
from torch_ucx_rpc.errors import JoinFailed

DEVICE = 0


@pytest.fixture
def rmm() -> Iterator[Any]:
    """Forget RMM's state, as after a fresh import, and restore it afterwards."""
    module = pytest.importorskip("rmm")
    resource = module.mr.get_per_device_resource(DEVICE)
    module.mr.set_per_device_resource(DEVICE, module.mr.CudaMemoryResource())
    yield module
    module.mr.set_per_device_resource(DEVICE, resource)
    device_pool._pools.clear()


# ---- Options are checked before other workers hear of this one -----------------------------------------------------


def test_a_bound_needs_the_pool_that_it_bounds() -> None:
    options = UcxRpcBackendOptions(device_pool_bytes=2**30)
    with pytest.raises(ValueError, match=r"device_pool_bytes=1073741824 .* set device_pool=\"rmm\""):
        device_pool.check(options, "ps")


def test_error_without_rmm_names_its_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rmm", None)
    with pytest.raises(ImportError, match=r"needs RMM.*pip install rmm-cu1\d"):
        device_pool.check(UcxRpcBackendOptions(device_pool="rmm"), "ps")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_error_without_a_gpu_names_the_worker(rmm: Any) -> None:
    # The address has no server, so an attempt to connect would fail.
    options = UcxRpcBackendOptions(device_pool="rmm", init_method="tcp://localhost:1")
    with pytest.raises(JoinFailed, match=r"there is none for worker 'ps'.*Leave device_pool out"):
        rpc.init_rpc("ps", rank=0, world_size=2, rpc_backend_options=options)


# ---- RMM's resources -----------------------------------------------------------------------------------------------


def test_entry_points_use_the_devices_memory_resource(rmm: Any) -> None:
    allocate_address, deallocate_address = device_pool.rmm_entry_points()
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(allocate_address)
    deallocate = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
        deallocate_address
    )
    blocks: dict[int, Any] = {}
    freed = []

    def take(size: int, stream: object) -> int:
        block = ctypes.create_string_buffer(size)
        blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def give_back(address: int, size: int, stream: object) -> None:
        freed.append((address, size))

    rmm.mr.set_per_device_resource(DEVICE, rmm.mr.CallbackMemoryResource(take, give_back))
    address = allocate(1000, DEVICE, None)
    assert list(blocks) == [address]
    deallocate(address, 1000, DEVICE, None)
    assert freed == [(address, 1000)]


@pytest.fixture
def without_switching_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "device", lambda index: torch.autograd.profiler.record_function(str(index)))


@pytest.mark.usefixtures("without_switching_devices")
def test_rmm_gets_a_pool_unless_the_program_has_one(rmm: Any) -> None:
    device_pool.prepare_resource(DEVICE, 2**30 + 1)
    pool = rmm.mr.get_per_device_resource(DEVICE)
    assert isinstance(pool, rmm.mr.PoolMemoryResource)
    assert isinstance(pool.upstream_mr, rmm.mr.CudaMemoryResource)
    device_pool.prepare_resource(DEVICE, 2**30 + 1)
    assert rmm.mr.get_per_device_resource(DEVICE) is pool
    with pytest.raises(ValueError, match=r"cuda:0 with device_pool_bytes=1073741825: the pool stays"):
        device_pool.prepare_resource(DEVICE, 2**30)


def test_the_users_resource_stays(rmm: Any) -> None:
    own = rmm.mr.TrackingResourceAdaptor(rmm.mr.CudaMemoryResource())
    rmm.mr.set_per_device_resource(DEVICE, own)
    device_pool.prepare_resource(DEVICE, None)
    assert rmm.mr.get_per_device_resource(DEVICE) is own
    with pytest.raises(ValueError, match=r"TrackingResourceAdaptor.*device_pool_bytes"):
        device_pool.prepare_resource(DEVICE, 2**30)


# ---- Whose memory is used ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "backend", "chosen"),
    [
        ({}, "native", (_C.DeviceMemorySource.torch, None)),
        ({}, "cudaMallocAsync", (_C.DeviceMemorySource.torch, None)),
        ({}, "pluggable", (_C.DeviceMemorySource.replaced_torch, None)),
        ({"device_pool": "rmm"}, "native", (_C.DeviceMemorySource.entry_points, "RMM's")),
        ({"device_pool": "rmm"}, "pluggable", (_C.DeviceMemorySource.entry_points, "RMM's")),
    ],
    ids=str,
)
@pytest.mark.usefixtures("without_switching_devices")
def test_memory_source_follows_options_and_torchs_allocator(
    rmm: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], backend: str, chosen: tuple[object, object]
) -> None:
    calls = []
    monkeypatch.setattr(_C, "set_device_pool", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: backend)
    device_pool.choose(UcxRpcBackendOptions(**options), [torch.device("cuda", DEVICE)])
    source, entry_points = chosen
    assert calls == [(source, entry_points and device_pool.rmm_entry_points())]


@pytest.mark.usefixtures("without_switching_devices")
@pytest.mark.parametrize(
    ("options", "backend", "is_stopped"),
    [({}, "native", False), ({}, "pluggable", True), ({"device_pool": "rmm"}, "native", True)],
    ids=str,
)
def test_others_memory_is_not_released_at_the_interpreters_end(
    rmm: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], backend: str, is_stopped: bool
) -> None:
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(_C, "set_device_pool", lambda *_: None)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: backend)
    device_pool._stop_at_exit.cache_clear()
    for _ in range(2):
        device_pool.choose(UcxRpcBackendOptions(**options), [torch.device("cuda", DEVICE)])
    device_pool._stop_at_exit.cache_clear()
    assert registered == ([_C.stop_device_pool] if is_stopped else [])


def test_the_native_pool_takes_every_source() -> None:
    for source, entry_points in (
        (_C.DeviceMemorySource.replaced_torch, None),
        (_C.DeviceMemorySource.torch, None),
    ):
        _C.set_device_pool(source, entry_points)
