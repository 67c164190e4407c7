"""A piece of a server with an optimizer: the host keeps its parameters, and answers with their new values.

If asked for, the next host keeps a replica: it is sent the mean gradient of each round and applies it likewise, before
any trainer is answered. So whatever a trainer has been told is not lost with one host.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import copy
import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from torch_ucx_rpc._workers.life import Life
from torch_ucx_rpc.reduction._applied import Applied
from torch_ucx_rpc.reduction._messages import Answer, Kept, OptimizerFactory, Push, Spec, Trainer, Update
from torch_ucx_rpc.reduction._piece import Piece
from torch_ucx_rpc.reduction._roster import Roster
from torch_ucx_rpc.reduction._round import Round, shapes_differ

_logger = logging.getLogger(__name__)


class OtherHosts(Protocol):
    """The other hosts of a server, as a piece sees them."""

    def next_host(self) -> str | None:
        """The one that keeps the replica: the next living host, if there is another."""

    def send_update(self, host: str, update: Update) -> Future[None]:
        """Have that host apply an update; the future is done when it has. RuntimeError if it is known to be lost."""


class Replica(NamedTuple):
    """The host of a replica. When it has all that there was, it is sent further updates, and not before."""

    host: str
    copied: Future[None]


class Parameters:
    """Parameters and their optimizer. ``lock`` guards them; it may be taken with the lock of the roster held."""

    def __init__(self, parameters: Sequence[Tensor], make: OptimizerFactory, origin: int | None = None) -> None:
        # Tells what a trainer has given from what another one gives when that is lost.
        self.origin = secrets.randbits(63) if origin is None else origin
        self.parameters = [torch.nn.Parameter(tensor.detach().clone()) for tensor in parameters]
        self.optimizer = make(self.parameters)  # type: ignore[arg-type]
        self.updates = 0
        # The last round that has been applied; two hosts may complete the same one.
        self.round = -1
        self.applied = Applied()
        self.lock = threading.Lock()
        self.replica: Replica | None = None

    def update(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1

    def update_round(self, number: int, mean: Sequence[Tensor]) -> None:
        """Apply the mean gradient of a round, unless that has been done."""
        if number > self.round:
            self.update(mean)
            self.round = number

    def update_once(self, life: int, push: int, gradients: Sequence[Tensor]) -> bool:
        """Apply the push of a trainer, unless that has been done."""
        if is_new := self.applied.add(life, push):
            self.update(gradients)
        return is_new

    def values(self) -> list[Tensor]:
        """A copy: the next update may come while this is being sent."""
        return [parameter.detach().clone() for parameter in self.parameters]

    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(parameter.shape) for parameter in self.parameters]

    def to_dict(self) -> dict[str, Any]:
        """A copy of all that there is, which travels while updates come."""
        return {
            "origin": self.origin,
            "parameters": self.values(),
            # The next update writes to what this has.
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "updates": self.updates,
            "applied": self.applied.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any], make: OptimizerFactory) -> Parameters:
        made = cls(values["parameters"], make, values["origin"])
        made.optimizer.load_state_dict(values["optimizer"])
        made.updates, made.applied = values["updates"], Applied.from_dict(values["applied"])
        return made


def checkpoint_of(spec: Spec, piece: str) -> Path:
    """The file of a piece in the server's checkpoint."""
    assert spec.checkpoint is not None
    safe = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in f"{spec.name}-{piece}")
    return Path(spec.checkpoint, f"{safe}.pt")


