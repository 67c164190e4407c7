"""`push_pull`: a program pushes gradients and pulls results by hand."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.futures import Future

from torch_ucx_rpc._arguments import check_type, got, wrong_type
from torch_ucx_rpc._threads import Thread
from torch_ucx_rpc._workers.futures import fail
from torch_ucx_rpc.reduction._messages import NEVER
from torch_ucx_rpc.reduction._plan import spread
from torch_ucx_rpc.reduction._server import Server
from torch_ucx_rpc.reduction._steps import Steps


@overload
def push_pull(server: Server, gradients: Tensor, *, quorum: int | None = None) -> Tensor: ...
@overload
def push_pull(server: Server, gradients: Iterable[Tensor], *, quorum: int | None = None) -> list[Tensor]: ...
def push_pull(server: Server, gradients: Any, *, quorum: int | None = None) -> Any:
    """Push gradients, and return the server's results as new tensors of the same shapes.

    Without an optimizer on the server, the results are the means of all trainers' gradients, in the gradients' dtype.
    With an optimizer, they are the new parameters.

    Args:
        server (Server): result of `serve`.
        gradients (Tensor or list): gradients of all parameters, in the same order each time; or one tensor.
        quorum (int): a step is complete with that many trainers, and the result is the mean of their gradients.
            All trainers must give the same quorum, each time (default: None, all present trainers).

    Raises TypeError for gradients that are neither floating point nor complex. Raises ValueError for sparse gradients,
    for other shapes than those of the server, for a quorum above the number of trainers, and for another quorum than
    before, or than the other trainers'.

    Raises RuntimeError if a step is not completed within ``rpc_timeout``, and names the missing trainers. Raises it
    also if all hosts are lost, if a lost host had the only copy of parameters, if an earlier push to the server has not
    been answered, or if this trainer has left.

    A trainer is late if the others have closed its step without it. Without an optimizer on the server, a late push
    raises RuntimeError. With an optimizer, its gradients are dropped, and the results are the parameters after the
    present step. With an optimizer and a quorum, its gradients count in the present step.

    Example::

        >>> means = reduction.push_pull(server, [p.grad for p in model.parameters()])
    """
    return push_pull_async(server, gradients, quorum=quorum).wait()


def push_pull_async(server: Server, gradients: Any, *, quorum: int | None = None) -> Future[Any]:
    """Do `push_pull`, with its arguments, without waiting. Returns a future of its result.

    Do not write to the gradients before the future is done.

    Errors of arguments, of a server that this trainer has left, and of an unanswered earlier push are raised at once.
    The future raises all other errors.
    """
    check_type("server", Server, "what reduction.serve returns", server)
    is_one = isinstance(gradients, Tensor)
    if not is_one and not isinstance(gradients, Iterable):
        raise wrong_type("gradients", "a tensor, or several as a list", gradients)
    tensors = [gradients] if is_one else list(gradients)
    if not tensors:
        raise ValueError(f"gradients must be those of all parameters; {got(gradients)}")
    _check(tensors)
    server.check_quorum(quorum)
    server.check()
    server.check_shapes(tensors)
    if server.by_hand is None:
        keeps = server.spec.optimizer is not None
        server.by_hand = server.make_by_hand("parameters" if keeps else "tensors", keeps=keeps, is_cut=False)
    steps = server.by_hand
    if steps.is_busy:
        raise RuntimeError(
            f"the earlier push to {server!r} has not been answered: wait for it before the next one, or push to "
            f"another server, of reduction.serve(..., name=...)"
        )
    if steps.standing.step == NEVER:
        steps.quorum = quorum
    elif quorum != steps.quorum:
        raise ValueError(
            f"this trainer gives quorum={quorum} for {server.name!r}, and gave quorum={steps.quorum} before: give the "
            f"same each time"
        )
    # A host adds to the tensors of one trainer. With its own, it cannot if elements share memory, as after `expand`.
    steps.put([tensor.detach().contiguous() for tensor in tensors])
    future: Future[Any] = Future(devices=server.office.life.devices)
    Thread(_finish, (server, steps, tensors, is_one, future), name="torch_ucx_rpc-step").start()
    return future


def _finish(server: Server, steps: Steps, tensors: list[Tensor], is_one: bool, future: Future[Any]) -> None:
    try:
        [results] = steps.finish()
        if server.spec.optimizer is not None:
            of = spread([tensor.numel() for tensor in tensors], len(server.hosts))
            values = steps.values_of({*of}, steps.standing.step)
            parameters = {shard: iter(its.parameters) for shard, its in values.items()}
            results = [next(parameters[shard]) for shard in of]
        server.shapes = [tuple(tensor.shape) for tensor in tensors]
    except Exception as error:
        fail(future, error)
    else:
        future.set_result(results[0] if is_one else results)


def _check(tensors: list[Any]) -> None:
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise wrong_type(
                "gradients", f"tensors, with zeros where a parameter has none; number {index} is not", tensor
            )
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(f"gradients must be floating point numbers; number {index} is {tensor.dtype}")
        if tensor.layout != torch.strided:
            raise ValueError(f"gradients must be dense; number {index} is {tensor.layout}: give tensor.to_dense()")
