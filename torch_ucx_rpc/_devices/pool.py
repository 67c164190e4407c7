"""The allocator of received tensors on CUDA devices: that of torch or of RMM (docs/gpu.md).

RMM has entry points for ``torch.cuda.memory.CUDAPluggableAllocator``. The agent calls them directly, so that its
threads need no Python. torch's own allocator stays as it is. The entry points use RMM's memory resource for the device,
which numba and CuPy can share.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from torch_ucx_rpc._native import _C
from torch_ucx_rpc.errors import JoinFailed

# Addresses of two C functions: allocate and deallocate.
EntryPoints: TypeAlias = tuple[int, int]

# RMM's pools take only multiples of this size.
_GRANULE = 256


class PoolOptions(Protocol):
    """The part of `UcxRpcBackendOptions` that chooses the allocator."""

    @property
    def device_pool(self) -> str: ...
    @property
    def device_pool_bytes(self) -> int | None: ...


def check(options: PoolOptions, worker: str) -> None:
    """Raise ValueError, ImportError or JoinFailed, with the cure, if `device_pool` cannot be provided."""
    if options.device_pool != "rmm":
        if options.device_pool_bytes is not None:
            raise ValueError(
                f"device_pool_bytes={options.device_pool_bytes} bounds a pool of RMM's, and device_pool is "
                f'{options.device_pool!r}: set device_pool="rmm", or leave device_pool_bytes out'
            )
        return
    _rmm()
    if not torch.cuda.is_available():
        build = "without CUDA" if torch.version.cuda is None else f"with CUDA {torch.version.cuda}"
        raise JoinFailed(
            f'device_pool="rmm" is memory of CUDA devices, and there is none for worker {worker!r}: torch '
            f"{torch.__version__} is built {build}, and finds no GPU. Leave device_pool out."
        )


def choose(options: PoolOptions, devices: Iterable[torch.device]) -> None:
    """Set the allocator of received tensors, for the whole process."""
    if options.device_pool == "rmm":
        for device in devices:
            prepare_resource(device.index, options.device_pool_bytes)
        _C.set_device_pool(_C.DeviceMemorySource.entry_points, rmm_entry_points())
        _stop_at_exit()
    elif torch.cuda.memory.get_allocator_backend() == "pluggable":
        # An allocator such as RMM's knows only the stream of the allocation.
        _C.set_device_pool(_C.DeviceMemorySource.replaced_torch, None)
        _stop_at_exit()
    else:
        _C.set_device_pool(_C.DeviceMemorySource.torch, None)


@functools.cache
def _stop_at_exit() -> None:
    """Give no memory back once the interpreter ends: RMM's resources may be destroyed before the tensors."""
    atexit.register(_C.stop_device_pool)


def _rmm() -> Any:
    try:
        return importlib.import_module("rmm")
    except ImportError as error:
        wheel = f"rmm-cu{torch.version.cuda.split('.')[0]}" if torch.version.cuda else "rmm-cu12"
        raise ImportError(
            f'device_pool="rmm" needs RMM, which cannot be imported ({error}): pip install {wheel}, or from conda '
            f"rapidsai::rmm"
        ) from error


# The pools made here, by device, with their limits in bytes. They stay, since tensors outlive RPC.
_pools: dict[int, tuple[Any, int | None]] = {}


def prepare_resource(device: int, most_bytes: int | None) -> None:
    """Give RMM a pool for a device, unless the user has chosen another memory resource than cudaMalloc.

    Args:
        device: number of the device.
        most_bytes: limit of the pool, which grows as needed; None for all memory of the device.

    Raises ValueError if this limit cannot be set. Then the user has chosen the resource, or an earlier ``init_rpc`` of
    this process made the pool with another limit.
    """
    mr = _rmm().mr
    resource = mr.get_per_device_resource(device)
    ours, ours_bytes = _pools.get(device, (None, None))
    if ours is not None and resource is ours:
        if most_bytes != ours_bytes:
            raise ValueError(
                f"device_pool_bytes={most_bytes}, and an earlier init_rpc of this process has made the pool of "
                f"cuda:{device} with device_pool_bytes={ours_bytes}: the pool stays, so give the same number"
            )
        return
    if type(resource) is not mr.CudaMemoryResource:  # RMM's default: the user has not chosen
        if most_bytes is not None:
            raise ValueError(
                f"device_pool_bytes={most_bytes} bounds the pool that init_rpc makes, and RMM has a memory resource "
                f"for cuda:{device} already, {type(resource).__name__}, which is used: leave device_pool_bytes out"
            )
        return
    with torch.cuda.device(device):
        pool = mr.PoolMemoryResource(
            mr.CudaMemoryResource(),
            initial_pool_size=0,
            maximum_pool_size=None if most_bytes is None else most_bytes // _GRANULE * _GRANULE,
        )
    mr.set_per_device_resource(device, pool)
    _pools[device] = pool, most_bytes


@functools.cache
def rmm_entry_points() -> EntryPoints:
    """Find RMM's entry points. Raises JoinFailed if they are not where all versions since 23.4 have them."""
    package = Path(_rmm().__file__).parent
    for library in sorted(package.rglob("_torch_allocator*.so")):
        functions = ctypes.CDLL(str(library))
        allocate, deallocate = (
            ctypes.cast(function, ctypes.c_void_p).value for function in (functions.allocate, functions.deallocate)
        )
        if allocate and deallocate:
            return allocate, deallocate
    raise JoinFailed(
        f'device_pool="rmm": RMM {_rmm().__version__} in {package} has no allocator for PyTorch (_torch_allocator.so); '
        f"install another version"
    )
