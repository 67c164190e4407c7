"""`push_pull`: gradients pushed and results pulled by hand."""

# mypy: allow-untyped-calls

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.futures import Future

from torch_ucx_rpc._observe.futures import fail
from torch_ucx_rpc.reduction._messages import Answer
from torch_ucx_rpc.reduction._pushes import has_failed, push, tensors_of
from torch_ucx_rpc.reduction._server import Server


@overload
def push_pull(server: Server, gradients: Tensor, *, quorum: int | None = None) -> Tensor: ...
@overload
def push_pull(server: Server, gradients: Iterable[Tensor], *, quorum: int | None = None) -> list[Tensor]: ...
def push_pull(server: Server, gradients: Any, *, quorum: int | None = None) -> Any:
    """Push gradients and get back what the server makes of them, as tensors of their own.

    Without an optimizer on the server that is the mean of all trainers' gradients, with one it is the new parameters.
    An asynchronous server answers at once, a synchronous one when all trainers have pushed.

    Args:
        gradients: of all parameters, in the same order each time; or one tensor.
        quorum (int): a step is complete with that many trainers, and the mean is theirs; the gradients of those that
            come later are dropped. (default: all that are there)

    Raises TypeError for gradients that are no floating point numbers; ValueError for sparse ones, for those of another
    shape than the server's, and for a quorum above the number of trainers; RuntimeError if a step is not completed
    within ``rpc_timeout``, saying who was missing, if all hosts are lost, or if the former step was completed by some
    of the hosts and not by others.

    Example::

        >>> means = reduction.push_pull(server, [p.grad for p in model.parameters()])
    """
    return push_pull_async(server, gradients, quorum=quorum).wait()


def push_pull_async(server: Server, gradients: Any, *, quorum: int | None = None) -> Future[Any]:
    """The same without waiting: a future. The gradients must not be written to before it is done."""
    if not isinstance(server, Server):
        raise TypeError(f"push_pull takes what reduction.serve returns; {server!r} is something else")
    is_one = isinstance(gradients, Tensor)
    if not is_one and not isinstance(gradients, Iterable):
        raise TypeError(f"push_pull takes a tensor, or several as a list; {gradients!r} is neither")
    tensors = [gradients] if is_one else list(gradients)
    if not tensors:
        raise ValueError("push_pull has nothing to push: gradients is empty; give those of all parameters")
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"gradients are tensors, and number {index} is {tensor!r}; give zeros where a parameter has none"
            )
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(
                f"gradients are floating point numbers, of which a mean can be made; number {index} is {tensor.dtype}"
            )
        if tensor.layout != torch.strided:
            raise ValueError(
                f"push_pull takes dense tensors, and number {index} is {tensor.layout}: give tensor.to_dense()"
            )
    server.check_quorum(quorum)
    if server.is_pushed_in_part:
        raise RuntimeError(
            f"the former push_pull of {server.trainer} has failed at some hosts of {server!r}, and was done by others: "
            f"the gradients of this step would go to different steps there. Begin anew, with server.leave() and "
            f"reduction.serve"
        )
    shards = server.assign(tensors)
    pushes = []
    for shard in sorted(set(shards)):
        mine = [tensor.detach() for tensor, of in zip(tensors, shards, strict=True) if of == shard]
        piece = f"{'tensors' if server.spec.optimizer is None else 'parameters'}/{shard}"
        pushes.append((shard, push(server, piece, shard, mine, quorum)))

    def join() -> Any:
        failed = sum(has_failed(pushed) for _, pushed in pushes)
        # An asynchronous server knows of no steps.
        server.is_pushed_in_part = 0 < failed < len(pushes) and not server.spec.asynchronous
        results: list[Tensor | None] = [None] * len(tensors)
        for shard, pushed in pushes:
            indices = [index for index, of in enumerate(shards) if of == shard]
            for index, tensor in zip(indices, tensors_of(pushed), strict=True):
                # Others may be sent it still, or keep it.
                results[index] = tensor.clone()
        server.keep_shapes(tensors)
        return results[0] if is_one else results

    return _when_all_are_done([pushed for _, pushed in pushes], join, server.life.devices)


def _when_all_are_done(futures: list[Future[Answer]], result: Callable[[], Any], devices: Any) -> Future[Any]:
    """A future of what ``result`` returns or raises. (Of what is raised in `then`, torch makes a RuntimeError.)"""
    joined: Future[Any] = Future(devices=devices)
    lock = threading.Lock()
    open_ = len(futures)

    def count(_: Any) -> None:
        nonlocal open_
        with lock:
            open_ -= 1
            if open_:
                return
        try:
            value = result()
        except Exception as error:
            fail(joined, error)
        else:
            joined.set_result(value)

    for future in futures:
        future.add_done_callback(count)
    return joined
