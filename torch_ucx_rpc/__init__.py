"""UCX for ``torch.distributed.rpc``: import this package, then ``init_rpc(..., backend="UCX")``.

Importing loads UCX and the C++ agent and makes "UCX" a backend of PyTorch's RPC; the rest of a program stays as it
is. What a program may use from here:

* `UcxRpcBackendOptions`: threads, timeouts, memory limits and device maps of a worker
* `init_rpc`: for workers that a launcher started, which tells them all that they need
* `replace_tensorpipe`: UCX wherever a program asks for TensorPipe, or for no backend
* ``testing``, a module to import by itself: the agent with faults on demand
* ``pipeline``, a package to import by itself: a model's stages on workers, micro-batches through all of them at once
* ``checkpoint``, a package to import by itself: state that lives on many workers, in the format of DCP
* `native_op`: makes a Python function an operator of torch, compiled by numba, that runs without the GIL
* `statistics`: a snapshot of calls, bytes, lanes, queues, memory, and latencies per peer
* `Statistics`: its type
* `PeerStatistics`: what is in it of each worker
* `Latencies`: how long the calls to one took
* `__version__`

How the package is laid out:

* ``_native``        finds UCX, checks torch, loads the extension ``_C``
* ``_options``       `UcxRpcBackendOptions`
* ``_register``      everything that is changed in torch, in one function
* ``_replace``       `replace_tensorpipe`, and the environment variable that calls it
* ``_agent``         ``init_rpc`` for this backend, the running agent, the end of the process
* ``_launched``      `init_rpc`
* ``_environment``   what launchers say in environment variables
* ``_mpi``           what those of MPI do not say there
* ``_exceptions``    what a callee raises keeps its type
* ``_sparse``        compressed sparse tensors as results of Python functions
* ``_arrays``        arrays travel as tensors do
* ``_native_op``     `native_op`
* ``_numba_code``    what numba makes for it
* ``_rendezvous``    the Store through which the workers of a job find each other
* ``_members``       who of them belongs to a group of fixed size
* ``_dynamic_group`` who belongs to one that workers join and leave
* ``_device_maps``   where tensors arrive on devices, and whether the maps of all workers fit together
* ``_device_pool``   in whose memory they arrive there
* ``_record``        what each tells the others of itself
* ``_network``       which network interface UCX gets
* ``_conflicts``     what the site has set or limited that RPC cannot work with
* ``_statistics``    `statistics`
* ``_prometheus``    the same for Prometheus
* ``_observation``   the same for ``python -m torch_ucx_rpc top``
* ``__main__``       ``python -m torch_ucx_rpc``
* ``_cli``           its commands, a module each
* ``_secret``        the secret of a job, and what is made of it
* ``_C``             the agent itself, written in C++ (``csrc/``)
"""

import sys
from importlib.metadata import version as _installed_version


def _is_asked_what_is_wrong() -> bool:
    """In ``python -m torch_ucx_rpc info``, which runs where the rest of this cannot be imported, and tells why."""
    # So it is while Python looks for the module to run, after which sys.argv[0] is its file.
    return sys.argv[:2] == ["-m", "info"] and any(word.endswith("torch_ucx_rpc") for word in sys.orig_argv)


__version__ = "unknown"
_failure: ImportError | OSError | None = None
try:
    __version__ = _installed_version("torch_ucx_rpc")
    # Loads UCX and the extension, or explains why it cannot.
    from torch_ucx_rpc import _native as _native
except (ImportError, OSError) as error:
    if not _is_asked_what_is_wrong():
        raise
    _failure = error

if _failure is None:
    from torch_ucx_rpc import _register, _replace
    from torch_ucx_rpc._launched import init_rpc
    from torch_ucx_rpc._native_op import native_op
    from torch_ucx_rpc._options import UcxRpcBackendOptions
    from torch_ucx_rpc._replace import replace_tensorpipe
    from torch_ucx_rpc._statistics import Latencies, PeerStatistics, Statistics, statistics

    _register.register()
    if _replace.is_asked_for():
        replace_tensorpipe()

__all__ = [
    "Latencies",
    "PeerStatistics",
    "Statistics",
    "UcxRpcBackendOptions",
    "__version__",
    "init_rpc",
    "native_op",
    "replace_tensorpipe",
    "statistics",
]
