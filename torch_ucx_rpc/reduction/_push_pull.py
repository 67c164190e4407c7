"""`push_pull`: gradients pushed and results pulled by hand."""

# mypy: allow-untyped-calls

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.futures import Future

from torch_ucx_rpc._arguments import check_type, got, wrong_type
from torch_ucx_rpc._workers.futures import fail
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
    check_type("server", Server, "what reduction.serve returns", server)
    is_one = isinstance(gradients, Tensor)
    if not is_one and not isinstance(gradients, Iterable):
        raise wrong_type("gradients", "a tensor, or several as a list", gradients)
    tensors = [gradients] if is_one else list(gradients)
    if not tensors:
        raise ValueError(f"gradients must be those of all parameters; {got(gradients)}")
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
    return _Step(server, tensors, quorum, is_one).future


class _Step:
    """One step of `push_pull`, until the hosts of all shards have answered it in the same round."""

    def __init__(self, server: Server, tensors: list[Tensor], quorum: int | None, is_one: bool) -> None:
        self._server = server
        self._tensors = tensors
        self._quorum = quorum
        self._is_one = is_one
        self._shards = server.assign(tensors)
        self._pushes: dict[int, Future[Answer]] = {}
        # By shard, means of rounds before the last one. One that joins has no part in them.
        self._earlier: dict[int, list[list[Tensor]]] = {}
        self._adds_up = server.spec.optimizer is None and self._piece(self._shards[0]) in server.positions
        self._lock = threading.Lock()
        self._open = 0
        self.future: Future[Any] = Future(devices=server.life.devices)
        self._push(sorted(set(self._shards)))

    def _piece(self, shard: int) -> str:
        return f"{'tensors' if self._server.spec.optimizer is None else 'parameters'}/{shard}"

    def _of(self, shard: int) -> list[int]:
        return [index for index, of in enumerate(self._shards) if of == shard]

    def _push(self, shards: list[int]) -> None:
        self._open = len(shards)
        for shard in shards:
            mine = [self._tensors[index].detach() for index in self._of(shard)]
            self._pushes[shard] = push(self._server, self._piece(shard), shard, mine, self._quorum)
        for shard in shards:
            self._pushes[shard].add_done_callback(self._count)

    def _count(self, _: Any) -> None:
        with self._lock:
            self._open -= 1
            if self._open:
                return
        try:
            failed = sum(map(has_failed, self._pushes.values()))
            # An asynchronous server knows of no steps.
            self._server.is_pushed_in_part = 0 < failed < len(self._pushes) and not self._server.spec.asynchronous
            if not failed and (behind := self._behind()):
                for shard in behind if self._adds_up else ():
                    self._earlier.setdefault(shard, []).append(tensors_of(self._pushes[shard]))
                self._push(behind)
                return
            results = self._results()
        except Exception as error:
            fail(self.future, error)
        else:
            self.future.set_result(results[0] if self._is_one else results)

    def _behind(self) -> list[int]:
        """The shards in which this trainer is a round behind that of other shards.

        It has come, or come late, when others had pushed to some hosts and not yet to all.
        """
        if self._server.spec.asynchronous:
            return []
        rounds = {shard: self._server.positions[self._piece(shard)] for shard in self._pushes}
        return [shard for shard, round_ in rounds.items() if round_ < max(rounds.values())]

    def _results(self) -> list[Any]:
        results: list[Any] = [None] * len(self._tensors)
        for shard, pushed in self._pushes.items():
            rounds = [tensors_of(pushed), *self._earlier.get(shard, ())]
            for index, tensors in zip(self._of(shard), zip(*rounds, strict=True), strict=True):
                # Others may be sent them still, or keep them.
                results[index] = tensors[0].clone()
                for earlier in tensors[1:]:
                    results[index] += earlier
        self._server.keep_shapes(self._tensors)
        return results
