"""Pipelines over ``torch.distributed.rpc``: a model's stages on workers, micro-batches through all of them at once.

    >>> from torch_ucx_rpc import pipeline
    >>> pipe = pipeline.DistributedPipeline(
    ...     nn.Sequential(...), workers=["stage0", "stage1"], schedule="1F1B", chunks=8, loss=F.cross_entropy
    ... )
    >>> optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3)
    >>> loss = pipe.step(x, target=y)
    >>> optimizer.step(); optimizer.zero_grad()

* `DistributedPipeline`  the model as the training loop sees it
* `PipelineOptimizer`    the result of its ``optimizer()``
* `GradScaler`           for float16
* `Built`                a stage that its worker builds
* `SplitPoint`           torch's class, for ``split_spec``
* `PipelineError`, `StageError`, `StageLostError`, `ScheduleError`: the failures of a pipeline

How it is laid out, from the bottom up:

* ``_errors``     the failures of a pipeline
* ``_values``     values between stages; micro-batches of a batch
* ``_partition``  a model divided into stages: their weights, and the edges between them
* ``_schedule``   the actions of each worker: named schedules, torch's text, the proof that they end

On a worker:

* ``_build``      how a worker gets the module of its stage
* ``_backward``   the backward of a micro-batch, whole or in halves
* ``_stage``      one stage: micro-batches forward and back
* ``_exchange``   values between stages, by channel
* ``_run``        one call: its row of the schedule, action by action
* ``_state``      parts of the state, for checkpoints and for the driver
* ``_stages``     all stages of a worker, and the driver's orders to them
* ``_host``       the thread that carries out the driver's orders

On the driver:

* ``_balance``    stages that take equally long
* ``_tracing``    other models than nn.Sequential, by torch's splitter
* ``_divide``     the division of layers into stages
* ``_crew``       the workers: epochs, orders to all of them, and their outcomes
* ``_remote``     the model on its workers: made there, and made again elsewhere
* ``_recovery``   orders, given again after the loss of a worker: spares, and the journal since the last checkpoint
* ``_batches``    a batch through the stages
* ``_function``   ``pipe(x)`` in autograd
* ``_scaler``     `GradScaler`
* ``_optimizer``  `PipelineOptimizer`
* ``_show``       ``print(pipe)``, and a Chrome trace of a step
* ``_driver``     `DistributedPipeline`

A step: ``_driver`` checks it, ``_batches`` divides it, ``_recovery`` guards it, ``_crew`` sends an order to each
worker. There ``_host`` takes it, ``_run`` carries out the row, ``_stage`` computes, ``_exchange`` passes values on.
"""

from torch.distributed.pipelining import SplitPoint

from torch_ucx_rpc.pipeline._build import Built
from torch_ucx_rpc.pipeline._driver import DistributedPipeline
from torch_ucx_rpc.pipeline._errors import PipelineError, ScheduleError, StageError, StageLostError
from torch_ucx_rpc.pipeline._optimizer import PipelineOptimizer
from torch_ucx_rpc.pipeline._scaler import GradScaler

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
