"""`DataParallel`: a model that several trainers train, without a process group."""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.autograd import Variable
from torch.futures import Future

from torch_ucx_rpc._observe.life import PerLife
from torch_ucx_rpc._observe.lost import timed_out, was_lost
from torch_ucx_rpc.reduction import _host
from torch_ucx_rpc.reduction._asking import Asking
from torch_ucx_rpc.reduction._buckets import Bucket, make_buckets
from torch_ucx_rpc.reduction._ddp import push_bucket
from torch_ucx_rpc.reduction._messages import Trainer
from torch_ucx_rpc.reduction._plan import plan
from torch_ucx_rpc.reduction._pushes import IsBehind, has_failed, tensors_of
from torch_ucx_rpc.reduction._server import Server

_logger = logging.getLogger(__name__)

# torch's number for "none".
_NO_BACKWARD = -1

# Until another trainer has made its model.
_PAUSE_S = 0.01


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
        if not isinstance(server, Server):
            raise TypeError(f"DataParallel takes what reduction.serve returns; {server!r} is something else")
        if not isinstance(module, nn.Module):
            raise TypeError(f"DataParallel takes an nn.Module; {module!r} is none")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be the torch.optim.Optimizer of this trainer; {optimizer!r} is none")
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be a number of bytes, 1 at least; it cannot be {bucket_bytes!r}")
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError("DataParallel has nothing to do: no parameter of the module requires grad")
        server.check_quorum(quorum)
        self.module = module
        self._server = server
        self._optimizer = optimizer
        self._quorum = quorum
        self._asking = Asking()
        self._can_give = False
        self._name = server.name_for("model", self, self._asking.refuse)
        self._buckets = make_buckets(parameters, bucket_bytes)
        sizes = [(bucket.buffer.numel(), bucket.buffer.element_size()) for bucket in self._buckets]
        for bucket, parts in zip(self._buckets, plan(sizes, server.spec.shards), strict=True):
            bucket.parts = parts
        self._places = {p: (bucket, index) for bucket in self._buckets for index, p in enumerate(bucket.parameters)}
        self._next_bucket = 0
        self._is_in_backward = False
        self._is_synchronizing = True
        self._has_begun = False
        # As it was before the first step, until that is over.
        self._initial: dict[str, Any] | None = None
        self._is_behind = False
        # Trainers that have been given the state at the beginning of this step.
        self._given: list[Trainer] = []
        # The last step has the mean of some buckets, and not of all.
        self._is_partly_averaged = False
        # The parameters do not keep this object alive: when it is gone, this trainer has left.
        own = weakref.ref(self)

        def on_gradient(parameter: Tensor) -> None:
            if (model := own()) is not None:
                model._on_gradient(parameter)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(on_gradient)
        _models()[self._key] = self
        self._begin()

    @property
    def has_joined(self) -> bool:
        """Whether this trainer has the state of the others, and can give it."""
        return self._can_give

    @property
    def _key(self) -> str:
        return f"{self._server.name}/{self._name}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the module that this holds; with gradients, its backward will push them."""
        if torch.is_grad_enabled() and self._is_synchronizing:
            self._check_backward()
            if self._is_behind:
                self._catch_up()
            self._has_begun = True
            self._give_to_those_asking()
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
        bucket.pushes = push_bucket(self._server, f"{self._name}/{index}", bucket.buffer, bucket.parts, self._quorum)

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
            self._initial = None
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
                if self._optimizer is None:
                    raise
                self._is_behind = True
                continue
            self._is_behind |= answer.rounds != 1 and self._optimizer is not None
            # The result may be others' too: it is only read.
            bucket.take(part, tensors_of(push)[0], targets)
        for index, (parameter, target) in enumerate(zip(bucket.parameters, targets, strict=True)):
            if parameter.grad is target:
                continue
            if parameter.grad is not None and index in bucket.filled:
                parameter.grad.copy_(target)
            elif bool(target.any()):
                parameter.grad = target.clone()

    # -- beginning, and giving to those who begin

    def _begin(self) -> None:
        """Begin together with the first trainers, or with the state of one that is further."""
        # The others of the first may come for it when this trainer is in its first step, which waits for them.
        self._initial = self._state()
        try:
            is_initial = self._take_over()
        except RuntimeError as error:
            if not timed_out(error):
                raise
            self._hold_no_more()
            raise RuntimeError(
                f"{self._server.trainer} cannot begin: the others, or a step of one of them, did not come within the "
                f"time of a call. serve(..., trainers=N) says how many there are at the start ({error})"
            ) from error
        self._initial = self._state() if is_initial else None
        self._hold()

    def _catch_up(self) -> None:
        """Take over the state of another trainer, after steps that this one has missed."""
        # Others that are behind must not wait for this one, while it waits for them. Nor may a host be told otherwise.
        self._can_give = False
        self._hold_no_more()
        self._asking.turn_away()
        try:
            self._take_over()
        except RuntimeError as error:
            if not timed_out(error):
                raise
            _logger.warning(
                "%s goes on with what it has: no other has begun a step meanwhile (%s)", self._server.trainer, error
            )
        finally:
            self._is_behind = False
        self._hold()

    def _take_over(self) -> bool:
        """Load the state of a trainer that is further, if there is one. Returns whether this one is of the first."""
        server = self._server
        while True:
            host = server.ring.find(0)
            try:
                donor, is_initial, is_leaving = server.ring.call(
                    host, _host.enter, server.spec.key, self._name, server.trainer
                )
                if is_leaving:
                    server.ring.lose(host)
                    continue
                if donor is None:
                    return bool(is_initial)
                state = rpc.rpc_sync(donor.name, _give, args=(self._key, server.trainer, is_initial))
            except RuntimeError as error:
                if not was_lost(error):
                    raise
                _logger.info("%s begins again: %s", server.trainer, error)
                continue
            if state is not None:
                self._load(state)
                return bool(is_initial)
            # That one has ended with the model, or has not made it yet.
            time.sleep(_PAUSE_S)

    def _hold(self) -> None:
        """Have the hosts know that this trainer can give its state to others."""
        self._can_give = True
        self._server.ring.call_all(_host.hold, self._server.spec.key, self._name, self._server.trainer)

    def _hold_no_more(self) -> None:
        """Have the hosts wait for this trainer no more, and give its state to nobody, until it has one again."""
        self._server.ring.call_all(_host.hold_no_more, self._server.spec.key, self._name, self._server.trainer)

    def on_other_host(self, host: str) -> None:
        """Likewise for a host that takes over from one that was lost; it waits for those, too, that have the state."""
        if self._can_give:
            key = self._server.spec.key
            try:
                self._server.ring.call(host, _host.hold, key, self._name, self._server.trainer)
                pieces = tuple(self._server.positions)
                for trainer in self._given:
                    self._server.ring.call(host, _host.admit, key, trainer, self._server.trainer, pieces, True)
            except RuntimeError as error:
                if not was_lost(error):
                    raise

    def _load(self, state: dict[str, Any]) -> None:
        own = dict(self.module.state_dict(keep_vars=True))
        theirs = state["module"]
        if {name: t.shape for name, t in own.items() if isinstance(t, Tensor)} != {
            name: t.shape for name, t in theirs.items() if isinstance(t, Tensor)
        }:
            raise ValueError("the trainers of a server must have the same model; this one's has other parameters")
        self.module.load_state_dict(theirs)
        if self._optimizer is not None and state["optimizer"] is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        self._server.positions.update(state["positions"])
        if not state["positions"]:
            # The first step goes on.
            self._server.first_round = 0

    def give(self, trainer: Trainer, is_initial: bool) -> Future[dict[str, Any] | None]:
        """This trainer's state at the beginning of a step, for another one: of the first step, if both are in that."""
        future: Future[dict[str, Any] | None] = Future(devices=self._server.life.devices)
        initial = self._initial if is_initial else None
        if self._is_behind:
            future.set_result(None)
        elif initial is None:
            self._asking.add(trainer, future)
        else:
            future.set_result(initial)
        return future

    def _give_to_those_asking(self) -> None:
        self._given = []
        server = self._server
        for request in self._asking.take():
            # From now on the others wait for it, this step included: it is not complete without this trainer.
            self._given.append(request.trainer)
            pieces = tuple(server.positions)
            server.ring.call_all(_host.admit, server.spec.key, request.trainer, server.trainer, pieces)
            request.state.set_result(self._state())

    def on_leave(self) -> None:
        """Nobody gets the state from here any more."""
        self._asking.refuse()

    def _state(self) -> dict[str, Any]:
        return {
            "module": {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in self.module.state_dict().items()
            },
            "optimizer": None if self._optimizer is None else _copied(self._optimizer.state_dict()),
            "positions": dict(self._server.positions),
        }


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


# Those of this worker, by key of the server and name.
_models: PerLife[weakref.WeakValueDictionary[str, DataParallel]] = PerLife(lambda life: weakref.WeakValueDictionary())


@rpc.functions.async_execution
def _give(key: str, trainer: Trainer, is_initial: bool) -> Future[dict[str, Any] | None]:
    model = _models().get(key)
    if model is None:
        # It has ended with the model, but not yet with RPC, or has not made it yet: another one is asked.
        nothing: Future[dict[str, Any] | None] = Future()
        nothing.set_result(None)
        return nothing
    return model.give(trainer, is_initial)
