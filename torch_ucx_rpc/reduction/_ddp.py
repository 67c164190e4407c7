"""Gradients of torch's DistributedDataParallel by way of a server: `state` and `hook`."""

# Without `from __future__ import annotations`: DistributedDataParallel looks at those of a hook, and takes no texts.

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from torch_ucx_rpc._arguments import check_type
from torch_ucx_rpc.reduction._messages import Answer
from torch_ucx_rpc.reduction._plan import Part, cut, plan
from torch_ucx_rpc.reduction._pushes import push, tensors_of
from torch_ucx_rpc.reduction._results import results
from torch_ucx_rpc.reduction._server import Server


def push_bucket(
    server: Server, prefix: str, buffer: Tensor, parts: Sequence[Part], quorum: int | None
) -> list[tuple[Part, Future[Answer]]]:
    """Push the parts of a flat tensor."""
    return [
        (part, push(server, f"{prefix}/{index}", part.shard, [buffer[part.start : part.stop]], quorum))
        for index, part in enumerate(parts)
    ]


class State:
    """What `state` returns: of one model, and one trainer."""

    def __init__(self, server: Server, quorum: int | None) -> None:
        self.server = server
        self.quorum = quorum
        self._name = server.name_for("ddp", self)
        self._loads = [0] * server.spec.shards
        # DistributedDataParallel makes other buckets after the first step, and says nothing of those to come. So the
        # buckets of the first two steps are cut as they come. The third and all later ones have those of the second.
        self._step = 0
        self._sizes: list[tuple[int, int]] = []
        self._planned_sizes: list[tuple[int, int]] = []
        self._planned_in = 0
        self._plan: list[list[Part]] = []

    @property
    def has_joined(self) -> bool:
        """Whether this trainer has the model's state: DistributedDataParallel sees to that."""
        return True

    def on_leave(self) -> None:
        """Nothing: no other trainer asks this one for anything."""

    def on_other_host(self, host: str) -> None:
        """Nothing, likewise."""

    def push(self, bucket: GradBucket) -> Future[Tensor]:
        """Push a bucket of DDP's gradients: the future of its mean over the trainers."""
        buffer: Tensor = bucket.buffer()
        size = (buffer.numel(), buffer.element_size())
        index = bucket.index()
        if self._plan and self._planned_sizes[index : index + 1] != [size]:
            # DistributedDataParallel has made other buckets once more.
            self._plan = []
        parts = self._plan[index] if self._plan else cut(*size, self._loads)
        # Names say by which step the buckets were made, so that a late trainer, which is in another step than the
        # others, pushes to the rounds of the same buckets.
        layout = f"from_step{self._planned_in}" if self._plan else f"step{self._step}"
        name = f"{self._name}/{layout}/{index}"
        self._sizes.append(size)
        if bucket.is_last():
            self._end_step()
        pushes = push_bucket(self.server, name, buffer.detach(), parts, self.quorum)

        def join(_: Any) -> Tensor:
            for part, pushed in pushes:
                if len(pushes) == 1 and not pushed.value().is_shared:
                    return tensors_of(pushed)[0]
                buffer[part.start : part.stop].copy_(tensors_of(pushed)[0])
            return buffer

        return torch.futures.collect_all([pushed for _, pushed in pushes]).then(join)

    def _end_step(self) -> None:
        if not self._plan and self._step > 0:
            self._plan, self._planned_sizes = plan(self._sizes, self.server.spec.shards), self._sizes
            self._planned_in = self._step
        if self._step == 3 and self.quorum is None:
            # The third step is over, so all have the results of the first two: nobody will ask for them.
            for layout in ("step0", "step1"):
                results().drop(self.server.name, f"{self._name}/{layout}")
        self._step += 1
        self._loads = [0] * len(self._loads)
        self._sizes = []


def state(server: Server, quorum: int | None = None, process_group: dist.ProcessGroup | None = None) -> State:
    """What `hook` needs of a server, for one model.

    The first step waits for all ranks of the process group, whatever `serve` has been told.

    Args:
        server (Server): of `serve`.
        quorum (int): a step is complete with that many trainers, and the gradients are the mean of theirs. Those of
            late ones are dropped, and they get the sum of what they have missed. (default: all that are there)
        process_group: DistributedDataParallel's (default: the default group).

    Raises ValueError for a quorum above the number of trainers.

    Example::

        >>> ddp.register_comm_hook(reduction.state(server, quorum=3), reduction.hook)
    """
    check_type("server", Server, "what reduction.serve returns", server)
    if process_group is not None:
        check_type("process_group", dist.ProcessGroup, "DistributedDataParallel's process group", process_group)
    in_group = dist.is_available() and dist.is_initialized()
    if in_group:
        ranks = dist.get_world_size(process_group)
        if quorum is not None and quorum > ranks:
            raise ValueError(
                f"quorum={quorum} can never be reached: the process group has {ranks} trainers; give at most that many"
            )
        server.expect(ranks)
    server.check_quorum(quorum)
    # First of all a user of the server: whoever lets go of an earlier model from now on does not leave.
    made = State(server, quorum)
    if in_group:
        server.take_part()
        # A server that has begun waits for those that take part, so that all do before the first one pushes.
        dist.barrier(process_group)
    return made


def hook(state: State, bucket: GradBucket) -> Future[Tensor]:
    """A communication hook of DistributedDataParallel that averages gradients by way of a server.

    torch's compression can go on top, as ``default_hooks.fp16_compress_wrapper(reduction.hook)``: then half the bytes
    travel, and sums are made of halves. A hook on top should make a new tensor and not write to the result: other
    trainers ask this one for it when a host is lost in the middle of a step.
    """
    expected = "what reduction.state returns, as in ddp.register_comm_hook(reduction.state(server), reduction.hook)"
    check_type("state", State, expected, state)
    check_type("bucket", GradBucket, "a GradBucket of DistributedDataParallel", bucket)
    return state.push(bucket)
