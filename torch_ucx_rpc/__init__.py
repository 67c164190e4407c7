"""UCX for ``torch.distributed.rpc``: import this package, then ``init_rpc(..., backend="UCX")``.

Importing loads UCX and the C++ agent and makes "UCX" a backend of PyTorch's RPC; the rest of a program stays as it
is. What a program may use from here:

* `UcxRpcBackendOptions`: threads, timeouts, memory limits and device maps of a worker
* `replace_tensorpipe`: UCX wherever a program asks for TensorPipe, or for no backend
* ``testing``, a module to import by itself: the agent with faults on demand
* `__version__`

How the package is laid out:

* ``_native``        finds UCX, checks torch, loads the extension ``_C``
* ``_options``       `UcxRpcBackendOptions`
* ``_register``      everything that is changed in torch, in one function
* ``_replace``       `replace_tensorpipe`, and the environment variable that calls it
* ``_agent``         ``init_rpc`` for this backend, the running agent, the end of the process
* ``_exceptions``    what a callee raises keeps its type
* ``_sparse``        compressed sparse tensors as results of Python functions
* ``_rendezvous``    the Store through which the workers of a job find each other
* ``_members``       who of them belongs to a group of fixed size
* ``_dynamic_group`` who belongs to one that workers join and leave
* ``_record``        what each tells the others of itself
* ``_secret``        the secret of a job, and what is made of it
* ``_C``             the agent itself, written in C++ (``csrc/``)
"""

from importlib.metadata import version as _installed_version

# The first of these loads UCX and the extension, or explains why it cannot.
from torch_ucx_rpc import _native as _native
from torch_ucx_rpc import _register, _replace
from torch_ucx_rpc._options import UcxRpcBackendOptions
from torch_ucx_rpc._replace import replace_tensorpipe

__all__ = ["UcxRpcBackendOptions", "__version__", "replace_tensorpipe"]

__version__ = _installed_version("torch_ucx_rpc")

_register.register()
if _replace.is_asked_for():
    replace_tensorpipe()
