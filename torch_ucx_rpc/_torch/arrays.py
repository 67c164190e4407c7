"""Arrays of NumPy, CuPy, numba and RMM in arguments and results travel as tensors do, and arrive as what they were.

torch's RPC pickler puts tensors into a table, whose memory is sent as it is, and pickles everything else. Here it
learns to take an array for a tensor on the same memory, and what it takes to make the array of it again. What no tensor
can stand for is pickled as before: objects of subclasses, arrays with Python objects in them. So are small arrays,
arrays in device memory where no device maps are, and all where the agent that runs is not UCX's.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torch_ucx_rpc import _agent

if TYPE_CHECKING:
    import numpy as np

# What is smaller is pickled: up to here a pickle rides in the body of its message (csrc/agent/tensor_encoder.cpp), and
# copying it costs less than making a tensor, and an array again. Measured, the two are even at this size.
_LEAST_BYTES = 64 * 1024
# NumPy allowed 32 once, of which one is needed here.
_MOST_DIMENSIONS = 31


class Reducers(dict[type, Callable[[Any], Any]]):
    """A pickler's dispatch table that also has the types of arrays, and imports no library for it."""

    def __missing__(self, type_: type) -> Callable[[Any], Any]:
        reducer = _REDUCERS[type_.__module__, type_.__qualname__]
        self[type_] = reducer
        return reducer


def _pickled(array: Any) -> Any:
    return array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


# ------------------------------------------------------------------------------------------------------------ NumPy


class _Memory:
    """What NumPy takes for an array, of memory that ``owner`` keeps."""

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self._owner = owner


def _reduce_numpy(array: np.ndarray[Any, Any]) -> Any:
    dtype = array.dtype
    if _agent.current is None or array.nbytes < _LEAST_BYTES or dtype.hasobject or array.ndim > _MOST_DIMENSIONS:
        return _pickled(array)
    is_writable = array.flags.writeable
    if any(stride < 0 for stride in array.strides):
        array = array.copy()  # no tensor goes backwards
    # As bytes, in a dimension of their own: for dtypes that torch lacks, strides that are no whole number of elements,
    # and memory that is read-only, of which torch would warn.
    interface = {
        "version": 3,
        "data": (array.__array_interface__["data"][0], False),
        "typestr": "|u1",
        "shape": (*array.shape, dtype.itemsize),
        "strides": (*array.strides, 1),
    }
    import numpy as np

    return _build_numpy, (torch.from_numpy(np.asarray(_Memory(interface, array))), dtype, is_writable)


def _build_numpy(memory: torch.Tensor, dtype: np.dtype[Any], is_writable: bool) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = memory.numpy().view(dtype)[..., 0]
    array.flags.writeable = is_writable
    return array


# ---------------------------------------------------------------------------------------------------- device memory

# CUDA's handle of the stream that these libraries use when they are told of none.
_LEGACY_DEFAULT_STREAM = 1


def _device_reducer(library: str) -> Callable[[Any], Any]:
    """For arrays with a ``__cuda_array_interface__``, which ``library`` makes."""

    def reduce(array: Any) -> Any:
        interface = array.__cuda_array_interface__
        if (
            _agent.current is None
            or not _agent.current.devices
            or 0 in interface["shape"]
            or interface["typestr"][1] not in "biufc"
            or any(stride < 0 for stride in interface.get("strides") or ())
        ):
            return _pickled(array)
        tensor = torch.as_tensor(array)
        # The agent reads it in the order of torch's stream. Without a word it has been written on the default one.
        stream = interface.get("stream") or _LEGACY_DEFAULT_STREAM
        torch.cuda.current_stream(tensor.device).wait_stream(torch.cuda.ExternalStream(stream, tensor.device))
        return _build_on_device, (library, tensor)

    return reduce


def _build_on_device(library: str, tensor: torch.Tensor) -> Any:
    if not tensor.is_cuda:
        return tensor.numpy()  # a device map has sent it here
    # The library will use the default stream and not wait for torch's.
    default = torch.cuda.default_stream(tensor.device)
    default.wait_stream(torch.cuda.current_stream(tensor.device))
    tensor.record_stream(default)
    with torch.cuda.device(tensor.device):
        if library == "cupy":
            import cupy

            return cupy.asarray(tensor)
        if library == "numba":
            from numba import cuda

            return cuda.as_cuda_array(tensor)
        import rmm

        # A copy within the device: a DeviceBuffer is always of RMM's memory.
        return rmm.DeviceBuffer(ptr=tensor.data_ptr(), size=tensor.nbytes)


_REDUCERS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("numpy", "ndarray"): _reduce_numpy,
    ("cupy", "ndarray"): _device_reducer("cupy"),
    ("numba.cuda.cudadrv.devicearray", "DeviceNDArray"): _device_reducer("numba"),
    ("rmm.pylibrmm.device_buffer", "DeviceBuffer"): _device_reducer("rmm"),
}
