"""A push until its answer is here, through the ends of hosts: `push`."""

# mypy: allow-untyped-calls

from __future__ import annotations

import logging
import threading
from typing import Any

import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from torch_ucx_rpc._workers.futures import fail
from torch_ucx_rpc._workers.lost import timed_out, was_lost
from torch_ucx_rpc.reduction import _hosts
from torch_ucx_rpc.reduction._loopback import Lent, lend, push_lent
from torch_ucx_rpc.reduction._messages import ASKING_S, LEFT, UNKNOWN, Answer, Push
from torch_ucx_rpc.reduction._results import results
from torch_ucx_rpc.reduction._server import Server

_logger = logging.getLogger(__name__)


def push(server: Server, piece: str, shard: int, tensors: list[Tensor], quorum: int | None) -> Future[Answer]:
    """Push a piece to the host of a shard: the answer, whose refusal is an exception of the future instead."""
    return _Pending(server, shard, server.next_push(piece, shard, tensors, quorum)).future


def has_failed(push: Future[Answer]) -> bool:
    """Whether a push has no result; waits until that is known."""
    try:
        push.wait()
    except Exception:
        return True
    return False


def tensors_of(push: Future[Answer]) -> list[Tensor]:
    """The result of a push that is done."""
    tensors = push.value().tensors
    assert tensors is not None
    return tensors


class IsBehind(ValueError):
    """A trainer has missed rounds, and nobody knows their results."""


class _Pending:
    """A push that has no answer yet. One thread at a time has it: the one that sends, or that of the answer."""

    def __init__(self, server: Server, shard: int, push: Push) -> None:
        self._server = server
        self._shard = shard
        self._push = push
        self._lent: Lent | None = None
        # Of this life of the worker, which may end before the push.
        self._results = results()
        self.future: Future[Any] = Future(devices=server.life.devices)
        name = server.ring.host_of(shard)
        if name is None:
            self._recover()
        else:
            self._send(name)

    def _send(self, name: str) -> None:
        self._results.expect(self._server.name, self._push.piece, self._push.at, name)
        try:
            self._lent = lend(self._push) if self._may_lend(name) else None
            if self._lent is not None:
                call = rpc.rpc_async(name, push_lent, args=(self._lent.number,))
            else:
                # Whether a call to oneself copies is up to the backend: the tensors may be the user's.
                is_copied = name != self._server.trainer.name
                call = rpc.rpc_async(name, _hosts.push, args=(self._push, is_copied))
        except RuntimeError as error:
            self._fail(name, error)
            return
        call.add_done_callback(lambda done: self._on_done(name, done))

    def _may_lend(self, name: str) -> bool:
        # A call knows the streams of a device. An asynchronous server may send gradients to its replica for longer.
        return (
            name == self._server.trainer.name
            and not self._server.spec.asynchronous
            and all(tensor.device.type == "cpu" for tensor in self._push.tensors)
        )

    def _on_done(self, name: str, done: Future[Any]) -> None:
        try:
            answer: Answer = done.value() if self._lent is None else self._lent.end(done)
        except RuntimeError as error:
            self._fail(name, error)
            return
        if answer.refusal is None:
            self._server.accept(self._push, answer)
        self._settle()
        if answer.refusal == LEFT:
            self._server.ring.lose(name)
            self._recover()
        elif answer.refusal == UNKNOWN:
            self._recover()
        elif answer.refusal is not None:
            self._reject(IsBehind(answer.refusal) if answer.is_behind else ValueError(answer.refusal))
        else:
            self._server.end_push(self._push)
            self.future.set_result(answer)

    def _reject(self, error: Exception) -> None:
        self._server.end_push(self._push)
        fail(self.future, error)

    def _settle(self) -> None:
        self._results.settle(self._server.name, self._push.piece)

    def _fail(self, name: str, error: RuntimeError) -> None:
        self._settle()
        if was_lost(error):
            _logger.info("%s: %s was lost with a push of %s", self._server.trainer, name, self._push.piece)
            self._server.ring.lose(name)
            self._recover()
        elif timed_out(error):
            threading.Thread(target=self._explain, args=(name, error), daemon=True).start()
        else:
            self._reject(error)

    def _recover(self) -> None:
        # Not here: this may be a thread of the agent, and it may take a while.
        threading.Thread(target=self._push_again, daemon=True).start()

    def _push_again(self) -> None:
        try:
            name = self._server.ring.find(self._shard)
        except Exception as error:
            self._reject(error)
            return
        self._push = self._push._replace(key=self._server.spec.key, is_repeated=True)
        self._send(name)

    def _explain(self, name: str, error: RuntimeError) -> None:
        try:
            if self._lent is not None:
                self._lent.take_back()
            arguments = (self._push.key, self._push.piece)
            missing = rpc.rpc_sync(name, _hosts.absent, args=arguments, timeout=ASKING_S)
        except RuntimeError:
            missing = None
        if missing is None:
            waited = f"its host {name!r} does not answer: it hangs, or its network is cut or slow"
        elif missing:
            waited = (
                f"it waited for {', '.join(missing)}. Where some need not come, serve(..., trainers=N) says how many "
                f"do, and quorum=N lets a step go on without the slow"
            )
        else:
            waited = "no trainer is missing"
        failure = RuntimeError(f"a step of {self._server!r} was not completed: {waited} ({error})")
        failure.__cause__ = error
        self._reject(failure)
