"""`DataParallel`: a model that several trainers train, without a process group."""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from torch_ucx_rpc._arguments import check_count, check_type
from torch_ucx_rpc.reduction._copy import ModelCopy
from torch_ucx_rpc.reduction._server import Server


class _Bucket:
    """Gradients that travel together, in one flat tensor. Its last elements tell for which parameters the trainer has a
    gradient: optimizers skip a parameter without one, and not one with a gradient of zero."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        ends = [*itertools.accumulate((p.numel() for p in parameters), initial=0)]
        self.buffer = torch.zeros(ends[-1] + len(parameters), dtype=first.dtype, device=first.device)
        self.spans = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
        self.presence = slice(ends[-1], None)
        self.filled: set[int] = set()

    @property
    def is_full(self) -> bool:
        return len(self.filled) == len(self.parameters)

    def fill(self, index: int, gradient: Tensor) -> None:
        self.buffer[self.spans[index]].view_as(gradient).copy_(gradient.detach())
        self.filled.add(index)

    def close(self) -> None:
        """Complete the tensor: there are no more gradients."""
        presence = self.buffer[self.presence].fill_(1)
        for index in {*range(len(self.parameters))} - self.filled:
            self.buffer[self.spans[index]].zero_()
            presence[index] = 0

    def take(self, result: Tensor, is_late: bool) -> None:
        """Give the means to the parameters. ``is_late`` tells that they leave out this trainer's gradients."""
        # Without a need, do not wait for a GPU.
        present = result[self.presence].tolist() if is_late or not self.is_full else None
        for index, parameter in enumerate(self.parameters):
            mean = result[self.spans[index]].view_as(parameter)
            if present is not None and not present[index]:
                parameter.grad = None
            elif parameter.grad is not None and index in self.filled and not parameter.grad.requires_grad:
                parameter.grad.copy_(mean)
            else:
                # There was no gradient, or it belongs to a graph, of backward(create_graph=True).
                parameter.grad = mean.clone()
        self.filled.clear()


