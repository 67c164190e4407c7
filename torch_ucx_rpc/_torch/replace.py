"""UCX in the place of TensorPipe, for programs that were written for TensorPipe: `replace_tensorpipe`."""

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

_replacing = False
_said = False


def replace_tensorpipe() -> None:
    """Let ``init_rpc`` start UCX wherever it would start TensorPipe, from now on and in this process.

    That is without a backend, with ``BackendType.TENSORPIPE``, and with ``TensorPipeRpcBackendOptions``. Of those
    options, ``num_worker_threads``, ``rpc_timeout``, ``init_method``, ``device_maps`` and ``devices`` hold for UCX too;
    ``_transports`` and ``_channels``, which choose among TensorPipe's own, are ignored. Other backends stay as they
    are. The first ``init_rpc`` that is concerned says so, in a warning of the logger ``torch_ucx_rpc``.

    The environment variable ``TORCH_UCX_RPC_REPLACE_TENSORPIPE=1`` does the same for a program that is not to be
    changed, and for the processes that it starts. All workers of a job must have it.

    Example::

        >>> torch_ucx_rpc.replace_tensorpipe()
        >>> rpc.init_rpc("ps", rank=0, world_size=2)
    """
    global _replacing
    _replacing = True


def is_asked_for() -> bool:
    """What the environment variable says."""
    value = os.environ.get(VARIABLE, "")
    if value not in (*OFF, "1"):
        raise ImportError(
            f"{VARIABLE}={value} means nothing: set it to 1 to have UCX in the place of TensorPipe, or to 0, or leave "
            f"it unset.",
            name="torch_ucx_rpc",
        )
    return value not in OFF


def replaces(backend: Any, options: Any) -> bool:
    """True of arguments with which ``init_rpc`` would start TensorPipe, if that is to be replaced."""
    if not _replacing:
        return False
    if backend is None:
        return options is None or isinstance(options, rpc.TensorPipeRpcBackendOptions)
    return backend is backend_registry.BackendType["TENSORPIPE"]


def equivalent(options: Any) -> Any:
    """For options given to TensorPipe, those for UCX; TypeError for those of another backend."""
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
        # TensorPipe's own words.
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {options}")
    # No options at all, which init_rpc refuses whatever the backend.
    return options


def _say_so() -> None:
    global _said
    if not _said:
        _said = True
        _logger.warning("%s: torch.distributed.rpc uses UCX in the place of TensorPipe in this process", VARIABLE)
