"""Checkpoints of state on many RPC workers, in the format of ``torch.distributed.checkpoint`` (DCP).

    >>> from torch_ucx_rpc import checkpoint
    >>> checkpoint.save({"model": pipe, "optim": optimizer, "emb": remote_module}, "ckpt/100")
    >>> future = checkpoint.save({"model": pipe}, "ckpt/200", asynchronous=True)   # all copied; written later
    >>> checkpoint.load({"model": other_pipe}, "ckpt/100")                         # other stages, other workers

Every worker writes and reads its own part; planners, files and metadata are DCP's, plans and results travel as RPC's
returns. Names are those of the undivided model, so ``dcp.load(..., no_dist=True)`` and ``dcp_to_torch_save`` read the
files in one process. Importing this package also gives ``RemoteModule`` the methods of nn.Module that torch refuses:
``state_dict``, ``load_state_dict``, ``train``, ``eval``, ``requires_grad_``, ``zero_grad``.

* `save`, `load`     the two functions
* `SaveFuture`       the result of an asynchronous save
* `CheckpointError`  the failure of both
* `Part`             the result of an object whose workers save it

How it is laid out:

* ``parts``           the parts of a state, and their workers
* ``optimizers``      the template of an optimizer's state
* ``storage``         DCP's files, safe against an end in the middle
* ``saving``          `save`
* ``loading``         `load`
* ``remote_modules``  the methods of RemoteModule
"""

from torch_ucx_rpc.checkpoint.loading import load
from torch_ucx_rpc.checkpoint.parts import CheckpointError, Part
from torch_ucx_rpc.checkpoint.remote_modules import install as _install
from torch_ucx_rpc.checkpoint.saving import SaveFuture, save

_install()

__all__ = ["CheckpointError", "Part", "SaveFuture", "load", "save"]
