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
* ``schedules``  those of one pipeline, one for each number of micro-batches

On a worker:

* ``build``      how a module comes to its worker
* ``backward``   the way back of a micro-batch, whole or in halves
* ``stage``      one stage: micro-batches forward and back
* ``messages``   what the driver and its workers tell each other
* ``exchange``   the values between stages: how they leave, and where they lie
* ``run``        one call: its row of the schedule, action by action
* ``stages``     all stages of a worker, and what the driver's orders do with them
* ``host``       the mailbox in front of them; orders are carried out in turn

On the driver:

* ``partition``  a model divided into stages: their weights and edges
* ``balance``    stages that take equally long
* ``tracing``    models that are no nn.Sequential, by torch's splitter
* ``divide``     which layers make a stage
* ``crew``       the workers: orders to all of them, and what came of each
* ``calls``      one batch as the workers get it
* ``engine``     a batch through the stages, as long as no worker is lost
* ``recovery``   the same in spite of losses: spares, and the journal since the last checkpoint
* ``function``   ``pipe(x)`` in autograd
* ``scaler``     `GradScaler`
* ``optimizer``  `PipelineOptimizer`
* ``state``      what of all this a checkpoint holds
* ``trace``      a picture of a step
* ``table``      ``print(pipe)``
* ``driver``     `DistributedPipeline`

The way of one step: ``driver`` checks it, ``recovery`` guards it, ``engine`` divides the batch into ``calls``. ``crew``
sends an order to each worker, ``host`` takes it in turn, ``run`` carries out the row, ``stage`` computes, ``exchange``
passes on.
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