class DataParallel(nn.Module):
    """A copy of a model that stays equal to the copies of other trainers. Trainers may come and go, and may be killed.

    Each trainer wraps its model and goes on as with one process. Within ``backward()`` the server averages the
    gradients of all trainers, bucket by bucket, while the backward computes the rest. After ``backward()``,
    ``parameter.grad`` has the mean.

    The first trainers begin with the parameters and buffers of the one with the lowest rank. A later trainer gets the
    model of another trainer, and takes part from its next step on. It also gets the optimizer's state if both trainers
    give their optimizer, but not that of schedulers and scalers. From then on each trainer has its own buffers (such as
    running means).

    Each ``backward()`` is a step, between which trainers join. So accumulate gradients within `no_sync`, and give
    activation checkpoints ``use_reentrant=False``.

    Making the object waits for the trainers that the first step waits for (see `serve`), or for the state of another
    trainer. If the others have closed a step without this trainer, it takes the state of another trainer within its
    next ``backward()``.

    Args:
        module (nn.Module): model, of which at least one parameter requires grad.
        server (Server): result of `serve`.
        optimizer (torch.optim.Optimizer): this trainer's optimizer (default: None). Its state goes to trainers that
            join or come late.
        quorum (int): a step is complete with that many trainers, and the mean leaves out gradients of late trainers
            (default: None, all present trainers). With a quorum, nothing travels before a step's trainers are known.
        bucket_bytes (int): size of the gradients that travel together, in bytes (default: 25 MiB). A larger parameter
            travels alone.

    Raises ValueError for a quorum above the number of trainers, or another one than the other trainers', and for a
    module without parameters that require grad. ``backward()`` raises ValueError for sparse gradients. Both raise
    ValueError for a model unlike the other trainers', and RuntimeError as `push_pull` does, but not for a late trainer.

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
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        parameters = [*trained.values()]
        copy = ModelCopy(module, optimizer, trained=[*trained])
        check_count("bucket_bytes", 1, "a number of bytes", bucket_bytes)
        if not parameters:
            raise ValueError("DataParallel has nothing to do: no parameter of the module requires grad")
        server.check_quorum(quorum)
        self.module = module
        self._buckets = _make_buckets(parameters, bucket_bytes)
        # Of each parameter, the indices of its bucket and in the bucket.
        self._places = {
            parameter: (place, index)
            for place, bucket in enumerate(self._buckets)
            for index, parameter in enumerate(bucket.parameters)
        }
        self._next_bucket = 0
        # The end of the running backward. torch has it, and frees it uncalled when that backward fails.
        self._end: Callable[[], Callable[[], None] | None] | None = None
        self._is_synchronizing = True
        # Some gradients come in parts, so no bucket is complete before the end of the backward.
        self._waits_for_parts = False
        # The parameters do not keep this object alive: when it is collected, this trainer leaves.
        own = weakref.ref(self)

        def on_gradient(parameter: Tensor) -> None:
            if (model := own()) is not None:
                model._on_gradient(parameter)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(on_gradient)
        sizes = [(bucket.buffer.numel(), bucket.buffer.element_size()) for bucket in self._buckets]
        self._steps = server.begin("model", self, quorum=quorum, copy=copy, sizes=sizes)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's forward; in grad mode, its backward will push the gradients."""
        if torch.is_grad_enabled() and self._is_synchronizing:
            self._drop_a_failed_backward()
            self._steps.begin_step()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally within this context; the next ``backward()`` outside averages their sums."""
        before, self._is_synchronizing = self._is_synchronizing, False
        try:
            yield
        finally:
            self._is_synchronizing = before

    # -- one backward

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._is_synchronizing:
            return
        self._drop_a_failed_backward()
        if self._end is None:
            end = self._on_end_of_backward
            self._end = weakref.ref(end)
            Variable._execution_engine.queue_callback(end)
            del end  # a traceback would keep it
        assert isinstance(parameter, nn.Parameter)
        place, index = self._places[parameter]
        bucket = self._buckets[place]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise ValueError(
                "DataParallel cannot average sparse gradients, such as nn.Embedding(sparse=True) makes: use dense ones"
            )
        if place < self._next_bucket:
            # Reentrant checkpoints of torch run backwards of their own. Each adds its part to the gradient.
            self._waits_for_parts = True
            self._next_bucket = 0
            self._steps.drop()
        bucket.fill(index, gradient)
        if self._waits_for_parts:
            return
        # All trainers put the buckets in this order.
        while self._next_bucket < len(self._buckets) - 1 and self._buckets[self._next_bucket].is_full:
            self._put()

    def _put(self) -> None:
        bucket = self._buckets[self._next_bucket]
        self._next_bucket += 1
        bucket.close()
        self._steps.put([bucket.buffer])

    def _on_end_of_backward(self) -> None:
        try:
            while self._next_bucket < len(self._buckets):
                bucket = self._buckets[self._next_bucket]
                # This backward has not reached some parameters. They may have a gradient of an earlier one, or one on
                # other trainers.
                for index, parameter in enumerate(bucket.parameters):
                    if index not in bucket.filled and parameter.grad is not None:
                        bucket.fill(index, parameter.grad)
                self._put()
            results = self._steps.finish()
            is_late = self._steps.is_late
            with torch.no_grad():
                for bucket, [result] in zip(self._buckets, results, strict=True):
                    bucket.take(result, is_late)
        finally:
            self._end_backward()

    def _drop_a_failed_backward(self) -> None:
        """If the last backward has failed, give up its step. This one puts the gradients again."""
        if self._end is not None and self._end() is None:
            self._end_backward()
            self._steps.drop()

    def _end_backward(self) -> None:
        self._end = None
        self._next_bucket = 0
        for bucket in self._buckets:
            bucket.filled.clear()


def _make_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Buckets follow the order in which gradients come: from the last parameter on."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        nbytes = parameter.numel() * parameter.element_size()
        last = buckets[-1][0] if buckets else None
        is_alike = last is not None and last.dtype == parameter.dtype and last.device == parameter.device
        if not is_alike or size + nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += nbytes
    return [_Bucket(bucket) for bucket in buckets]
