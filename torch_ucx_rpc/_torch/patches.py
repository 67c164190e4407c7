"""Every patch of torch, in one function: `register`. A test lists the same places (``test_what_is_patched``)."""

# mypy: allow-untyped-calls

from __future__ import annotations

import enum
import inspect
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import _jit_internal
from torch._C import _distributed_rpc
from torch._C._distributed_rpc import get_rpc_timeout
from torch.distributed.rpc import api, backend_registry, internal
from torch.distributed.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from torch.distributed.rpc.internal import PythonUDF, RPCExecMode, _internal_rpc_pickler

from torch_ucx_rpc import _agent, _start, errors
from torch_ucx_rpc._native import _C
from torch_ucx_rpc._options import UcxRpcBackendOptions, construct_options
from torch_ucx_rpc._torch import arrays, exceptions, replace, shutdown, sparse, unsent

# The functions of torch that `register` replaces, and that the replacements call.
_torchs_wait_all_workers = api._wait_all_workers
_torchs_wait = torch._C.Future.wait
_torchs_invoke_rpc = api._invoke_rpc
_torchs_delete_rrefs = _distributed_rpc._delete_all_user_and_unforked_owner_rrefs
_torchs_persistent_id = _jit_internal._TensorExtractor.persistent_id
_torchs_tensor_reducer = _internal_rpc_pickler._dispatch_table[torch.Tensor]
# The function itself, behind wrappers such as that of _torch_ucx_rpc_autoload.
_init_rpc: Any = inspect.unwrap(rpc.init_rpc)
_torchs_init_rpc = FunctionType(
    _init_rpc.__code__, _init_rpc.__globals__, "init_rpc", _init_rpc.__defaults__, _init_rpc.__closure__
)

_SYNC = RPCExecMode.SYNC
# A worker that leaves a group waits this long until the others have released its RRefs.
_RREFS_IN_USE = timedelta(seconds=1)


def register() -> None:
    """Make "UCX" a backend of ``torch.distributed.rpc``, once; every other backend stays as it is.

    * ``BackendType.UCX`` exists, also in the enum that programs imported earlier.
    * ``init_rpc`` accepts that member, the string "UCX", and members of an earlier enum.
    * Graceful shutdown serves until all living workers have come. Ctrl-C works.
    * A blocked ``rpc_sync`` answers Ctrl-C, and drives its call instead of sleeping: the calling thread receives and
      completes its own answer. ``RRef.to_here`` does the same without a patch: torch sends and waits in one C++
      function, and the agent waits where it sends.
    * ``Future.wait`` answers Ctrl-C, for every future. It does not drive the future's call.
    * An exception of the callee keeps its type, in ``rpc_sync`` and in futures. The error of a callee that cannot
      unpickle the arguments keeps its type too.
    * A message that cannot be pickled, and a call that cannot be sent, keep no tensor and no reference to an RRef.
    * Python functions can return sparse tensors of compressed layouts.
    * Arrays in arguments and results travel as tensors, and futures know their device memory.

    ``rpc_sync`` and ``Future.wait`` take two patches, since neither place can serve both. Only ``_invoke_rpc`` knows
    that a call is ``rpc_sync``; when ``rpc_sync`` then waits, its future looks like that of ``rpc_async``. And a wait
    for any other future must not drive. Completing a call runs callbacks on the waiting thread, which may hold a lock
    that the callbacks need. Futures that need Ctrl-C come from ``rpc_async``, ``then`` and ``collect_all`` as well, so
    ``_invoke_rpc`` cannot stand in for ``Future.wait``.
    """
    # The mark is in torch: a reload makes a second copy of this module.
    if hasattr(rpc, _torch_ucx_rpc_init_rpc.__name__):
        return
    before = rpc.BackendType
    backend_registry.register_backend("UCX", construct_options, _start.init_backend)
    # Registering makes a new enum. Programs that imported the old enum find the new member in it too.
    rpc.BackendType = backend_registry.BackendType  # type: ignore[misc]
    type.__setattr__(before, "UCX", _member("UCX"))
    # Programs often import init_rpc by name before this package, so the function itself gets new code.
    setattr(rpc, _torch_ucx_rpc_init_rpc.__name__, _torch_ucx_rpc_init_rpc)
    _init_rpc.__code__ = _new_init_rpc.__code__
    # torch looks these up at every call.
    api._wait_all_workers = _wait_all_workers
    api._invoke_rpc = _invoke_rpc
    api._delete_all_user_and_unforked_owner_rrefs = _delete_rrefs  # type: ignore[attr-defined]
    api._destroy_rref_context = _agent.destroy_rref_context  # type: ignore[assignment, attr-defined]
    api._invoke_rpc_python_udf = unsent.nothing_left(api._invoke_rpc_python_udf)  # type: ignore[attr-defined]
    api._invoke_remote_python_udf = unsent.nothing_left(api._invoke_remote_python_udf)  # type: ignore[attr-defined]
    torch._C.Future.wait = _wait_for_future  # type: ignore[assignment, method-assign]
    internal._InternalRPCPickler.serialize = unsent.serialize  # type: ignore[method-assign]
    _distributed_rpc.PyRRef._serialize = unsent.serialize_rref  # type: ignore[assignment, method-assign]
    _internal_rpc_pickler._dispatch_table = arrays.Reducers(_internal_rpc_pickler._dispatch_table)
    _internal_rpc_pickler._dispatch_table[torch.Tensor] = _reduce_tensor
    # Every call of a Python function pickles a PythonUDF, and pickle looks no further than this table for its reducer.
    _internal_rpc_pickler._dispatch_table[PythonUDF] = _reduce_call
    _internal_rpc_pickler._dispatch_table[exceptions._TypeOfBoth] = exceptions.reduce_type
    # torch calls this when it pickles the value of a future with devices, to find the tensors in the value.
    _jit_internal._TensorExtractor.persistent_id = _extract_tensors_of  # type: ignore[method-assign]
    # torch's C++ takes these when the first agent of the process starts.
    internal._handle_exception = exceptions.handle_exception
    internal.deserialize = exceptions.deserialize
    _C.translate_runtime_errors(exceptions.original, errors.from_native)


