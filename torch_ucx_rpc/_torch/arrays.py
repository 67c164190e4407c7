"""Arrays of NumPy, CuPy, numba and RMM, in arguments and results, travel as tensors and arrive as arrays.

torch's RPC pickler collects tensors, whose memory the agent sends unchanged, and pickles everything else. The reducers
of this module replace an array by a tensor on the same memory, and a function that makes the array again. The pickler
still pickles some arrays: objects of subclasses, arrays with Python objects in them, small arrays, arrays with more
dimensions than a tensor may have, and arrays in device memory without device maps or of a kind that torch does not
take. If the running agent is not UCX's, the pickler pickles all arrays.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torch_ucx_rpc import _agent
from torch_ucx_rpc._native import _C
from torch_ucx_rpc._torch import subclasses

if TYPE_CHECKING:
    import numpy as np

# Smaller arrays are pickled. A small pickle travels in the body of its message (csrc/tensors/tensor_encoder.cpp), and
# copying it costs less than making a tensor and an array again. Measured, the two cost the same at this size.
_LEAST_BYTES = 64 * 1024
# Old versions of NumPy allow 32 dimensions, and the tensor has one more than the array.
_MOST_DIMENSIONS = 31


class Reducers(dict[type, Callable[[Any], Any]]):
    """A pickler's dispatch table. The table gets a type of arrays or tensors when the pickler first meets it, so this
    module imports no library."""

    def __missing__(self, type_: type) -> Callable[[Any], Any]:
        reducer = subclasses.reducer(type_) or _REDUCERS[type_.__module__, type_.__qualname__]
        self[type_] = reducer
        return reducer


def _pickled(array: Any) -> Any:
    return array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


# ------------------------------------------------------------------------------------------------------------ NumPy


class _Memory:
    """An object that NumPy accepts as an array, on memory that ``owner`` keeps alive."""

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
    # The elements of the tensor are bytes, so it has one dimension more than the array. This serves dtypes that
    # torch lacks, strides of a fraction of an element, and read-only memory, of which torch would warn.
    interface = {
        "version": 3,
        "data": (array.__array_interface__["data"][0], False),
        "typestr": "|u1",
        "shape": (*array.shape, dtype.itemsize),
        "strides": (*array.strides, 1),
    }
    import numpy as np

    with _C.OutsideModes():
        memory = torch.from_numpy(np.asarray(_Memory(interface, array)))
    return _build_numpy, (memory, dtype, is_writable)


def _build_numpy(memory: torch.Tensor, dtype: np.dtype[Any], is_writable: bool) -> np.ndarray[Any, Any]:
    with _C.OutsideModes():
        array: np.ndarray[Any, Any] = memory.numpy().view(dtype)[..., 0]
    array.flags.writeable = is_writable
    return array


# ---------------------------------------------------------------------------------------------------- device memory

# CUDA's handle of the legacy default stream, which these libraries use by default. To torch its handle is 0.
_LEGACY_DEFAULT_STREAM = 1


def _device_reducer(library: str) -> Callable[[Any], Any]:
    """Reducer for arrays of ``library``, which have a ``__cuda_array_interface__``."""

    def reduce(array: Any) -> Any:
        interface = array.__cuda_array_interface__
        if _agent.current is None or not _agent.current.devices or not _can_be_tensor(interface):
            return _pickled(array)
        tensor = _on_its_memory(array)
        # The agent reads the memory in the order of torch's stream. The array may name the stream that wrote it.
        written_on = _stream_of(interface.get("stream"), tensor.device)
        torch.cuda.current_stream(tensor.device).wait_stream(written_on)
        return _build_on_device, (library, tensor)

    return reduce


def _can_be_tensor(interface: dict[str, Any]) -> bool:
    """Whether torch takes the memory of an array with this ``__cuda_array_interface__``."""
    return (
        0 not in interface["shape"]
        and interface["typestr"][1] in "biufc"
        and all(stride >= 0 for stride in interface.get("strides") or ())
    )


def _on_its_memory(array: Any) -> torch.Tensor:
    """A tensor on an array's memory; `torch.as_tensor` alone would copy to the default device, where one is set."""
    with _C.OutsideModes():
        return torch.as_tensor(array)


def _stream_of(handle: int | None, device: torch.device) -> torch.cuda.Stream:
    """The stream that a ``__cuda_array_interface__`` names, or the default stream if it names none."""
    if handle is None or handle == _LEGACY_DEFAULT_STREAM:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device)


def _build_on_device(library: str, tensor: torch.Tensor) -> Any:
    with _C.OutsideModes():
        if not tensor.is_cuda:
            return tensor.numpy()  # a device map has sent it to the CPU
        # The library will use the default stream, and will not wait for torch's stream.
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

            # A copy within the device: a DeviceBuffer always owns memory of RMM.
            return rmm.DeviceBuffer(ptr=tensor.data_ptr(), size=tensor.nbytes)


def tensors_of(value: Any) -> list[torch.Tensor] | None:
    """The tensors on the device memory of an array, which a future has to know; None for other objects.

    torch looks for tensors by pickling a future's value. That would copy device memory to the host, or fail where a
    library cannot pickle its arrays, as numba cannot. NumPy's arrays have no device memory, so torch need not pickle
    them.
    """
    type_ = type(value)
    if _agent.current is None or (type_.__module__, type_.__qualname__) not in _REDUCERS:
        return None
    if type_.__module__ == "numpy":
        return None if value.dtype.hasobject else []
    interface = value.__cuda_array_interface__
    if 0 in interface["shape"]:
        return []
    return [_on_its_memory(value)] if _can_be_tensor(interface) else None


_REDUCERS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("numpy", "ndarray"): _reduce_numpy,
    ("cupy", "ndarray"): _device_reducer("cupy"),
    ("numba.cuda.cudadrv.devicearray", "DeviceNDArray"): _device_reducer("numba"),
    ("rmm.pylibrmm.device_buffer", "DeviceBuffer"): _device_reducer("rmm"),
}
