"""`replace_tensorpipe`: UCX instead of TensorPipe, for programs that were written for TensorPipe."""

# mypy: allow-untyped-calls

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import RpcBackendOptions
from torch.distributed.rpc import backend_registry

from torch_ucx_rpc._options import UcxRpcBackendOptions

# The module _torch_ucx_rpc_autoload repeats these two: it must not import this package before a program uses RPC.
VARIABLE = "TORCH_UCX_RPC_REPLACE_TENSORPIPE"
# Values that leave TensorPipe in place.
OFF = ("", "0")

_logger = logging.getLogger(__name__)

# The variable or function that asked for UCX, for the warning; None if TensorPipe stays.
_replaced_by: str | None = None
_said = False


def replace_tensorpipe() -> None:
    """Let ``init_rpc`` start UCX wherever it would start TensorPipe, from now on and in this process.

    ``init_rpc`` would start TensorPipe if the program names no backend or ``BackendType.TENSORPIPE``, or gives
    ``TensorPipeRpcBackendOptions``. UCX takes over ``num_worker_threads``, ``rpc_timeout``, ``init_method``,
    ``device_maps`` and ``devices``. It ignores ``_transports`` and ``_channels``, which choose among
    parts of TensorPipe. Other backends stay as they are. The first ``init_rpc`` that starts UCX instead logs a warning,
    with a logger below ``torch_ucx_rpc``.

    The environment variable ``TORCH_UCX_RPC_REPLACE_TENSORPIPE=1`` does the same for an unchanged program, and for the
    processes that it starts. All workers of a job need the same setting.

    Example::

        >>> torch_ucx_rpc.replace_tensorpipe()
        >>> rpc.init_rpc("ps", rank=0, world_size=2)
    """
    global _replaced_by
    _replaced_by = _replaced_by or "torch_ucx_rpc.replace_tensorpipe()"


def read_variable() -> None:
    """Replace TensorPipe if the environment variable asks for it. Raises ImportError for an invalid value."""
    global _replaced_by
    value = os.environ.get(VARIABLE, "")
    if value not in (*OFF, "1"):
        raise ImportError(
            f"{VARIABLE}={value} means nothing: set it to 1 to have UCX instead of TensorPipe, or to 0, or leave "
            f"it unset.",
            name="torch_ucx_rpc",
        )
    if value not in OFF:
        _replaced_by = VARIABLE


def replaces(backend: Any, options: Any) -> bool:
    """True if TensorPipe is to be replaced, and ``init_rpc`` would start it with these arguments."""
    if _replaced_by is None:
        return False
    if backend is None:
        return options is None or isinstance(options, rpc.TensorPipeRpcBackendOptions)
    return backend is backend_registry.BackendType["TENSORPIPE"]


def equivalent(options: Any) -> Any:
    """Options for UCX that are equivalent to options for TensorPipe; TypeError for options of another backend."""
    _say_so()
    if options is None:
        return UcxRpcBackendOptions()
    if isinstance(options, rpc.TensorPipeRpcBackendOptions):
        return UcxRpcBackendOptions(
            num_worker_threads=options.num_worker_threads,
            rpc_timeout=options.rpc_timeout,
            init_method=options.init_method,
            device_maps=options.device_maps,  # type: ignore[arg-type]
            devices=options.devices,
        )
    if isinstance(options, RpcBackendOptions):
        # The error has TensorPipe's words.
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {options}")
    # init_rpc refuses these for every backend, since they are not options.
    return options


def _say_so() -> None:
    global _said
    if not _said:
        _said = True
        _logger.warning("%s: torch.distributed.rpc uses UCX instead of TensorPipe in this process", _replaced_by)