# init_rpc gets the code of this function, and keeps its own globals and defaults.
def _new_init_rpc(name: Any, backend: Any, rank: Any, world_size: Any, rpc_backend_options: Any) -> None:
    return _torch_ucx_rpc_init_rpc(name, backend, rank, world_size, rpc_backend_options)


def _torch_ucx_rpc_init_rpc(name: Any, backend: Any, rank: Any, world_size: Any, rpc_backend_options: Any) -> None:
    backend = _resolve(backend)
    if replace.replaces(backend, rpc_backend_options):
        backend, rpc_backend_options = _member("UCX"), replace.equivalent(rpc_backend_options)
    # torch infers the backend too, and would warn that it is not TensorPipe.
    if backend is None and isinstance(rpc_backend_options, UcxRpcBackendOptions):
        backend = _member("UCX")
    if backend is _member("UCX"):
        _start.init_rpc(name, rank, world_size, rpc_backend_options)
        return
    # torch takes the default backend from `rpc.BackendType`, and checks it against `backend_registry.BackendType`.
    rpc.BackendType = backend_registry.BackendType  # type: ignore[misc]
    _torchs_init_rpc(name, backend, rank, world_size, rpc_backend_options)


def _resolve(backend: Any) -> Any:
    """The member of the current enum for "UCX" or a member of an earlier enum. Other values are returned unchanged."""
    if backend == "UCX":
        return _member("UCX")
    if isinstance(backend, str):
        # torch refuses strings, and its tests expect every agent to refuse "TENSORPIPE". So only "UCX" may be a string.
        known = ", ".join(sorted(backend_registry.BackendType.__members__))
        raise TypeError(
            f'Argument backend must be a member of BackendType or the string "UCX", and {backend!r} is neither; '
            f"the members are {known}"
        )
    if isinstance(backend, enum.Enum) and isinstance(backend.value, backend_registry.BackendValue):
        return backend_registry.BackendType.__members__.get(backend.name, backend)
    return backend


def _member(name: str) -> Any:
    """A member of the current enum, which every registration of a backend replaces."""
    return backend_registry.BackendType[name]


# In torch's barrier each worker sends the names of all workers to one of them. Larger groups use only the agent's own
# barrier, a tree.
_MOST_GATHERED = 33


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    agent = _agent.current
    if agent is not None:
        if not agent.is_static_group:
            # A worker leaves a group without a size by itself, without a barrier.
            return
        # The agent's barrier waits for the living workers, and names those that do not come. Ctrl-C ends it.
        came = agent._barrier(timeout)
        # torch's own barrier follows, and finds all workers ready: programs and tests hook into its parts. torch's
        # barrier waits for every worker that ever came, so skip it when one has left or died before.
        if came == len(api._ALL_WORKER_NAMES) <= _MOST_GATHERED:
            shutdown.wait_all_workers(timeout or get_rpc_timeout())
        return
    _torchs_wait_all_workers(timeout)


def _delete_rrefs(timeout: timedelta | None = None) -> None:
    """Part of graceful shutdown: delete this worker's references to others' RRefs, and RRefs that only it holds."""
    agent = _agent.current
    if timeout is None and agent is not None:
        if agent.is_static_group:
            shutdown.delete_rrefs(agent, _torchs_delete_rrefs)
            return
        # The group goes on, and its members may use RRefs of this worker without a limit.
        timeout = _RREFS_IN_USE
    _torchs_delete_rrefs(*([] if timeout is None else [timeout]))


# Every call runs this function, so it looks up and repacks nothing without need.
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


# torch.futures.Future and wait_all call this function too.
def _wait_for_future(future: Any) -> Any:
    agent = _agent.current
    # The future of rpc_sync is done by now.
    if agent is not None and not future.done() and agent.is_of_this_process():
        agent._await(future)
    return _torchs_wait(future)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.layout in sparse.COMPRESSED and _agent.current is not None:
        return sparse.reduce(tensor)
    return _torchs_tensor_reducer(tensor)


def _extract_tensors_of(extractor: _jit_internal._TensorExtractor, value: Any) -> Any:
    tensors = arrays.tensors_of(value)
    if tensors is None:
        return _torchs_persistent_id(extractor, value)
    extractor.tensors += tensors
    return ""


def _reduce_call(call: PythonUDF) -> Any:
    return PythonUDF, tuple(call)
