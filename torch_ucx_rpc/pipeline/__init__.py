"""Pipelines over ``torch.distributed.rpc``: a model's stages on workers, micro-batches through all of them at once.

    >>> from torch_ucx_rpc import pipeline
    >>> pipe = pipeline.DistributedPipeline(
    ...     nn.Sequential(...), workers=["stage0", "stage1"], schedule="1F1B", chunks=8, loss=F.cross_entropy
    ... )
    >>> optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3)
    >>> loss = pipe.step(x, target=y)
    >>> optimizer.step(); optimizer.zero_grad()

* `DistributedPipeline`  the model as the training loop sees it
* `PipelineOptimizer`    what its ``optimizer()`` returns
* `GradScaler`           for float16
* `Built`                a stage that its worker builds by itself
* `SplitPoint`           torch's, for ``split_spec``
* `PipelineError`, `StageError`, `StageLostError`, `ScheduleError`: how a pipeline fails

How it is laid out, from the bottom up:

* ``errors``     how a pipeline fails
* ``values``     what goes between stages; micro-batches of a batch
* ``wiring``     which stage sends what to which
* ``schedule``   which worker does what when: named schedules, torch's text, the proof that they end
* ``backward``   the way back of a micro-batch, whole or in halves
* ``build``      how a module comes to its worker
* ``stage``      one stage
* ``host``       a worker: carries out the driver's orders, in turn
* ``partition``  which layers make a stage
* ``tracing``    the same for models that are no nn.Sequential
* ``crew``       the driver's side of the workers
* ``function``   ``pipe(x)`` in autograd
* ``scaler``     `GradScaler`
* ``optimizer``  `PipelineOptimizer`
* ``state``      what of all this a checkpoint holds
* ``recovery``   spares, and the journal since the last checkpoint
* ``trace``      a picture of a step
* ``table``      ``print(pipe)``
* ``driver``     `DistributedPipeline`
"""

from torch.distributed.pipelining import SplitPoint

from torch_ucx_rpc.pipeline.build import Built
from torch_ucx_rpc.pipeline.driver import DistributedPipeline
from torch_ucx_rpc.pipeline.errors import PipelineError, ScheduleError, StageError, StageLostError
from torch_ucx_rpc.pipeline.optimizer import PipelineOptimizer
from torch_ucx_rpc.pipeline.scaler import GradScaler

__all__ = [
    "Built",
    "DistributedPipeline",
    "GradScaler",
    "PipelineError",
    "PipelineOptimizer",
    "ScheduleError",
    "SplitPoint",
    "StageError",
    "StageLostError",
]
