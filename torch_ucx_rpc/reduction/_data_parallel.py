"""`DataParallel`: a model that several trainers train, without a process group."""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from torch_ucx_rpc._arguments import check_count, check_type
from torch_ucx_rpc._workers.lost import timed_out
from torch_ucx_rpc.reduction._buckets import Bucket, make_buckets
from torch_ucx_rpc.reduction._copy import Copy
from torch_ucx_rpc.reduction._ddp import push_bucket
from torch_ucx_rpc.reduction._plan import plan
from torch_ucx_rpc.reduction._pushes import IsBehind, has_failed, tensors_of
from torch_ucx_rpc.reduction._server import Server

# torch's number for "none".
_NO_BACKWARD = -1


class DataParallel(nn.Module):
    """A copy of a model that is kept equal to those of other trainers: they may come and go, and may be killed.

    Each trainer wraps its model and goes on as with one process. Within ``backward()`` the gradients of all trainers
    are averaged, bucket by bucket while the rest is being computed; when it returns, ``parameter.grad`` has the mean.

    The first trainers begin with the parameters and buffers of the one with the lowest rank. One that comes later gets
    those of a trainer at its next ``forward``, and takes part from that step on; the optimizer's state too where both
    give their optimizer. Buffers (such as running means) are each trainer's own from then on.

    Args:
        module (nn.Module): whose parameters require grad, at least one.
        server (Server): of `serve`.
        optimizer (torch.optim.Optimizer): this trainer's. It is given to trainers that join, and replaced in one that
            has missed a step (``quorum``); without it, a late trainer gets the sum of the gradients that it has missed.
        quorum (int): see `state`.
        bucket_bytes (int): how much travels together. (default: 25 MiB)

    Raises ValueError for a quorum above the number of trainers, and for sparse gradients.

    Example::

        >>> model = reduction.DataParallel(model, reduction.serve("ps0"))
        >>> loss_of(model(x)).backward(); optimizer.step()
    """

    def __init__(
        self,
        module: nn.Module,
        server: Server,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        quorum: int | None = None,
        bucket_bytes: int = 25 << 20,
    ) -> None:
        super().__init__()
        check_type("module", nn.Module, "an nn.Module", module)
        check_type("server", Server, "what reduction.serve returns", server)
        if optimizer is not None:
            check_type("optimizer", torch.optim.Optimizer, "this trainer's torch.optim.Optimizer", optimizer)
        check_count("bucket_bytes", 1, "a number of bytes", bucket_bytes)
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError("DataParallel has nothing to do: no parameter of the module requires grad")
        server.check_quorum(quorum)
        self.module = module
        self._server = server
        self._quorum = quorum
        self._copy = Copy(module, optimizer, server)
        self._buckets = make_buckets(parameters, bucket_bytes)
        sizes = [(bucket.buffer.numel(), bucket.buffer.element_size()) for bucket in self._buckets]
        for bucket, parts in zip(self._buckets, plan(sizes, server.spec.shards), strict=True):
            bucket.parts = parts
        self._places = {p: (bucket, index) for bucket in self._buckets for index, p in enumerate(bucket.parameters)}
        self._next_bucket = 0
        self._is_in_backward = False
        self._is_synchronizing = True
        # The last step has the mean of some buckets, and not of all.
        self._is_partly_averaged = False
        # The parameters do not keep this object alive: when it is gone, this trainer has left.
        own = weakref.ref(self)

        def on_gradient(parameter: Tensor) -> None:
            if (model := own()) is not None:
                model._on_gradient(parameter)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(on_gradient)
        self._copy.begin()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the module that this holds; with gradients, its backward will push them."""
        if torch.is_grad_enabled() and self._is_synchronizing:
            self._check_backward()
            self._copy.begin_step()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients are only accumulated here; the next ``backward()`` outside averages their sums."""
        before, self._is_synchronizing = self._is_synchronizing, False
        try:
            yield
        finally:
            self._is_synchronizing = before

    # -- one backward

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._is_synchronizing:
            return
        if not self._is_in_backward:
            self._is_in_backward = True
            Variable._execution_engine.queue_callback(self._on_end_of_backward)
        assert isinstance(parameter, nn.Parameter)
        bucket, index = self._places[parameter]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise ValueError(
                "DataParallel cannot average sparse gradients, as those of nn.Embedding(sparse=True); leave that out"
            )
        bucket.views[index].copy_(gradient)
        bucket.filled.add(index)
        # In their order, in all trainers: a server of its own sums them as they come.
        while self._next_bucket < len(self._buckets) and len((head := self._buckets[self._next_bucket]).filled) == len(
            head.parameters
        ):
            self._push(head)

    def _check_backward(self) -> None:
        """RuntimeError after a backward that has not come to its end: torch calls nobody back then."""
        # A checkpointed module goes forward once more within the backward.
        has_been_cut_short = self._is_in_backward and torch._C._current_graph_task_id() == _NO_BACKWARD
        if has_been_cut_short or self._is_partly_averaged:
            raise RuntimeError(
                f"a backward of {self._server.trainer} has failed, so that it has pushed or averaged a part of its "
                f"gradients, or none: the others have another state by now, or wait. Begin anew: server.leave(), "
                f"reduction.serve and a new DataParallel, which gets the state of the others"
            )

    def _push(self, bucket: Bucket) -> None:
        index = self._next_bucket
        self._next_bucket += 1
        bucket.pushes = push_bucket(
            self._server, f"{self._copy.name}/{index}", bucket.buffer, bucket.parts, self._quorum
        )

    def _on_end_of_backward(self) -> None:
        try:
            while self._next_bucket < len(self._buckets):
                bucket = self._buckets[self._next_bucket]
                # Without a gradient here; others may have one.
                for index, view in enumerate(bucket.views):
                    if index not in bucket.filled:
                        view.zero_()
                self._push(bucket)
            for bucket in self._buckets:
                self._take(bucket)
        except BaseException as error:
            pushes = [push for bucket in self._buckets for _, push in bucket.pushes]
            # All have the same time. If none was answered in it, all can be pushed again.
            is_late = error.__cause__ is not None and timed_out(error.__cause__)
            self._is_partly_averaged = not all((is_late or push.done()) and has_failed(push) for push in pushes)
            raise
        finally:
            self._is_in_backward = False
            self._copy.end_step()
            self._next_bucket = 0
            for bucket in self._buckets:
                bucket.filled.clear()
                bucket.pushes = []

    def _take(self, bucket: Bucket) -> None:
        targets = bucket.targets()
        for part, push in bucket.pushes:
            try:
                answer = push.wait()
            except IsBehind:
                if not self._copy.may_be_replaced:
                    raise
                self._copy.is_behind = True
                continue
            self._copy.is_behind |= answer.rounds != 1 and self._copy.may_be_replaced
            # The result may be others' too: it is only read.
            bucket.take(part, tensors_of(push)[0], targets)
        for index, (parameter, target) in enumerate(zip(bucket.parameters, targets, strict=True)):
            if parameter.grad is target:
                continue
            if parameter.grad is not None and index in bucket.filled:
                parameter.grad.copy_(target)
            elif bool(target.any()):
                parameter.grad = target.clone()
