"""Everything that this package changes in torch, in one function: `register`."""

# mypy: allow-untyped-calls

from __future__ import annotations

import enum
import inspect
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch._C import _distributed_rpc
from torch._C._distributed_rpc import get_rpc_timeout
from torch.distributed.rpc import api, backend_registry, internal
from torch.distributed.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from torch.distributed.rpc.internal import PythonUDF, RPCExecMode, _internal_rpc_pickler

from torch_ucx_rpc import _agent, _start
from torch_ucx_rpc._native import _C
from torch_ucx_rpc._options import UcxRpcBackendOptions, construct_options
from torch_ucx_rpc._torch import arrays, exceptions, replace, sparse

# What torch has in the places that `register` takes.
_torchs_wait_all_workers = api._wait_all_workers
_torchs_wait = torch._C.Future.wait
_torchs_invoke_rpc = api._invoke_rpc
_torchs_delete_rrefs = _distributed_rpc._delete_all_user_and_unforked_owner_rrefs
_torchs_tensor_reducer = _internal_rpc_pickler._dispatch_table[torch.Tensor]
# Whatever stands before it, be it the function by which TensorPipe is replaced.
_init_rpc: Any = inspect.unwrap(rpc.init_rpc)
_torchs_init_rpc = FunctionType(
    _init_rpc.__code__, _init_rpc.__globals__, "init_rpc", _init_rpc.__defaults__, _init_rpc.__closure__
)

_SYNC = RPCExecMode.SYNC
# How long a worker that leaves a group waits for the others to be done with its RRefs.
_RREFS_IN_USE = timedelta(seconds=1)


def register() -> None:
    """Make "UCX" a backend of ``torch.distributed.rpc``, once; every other backend stays as it is.

    * ``BackendType.UCX`` exists, in the enum of before too.
    * ``init_rpc`` accepts it, the string "UCX", and members of an earlier enum.
    * Graceful shutdown waits for those workers that are there, with Ctrl-C and an end when one dies.
    * A blocked ``rpc_sync`` answers Ctrl-C, and drives its call instead of sleeping. So does ``RRef.to_here``, without
      a patch: it sends and waits within one C++ function, and the agent waits where it sends.
    * ``Future.wait`` answers Ctrl-C, whatever the future is of. (It does not drive: then callbacks would run on the
      waiting thread, which may hold a lock that they need.)
    * What the callee raises keeps its type in ``rpc_sync`` and in futures too.
    * Python functions can return sparse tensors of compressed layouts.
    * Arrays in arguments and results travel as tensors.
    """
    # Asked of torch and not of this module, of which there may come to be a second one.
    if hasattr(rpc, _torch_ucx_rpc_init_rpc.__name__):
        return
    before = rpc.BackendType
    backend_registry.register_backend("UCX", construct_options, _start.init_backend)
    # Registering makes a new enum and tells nobody. Who has imported the old one finds the new member there.
    rpc.BackendType = backend_registry.BackendType  # type: ignore[misc]
    type.__setattr__(before, "UCX", _member("UCX"))
    # init_rpc has often been imported by name before this package, so it is the function itself that gets new code.
    setattr(rpc, _torch_ucx_rpc_init_rpc.__name__, _torch_ucx_rpc_init_rpc)
    _init_rpc.__code__ = _new_init_rpc.__code__
    # These are looked up whenever they are called.
    api._wait_all_workers = _wait_all_workers
    api._invoke_rpc = _invoke_rpc
    api._delete_all_user_and_unforked_owner_rrefs = _delete_rrefs  # type: ignore[attr-defined]
    api._destroy_rref_context = _agent.destroy_rref_context  # type: ignore[assignment, attr-defined]
    torch._C.Future.wait = _wait_for_future  # type: ignore[assignment, method-assign]
    _internal_rpc_pickler._dispatch_table = arrays.Reducers(_internal_rpc_pickler._dispatch_table)
    _internal_rpc_pickler._dispatch_table[torch.Tensor] = _reduce_tensor
    # In every call of a Python function: what is in the table is not looked for further.
    _internal_rpc_pickler._dispatch_table[PythonUDF] = _reduce_call
    _internal_rpc_pickler._dispatch_table[exceptions._TypeOfBoth] = exceptions.reduce_type
    # Taken by torch's C++ when the first agent of the process starts.
    internal._handle_exception = exceptions.handle_exception
    _C.translate_runtime_errors(exceptions.original)


