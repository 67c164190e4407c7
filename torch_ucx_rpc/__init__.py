"""UCX for ``torch.distributed.rpc``: import this package, then ``init_rpc(..., backend="UCX")``.

Importing loads UCX and the C++ agent, and makes "UCX" a backend of PyTorch's RPC. The rest of a program stays as it
is. The public names:

* `UcxRpcBackendOptions`: threads, timeouts, memory limits and device maps of a worker
* `init_rpc`: for workers that a launcher started; it reads name, rank, size and meeting place from the environment
* `replace_tensorpipe`: starts UCX wherever a program asks for TensorPipe, or for no backend
* ``errors``: the exceptions of calls that fail, for programs that distinguish a lost worker from a timeout
* ``testing``, a module that is imported by name: the agent with faults on demand
* `native_op`: makes a Python function an operator of torch, which numba compiles and which runs without the GIL
* ``channel``, likewise by name: one-way tensors between loops of two workers
* ``services``, likewise: names and roles of workers
* ``reduction``, likewise: gradients through servers, for trainers that come, go and die
* ``pipeline``, likewise: a model's stages on workers, micro-batches through all of them at once
* ``checkpoint``, likewise: state on many workers, in the format of DCP
* `on_lost`: a callback when a worker is lost
* `wait`: ``future.wait()`` that can also wait until the data are on their GPUs
* `statistics`: a snapshot of calls, bytes, lanes, queues, memory, and latencies per peer
* `Statistics`: the type of the snapshot
* `PeerStatistics`: the part of the snapshot about one worker
* `ServiceStatistics`: the part of the snapshot about one service that the worker offers
* `Latencies`: durations of the calls to one worker
* `__version__`

The modules and folders of the package; the docstring of each folder lists its modules:

* ``_arguments``   checks of arguments, and the words of their errors
* ``_version``     the version of the installed package
* ``_native``      finds UCX, checks torch, loads the extension ``_C``
* ``_threads``     threads of the libraries, which end before the interpreter
* ``_options``     `UcxRpcBackendOptions`
* ``_agent``       the running agent, and the end of the process
* ``_start``       ``init_rpc`` for this backend, step by step
* ``_bootstrap``   how workers find each other before the first call
* ``_devices``     device maps, the memory of received tensors on devices, and `wait`
* ``_launch``      `init_rpc`, and the environment variables of launchers
* ``_native_op``   `native_op`
* ``_observe``     `statistics`, for Prometheus and ``python -m torch_ucx_rpc top`` too; warnings
* ``_workers``     `on_lost`, and what the libraries know of other workers
* ``_torch``       all changes that this package makes to torch
* ``_cli``         the commands of ``torch-ucx-rpc``, a module each
* ``__main__``     ``python -m torch_ucx_rpc``
* ``_C``           the agent itself, written in C++ (``csrc/``)
"""

import contextlib
import gc
import importlib
import sys
import typing

from torch_ucx_rpc import errors

if typing.TYPE_CHECKING:
    from torch_ucx_rpc._launch.init import init_rpc
    from torch_ucx_rpc._native_op.op import native_op
    from torch_ucx_rpc._observe.statistics import (
        Latencies,
        PeerStatistics,
        ServiceStatistics,
        Statistics,
        statistics,
    )
    from torch_ucx_rpc._version import __version__


def _runs(command: str) -> bool:
    """Tell whether this process runs this command of ``torch-ucx-rpc``."""
    # With `python -m torch_ucx_rpc`, sys.argv[0] is "-m" while Python looks for the module, and its file afterwards.
    return sys.argv[1:2] == [command] and (
        sys.argv[0].endswith("torch-ucx-rpc")
        or (sys.argv[0] == "-m" and any(word.endswith("torch_ucx_rpc") for word in sys.orig_argv))
    )


@contextlib.contextmanager
def _without_collections() -> typing.Iterator[None]:
    """Turn Python's garbage collector off during the import: nearly all imported objects stay."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


# The command `run` uses none of these modules, and its workers start sooner without them.
_is_complete = not _runs("run")
_failure: ImportError | OSError | None = None
if _is_complete:
    with _without_collections():
        try:
            # This import loads UCX and the extension, or raises an ImportError that explains the failure. It raises
            # OSError if a library of the libucx wheel cannot be loaded.
            from torch_ucx_rpc import _native as _native
        except (ImportError, OSError) as error:
            # The command `info` shows the failure.
            if not _runs("info"):
                raise
            _is_complete, _failure = False, error
        else:
            from torch_ucx_rpc._devices.wait import wait
            from torch_ucx_rpc._observe.log import receive_warnings as _receive_warnings
            from torch_ucx_rpc._options import UcxRpcBackendOptions
            from torch_ucx_rpc._torch.patches import register as _register
            from torch_ucx_rpc._torch.replace import read_variable as _read_variable
            from torch_ucx_rpc._torch.replace import replace_tensorpipe
            from torch_ucx_rpc._workers.lost import on_lost

            _receive_warnings()
            _register()
            _read_variable()

# Names and their modules. The first use of a name loads its module. Loading all modules here would make the import a
# third longer.
_ON_DEMAND = {
    "init_rpc": "_launch.init",
    "native_op": "_native_op.op",
    "Latencies": "_observe.statistics",
    "PeerStatistics": "_observe.statistics",
    "ServiceStatistics": "_observe.statistics",
    "Statistics": "_observe.statistics",
    "statistics": "_observe.statistics",
    "__version__": "_version",
}


def __getattr__(name: str) -> typing.Any:
    module = _ON_DEMAND.get(name)
    if module is None or (not _is_complete and name != "__version__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND})


__all__ = [
    "Latencies",
    "PeerStatistics",
    "ServiceStatistics",
    "Statistics",
    "UcxRpcBackendOptions",
    "__version__",
    "errors",
    "init_rpc",
    "native_op",
    "on_lost",
    "replace_tensorpipe",
    "statistics",
    "wait",
]
