"""Checkpoints of state on many RPC workers, in the format of ``torch.distributed.checkpoint`` (DCP).

    >>> from torch_ucx_rpc import checkpoint
    >>> checkpoint.save({"model": pipe, "optim": optimizer, "emb": remote_module}, "ckpt/100")
    >>> future = checkpoint.save({"model": pipe}, "ckpt/200", asynchronous=True)   # all copied; written later
    >>> checkpoint.load({"model": other_pipe}, "ckpt/100")                         # other stages, other workers

Every worker writes and reads its own part. Planners, files and metadata are DCP's. Plans and outcomes travel as results
of calls. Names are those of the undivided model, so ``dcp.load(..., no_dist=True)`` and ``dcp_to_torch_save`` read the
files in one process. `remote_modules` has the methods of nn.Module that torch's ``RemoteModule`` refuses.

* `save`, `load`     the two functions; `async_save` is torch's name of an asynchronous save
* `SaveFuture`       the result of an asynchronous save
* `CheckpointError`  raised by both
* `Part`             one worker's part of an object

How it is laid out:

* ``parts``           the parts of a state, and their workers
* ``optimizers``      the template of an optimizer's state
* ``storage``         DCP's files, safe against an end in the middle
* ``saving``          `save`
* ``loading``         `load`
* ``remote_modules``  methods of nn.Module for a RemoteModule
"""

from torch_ucx_rpc.checkpoint import remote_modules as remote_modules
from torch_ucx_rpc.checkpoint.loading import load
from torch_ucx_rpc.checkpoint.parts import CheckpointError, Part
from torch_ucx_rpc.checkpoint.saving import SaveFuture, async_save, save

__all__ = ["CheckpointError", "Part", "SaveFuture", "async_save", "load", "save"]