# Only the code of this function is used, with the globals and the defaults of torch's own.
def _new_init_rpc(name: Any, backend: Any, rank: Any, world_size: Any, rpc_backend_options: Any) -> None:
    return _torch_ucx_rpc_init_rpc(name, backend, rank, world_size, rpc_backend_options)


def _torch_ucx_rpc_init_rpc(name: Any, backend: Any, rank: Any, world_size: Any, rpc_backend_options: Any) -> None:
    backend = _resolve(backend)
    if replace.replaces(backend, rpc_backend_options):
        backend, rpc_backend_options = _member("UCX"), replace.equivalent(rpc_backend_options)
    # Torch infers the backend too, and would warn that it is not TensorPipe.
    if backend is None and isinstance(rpc_backend_options, UcxRpcBackendOptions):
        backend = _member("UCX")
    if backend is _member("UCX"):
        _start.init_rpc(name, rank, world_size, rpc_backend_options)
        return
    # Its default is taken from this enum, and then checked against the other.
    rpc.BackendType = backend_registry.BackendType  # type: ignore[misc]
    _torchs_init_rpc(name, backend, rank, world_size, rpc_backend_options)


def _resolve(backend: Any) -> Any:
    """The member of the enum of now, for "UCX" and members of an earlier one; anything else is torch's to judge."""
    if backend == "UCX":
        return _member("UCX")
    if isinstance(backend, str):
        # No other backend has a string: torch refuses strings, and its tests hold every agent to that for "TENSORPIPE".
        known = ", ".join(sorted(backend_registry.BackendType.__members__))
        raise TypeError(
            f'Argument backend must be a member of BackendType or the string "UCX", and {backend!r} is neither; '
            f"the members are {known}"
        )
    if isinstance(backend, enum.Enum) and isinstance(backend.value, backend_registry.BackendValue):
        return backend_registry.BackendType.__members__.get(backend.name, backend)
    return backend


def _member(name: str) -> Any:
    """Of the enum of now: whoever registers another backend replaces it."""
    return backend_registry.BackendType[name]


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    agent = _agent.current
    if agent is not None:
        if not agent.is_static_group:
            # Who leaves a group without a size does so alone.
            return
        # Where workers that do not come, or die, are noticed and named, and Ctrl-C works.
        came = agent._barrier(timeout)
        # Then torch's own, which now has nobody to wait for: programs and tests hook into its parts. It waits for all
        # that there ever were, so not when one has left before; and for ever for one that dies just now, so not without
        # a limit.
        if came < len(api._ALL_WORKER_NAMES):
            return
        timeout = timeout or get_rpc_timeout()
    _torchs_wait_all_workers(timeout)


def _delete_rrefs(timeout: timedelta | None = None) -> None:
    """Part of graceful shutdown: this worker's references to others' RRefs, and the RRefs that only it has."""
    agent = _agent.current
    if timeout is None and agent is not None and not agent.is_static_group:
        # In a group that goes on, RRefs of this worker may be in use for as long as others please.
        timeout = _RREFS_IN_USE
    _torchs_delete_rrefs(*([] if timeout is None else [timeout]))


# On the way of every call: nothing is looked up or repacked that need not be.
def _invoke_rpc(
    to: Any,
    func: Any,
    rpc_type: Any,
    args: Any = None,
    kwargs: Any = None,
    rpc_timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    future = _torchs_invoke_rpc(to, func, rpc_type, args, kwargs, rpc_timeout)
    if rpc_type is _SYNC:
        agent = _agent.current
        if agent is not None:
            agent._wait(future)
    return future


# torch.futures.Future and wait_all come here too.
def _wait_for_future(future: Any) -> Any:
    agent = _agent.current
    # Of rpc_sync it is done by now.
    if agent is not None and not future.done() and agent.is_of_this_process():
        agent._await(future)
    return _torchs_wait(future)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.layout in sparse.COMPRESSED and _agent.current is not None:
        return sparse.reduce(tensor)
    return _torchs_tensor_reducer(tensor)


def _reduce_call(call: PythonUDF) -> Any:
    return PythonUDF, tuple(call)