class ParameterPiece(Piece):
    """A piece whose results are the new values of its parameters, once these have been given.

    The lock of the roster guards the reference to the parameters, and the trainers that wait for them.
    """

    def __init__(self, name: str, roster: Roster, life: Life, others: OtherHosts) -> None:
        super().__init__(name, roster, life)
        self._others = others
        self._parameters: Parameters | None = None
        # The trainer that gives the parameters, and those that wait for that.
        self._filler: Trainer | None = None
        self._restored_from: str | None = None
        self._waiting: list[tuple[Trainer, Future[str]]] = []

    @property
    def _spec(self) -> Spec:
        return self._roster.spec

    @property
    def _make(self) -> OptimizerFactory:
        assert self._spec.optimizer is not None
        return self._spec.optimizer

    # -- where the parameters come from

    def fill(self, trainer: Trainer) -> Future[str]:
        """Whether a trainer is to give the parameters ("give") or they are here ("there")."""
        future: Future[str] = Future()
        with self._roster.lock:
            is_there = self._restore() is not None
            if not is_there:
                if self._filler is not None and self._filler.life == trainer.life:
                    self._filler = None  # it asks again, since it has failed to give them
                self._waiting.append((trainer, future))
                self._find_filler()
        if is_there:
            future.set_result("there")
        return future

    def _find_filler(self) -> None:
        if self._filler is None and self._waiting:
            self._filler, future = self._waiting.pop(0)
            future.set_result("give")

    def take_parameters(self, parameters: list[Tensor]) -> Future[None]:
        """The filler gives them; the other trainers need not. Done when the replica has them too."""
        taken: Future[None] = Future()
        with self._roster.lock:
            if self._parameters is None:
                self._parameters = Parameters(parameters, self._make)
            state, done = self._parameters, self._done

        def tell() -> None:
            with self._roster.lock:
                waiting, self._waiting = self._waiting, []
            for _, future in waiting:
                future.set_result("there")
            taken.set_result(None)

        self._replicate(state, Update(self._spec.key, self.name, done, None, 0, []), tell)
        return taken

    def forget(self, life: int) -> None:
        super().forget(life)
        if self._filler is not None and self._filler.life == life and self._parameters is None:
            self._filler = None
            self._find_filler()

    def forget_host(self, name: str) -> None:
        # A worker of that name that comes has none of it.
        state = self._parameters
        if state is not None and state.replica is not None and state.replica.host == name:
            state.replica = None

    def kept(self) -> Kept | None:
        """The origin and the shapes of the parameters."""
        with self._roster.lock:
            state = self._parameters
            return None if state is None else Kept(state.origin, state.shapes(), self._restored_from)

    def _restore(self) -> Parameters | None:
        """The parameters, of the checkpoint if there are none here. The caller holds the lock of the roster."""
        if self._parameters is None and self._spec.checkpoint is not None:
            path = checkpoint_of(self._spec, self.name)
            if path.exists():
                try:
                    restored = Parameters.from_dict(torch.load(path, weights_only=True), self._make)
                except Exception as error:
                    raise RuntimeError(
                        f"{self._life.info.name!r} cannot restore {self.name} from the checkpoint {path}: "
                        f"{type(error).__name__}: {error}. It is damaged, or of another optimizer: put a whole one in "
                        f"its place, or give another folder as checkpoint"
                    ) from error
                self._parameters, self._restored_from = restored, str(path)
                name = self._life.info.name
                _logger.info("%s: restored %s after %d updates from %s", name, self.name, restored.updates, path)
        return self._parameters

    def _save_if_due(self, state: Parameters) -> None:
        if self._spec.checkpoint is None or state.updates % self._spec.checkpoint_every != 0:
            return
        path = checkpoint_of(self._spec, self.name)
        # Whoever is killed here leaves the former one whole.
        part = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state.to_dict(), part)
            part.replace(path)
        except (OSError, RuntimeError) as error:
            # The parameters are updated: training goes on, with the former checkpoint.
            _logger.warning("%s could not save %s to %s: %s", self._life.info.name, self.name, path, error)

    # -- pushes

    def push(self, push: Push, is_owned: bool, takes_over: bool = False) -> Future[Answer]:
        with self._roster.lock:
            state = self._restore()
        if state is None:
            return _refused(
                f"{self._life.info.name!r} has no parameters for the gradients of {push.trainer}: they were with a "
                f"host that has been lost. reduction.serve(..., replica=True) keeps a second copy, and "
                f"checkpoint='a folder that all hosts see' one on disk"
            )
        if push.origin != state.origin:
            return _refused(
                f"the parameters that {push.trainer} pushes to were lost with their hosts, and "
                f"{self._life.info.name!r} has others, which a trainer has given since: server.leave() and "
                f"reduction.serve take part in those"
            )
        got = [tuple(tensor.shape) for tensor in push.tensors]
        if got != state.shapes():
            return _refused(shapes_differ(push.trainer, got, "the server's parameters have", state.shapes()))
        return self._apply(push, state) if self._spec.asynchronous else super().push(push, is_owned, takes_over)

    def _apply(self, push: Push, state: Parameters) -> Future[Answer]:
        """One trainer's gradients, as they come."""
        future: Future[Answer] = Future()
        with self._roster.lock:
            self._roster.count(push.trainer)
        with state.lock:
            if is_new := state.update_once(push.trainer.life, push.number, push.tensors):
                self._save_if_due(state)
            number = state.updates
            answer = Answer(None, number, 1, state.values())
        if is_new:
            update = Update(self._spec.key, self.name, number, push.trainer.life, push.number, push.tensors)
            self._replicate(state, update, lambda: future.set_result(answer))
        else:
            future.set_result(answer)
        return future

    def _finish(self, round_: Round, mean: list[Tensor]) -> None:
        state = self._parameters
        assert state is not None
        with state.lock:
            state.update_round(round_.number, mean)
            values = state.values()
            self._save_if_due(state)
        update = Update(self._spec.key, self.name, round_.number, None, 0, mean)
        self._replicate(state, update, lambda: self._publish(round_, values))

    # A late trainer misses nothing: all that there is stands in the parameters.

    def _may_skip_rounds(self) -> bool:
        return False

    def _answer_to_late(self, trainer: Trainer, at: int, is_first: bool = False) -> Answer:
        state = self._parameters
        assert state is not None
        with state.lock:
            return Answer(None, self._done + 1, 1, state.values())

    def _note_missed(self, round_: Round, result: list[Tensor]) -> None:
        pass

    def _may_ask(self) -> bool:
        return False

    # -- the replica

    def _replicate(self, state: Parameters, update: Update, then: Callable[[], None]) -> None:
        """Have the replica apply the same, and go on when it has."""
        other = self._others.next_host() if self._spec.replica else None
        if other is None:
            then()
            return
        with state.lock:
            replica = state.replica
            if is_new := replica is None or replica.host != other:
                replica = state.replica = Replica(other, Future())
                update = update._replace(gradients=[], everything=(self._spec, state.to_dict()))
        assert replica is not None

        def go_on(sent: Future[None]) -> None:
            try:
                sent.value()
            except RuntimeError as error:
                fail(error)
            end()

        def fail(error: RuntimeError) -> None:
            _logger.warning("%s: the replica of %s at %s is lost: %s", self._life.info.name, self.name, other, error)
            with state.lock:
                if state.replica is replica:
                    state.replica = None

        def end() -> None:
            if is_new:
                replica.copied.set_result(None)
            then()

        def send(_: Any = None) -> None:
            try:
                self._others.send_update(other, update).add_done_callback(go_on)
            except RuntimeError as error:
                fail(error)
                end()

        if is_new:
            send()
        else:
            replica.copied.add_done_callback(send)

    def take_update(self, update: Update) -> None:
        """Apply what another host has applied; this one has the replica."""
        is_of_round = update.life is None
        with self._roster.lock:
            if update.everything is not None:
                self._parameters = Parameters.from_dict(update.everything[1], self._make)
                self._parameters.round = update.number
            state = self._parameters
            if state is None:
                raise LookupError(f"{self._life.info.name!r} has no copy of {self.name} yet")
            if is_of_round and update.number <= self._done and update.everything is None:
                # The other host died after it had sent this, and a trainer has repeated its push by now.
                return
        with state.lock:
            if update.life is not None:
                state.update_once(update.life, update.push, update.gradients)
            elif update.everything is None:
                state.update_round(update.number, update.gradients)
            values = state.values()
        # Before the first round there is a copy of the beginning.
        if is_of_round and update.number >= 0:
            self._complete_until(update.number, values)

    def _complete_until(self, number: int, values: list[Tensor]) -> None:
        """Another host has completed a round: this one answers whoever has pushed it here."""
        with self._roster.lock:
            self._done = max(self._done, number)
            self._roster.has_begun = True
            # A round that is being completed here is answered by whoever does that.
            numbers = [other for other in sorted(self._rounds) if other <= self._done]
            over = [self._rounds.pop(other) for other in numbers if not self._rounds[other].is_closed]
            for round_ in over:
                round_.is_closed = True
        for round_ in over:
            for coming in round_.came.values():
                coming.future.set_result(Answer(None, number + 1, 1, values))


def _refused(refusal: str) -> Future[Answer]:
    future: Future[Answer] = Future()
    future.set_result(Answer(refusal))
    return future
