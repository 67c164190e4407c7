"""Gradients of torch's DistributedDataParallel through a server: `state` and `hook`."""

# No `from __future__ import annotations` here: DistributedDataParallel checks a hook's annotations, which must not be
# strings.

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from torch_ucx_rpc._arguments import check_type
from torch_ucx_rpc._threads import Thread
from torch_ucx_rpc._workers.futures import fail
from torch_ucx_rpc.reduction._copy import ModelCopy
from torch_ucx_rpc.reduction._server import Server


class State:
    """The result of `state`, for one model and one trainer."""

    def __init__(self, server: Server, quorum: int | None, copy: ModelCopy | None, expected: int | None) -> None:
        self.server = server
        options = {} if expected is None else {"expected": expected}
        self.steps = server.begin("ddp", self, are_equal=True, quorum=quorum, copy=copy, **options)
        self._open: list[Future[Tensor]] = []

    def push(self, bucket: GradBucket) -> Future[Tensor]:
        """Put a bucket of DDP's gradients. Returns the future of its mean, which completes when the step is closed."""
        if not self._open:
            self.steps.begin_step()
        self.steps.put([bucket.buffer().detach()])
        future: Future[Tensor] = Future(devices=self.server.office.life.devices)
        self._open.append(future)
        if bucket.is_last():
            open_, self._open = self._open, []
            # DDP waits for all buckets on this thread, at the end of the backward. So another thread finishes the step.
            Thread(self._finish, (open_,), name="torch_ucx_rpc-step").start()
        return future

    def _finish(self, open_: list[Future[Tensor]]) -> None:
        try:
            results = self.steps.finish()
        except Exception as error:
            for future in open_:
                fail(future, error)
        else:
            for future, [result] in zip(open_, results, strict=True):
                future.set_result(result)


def state(
    server: Server,
    quorum: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> State:
    """Return the state that `hook` needs, for one model.

    If the model has buffers, give DistributedDataParallel ``forward_sync_buffers=False`` (in older versions of torch,
    ``broadcast_buffers=False``). Do not give it ``find_unused_parameters=True``. Its collectives fail when a trainer
    dies.

    This waits until all ranks of the process group have called it, even if `serve` was given another number of
    trainers. Without a process group it waits for the trainers of `serve`.

    Args:
        server (Server): result of `serve`.
        quorum (int): from the third step on, a step is complete with that many trainers, and the result is the mean of
            their gradients. The mean leaves out gradients of late trainers (default: None, all present trainers).
        process_group (ProcessGroup): group of DistributedDataParallel (default: the default group).
        model (nn.Module): if the others have closed a step without this trainer, it loads another trainer's state into
            this model (default: None). Without a model, `hook` then raises RuntimeError.
        optimizer (torch.optim.Optimizer): a late trainer loads the state of another trainer's optimizer into it
            (default: None). Only with ``model``.

    Raises ValueError for a quorum above the number of trainers, for another quorum than the other trainers', and for an
    optimizer without a model. Raises RuntimeError if not all trainers have come within ``rpc_timeout``, and names the
    missing ones. Raises it also if the others have trained already and ``model`` is None, or if this trainer has left
    the server.

    Example::

        >>> ddp.register_comm_hook(reduction.state(server, quorum=3, model=ddp, optimizer=optimizer), reduction.hook)
    """
    check_type("server", Server, "what reduction.serve returns", server)
    if process_group is not None:
        check_type("process_group", dist.ProcessGroup, "DistributedDataParallel's process group", process_group)
    if model is not None:
        check_type("model", nn.Module, "an nn.Module", model)
    if optimizer is not None:
        check_type("optimizer", torch.optim.Optimizer, "this trainer's torch.optim.Optimizer", optimizer)
        if model is None:
            raise ValueError("optimizer needs model=: a late trainer takes the state of both; give both, or neither")
    ranks = None
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size(process_group)
        if quorum is not None and isinstance(quorum, int) and quorum > ranks:
            raise ValueError(
                f"quorum={quorum} can never be reached: the process group has {ranks} trainers; give at most that many"
            )
    server.check_quorum(quorum)
    return State(server, quorum, None if model is None else ModelCopy(model, optimizer), ranks)


def hook(state: State, bucket: GradBucket) -> Future[Tensor]:
    """Average gradients through a server: a communication hook of DistributedDataParallel.

    torch's compression can wrap it, as ``default_hooks.fp16_compress_wrapper(reduction.hook)``: half the bytes travel,
    and the hosts compute sums in float16.

    Args:
        state (State): result of `state`.
        bucket (GradBucket): flat gradients, from DistributedDataParallel.

    Returns a future of the bucket's mean, a flat tensor. Like that of `push_pull_async`, the future raises RuntimeError
    if the step is not completed.
    """
    expected = "what reduction.state returns, as in ddp.register_comm_hook(reduction.state(server), reduction.hook)"
    check_type("state", State, expected, state)
    check_type("bucket", GradBucket, "a GradBucket of DistributedDataParallel", bucket)
    return state.push(bucket)
