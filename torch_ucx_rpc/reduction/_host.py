"""The server's side of reduction: what a worker does that holds a shard of a server (`Host`).

A server is spread over hosts. Each host has pieces: a bucket of gradients, a part of one, or the parameters of a shard.
The trainers push a piece once in each round, and get back what all of them made of it, in the answer to that push. A
round of a piece is complete when all trainers that are there have pushed it, or as many as the quorum says. Pieces know
nothing of each other, and a round nothing of steps.

**Sums** are made in the order of the trainers' ranks, whatever order they come in. So N trainers get the same bits in
every run. Four trainers' tensors at a time are added, in one pass through memory, and the last pass divides too. One
thread works at a sum at a time and no other waits for it: the next tensors lie there until it is done. A tensor that
has come from another worker takes the sum; it lives in memory of this process.

**The wait.** A trainer belongs to a piece's rounds from its first push on, or from the round with which
another trainer has admitted it. In the first round the server also waits for those that are expected. When the agent
sees the end of a trainer, it is not waited for any more, and what it has pushed counts.

**Late.** A trainer that was not there when a round was completed (`quorum`) has missed its result. All that it misses
is added up, and is the answer to its next push, whose gradients are dropped; then it is one of the others again. With
plain SGD that makes its parameters the same as theirs, but for rounding.

**With an optimizer** a host keeps the parameters of its pieces too, and the answer is their new values. If asked for, a
second host is a replica: it is sent the mean gradient of each round and applies it likewise, before any trainer is
answered. So whatever a trainer has been told is not lost with one host.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch._C._distributed_rpc import WorkerInfo
from torch.futures import Future

_logger = logging.getLogger(__name__)

# So many trainers' tensors are added at a time, in one pass through memory. Until then they lie there.
_BATCH = 4

# In the place of a trainer's life: those that are expected and have not been seen.
_NOT_SEEN = -1

OptimizerFactory = Callable[[list[Tensor]], torch.optim.Optimizer]


class Trainer(NamedTuple):
    """One life of a worker that trains; sums are made in the order of ranks."""

    rank: int
    name: str
    life: int

    def __str__(self) -> str:
        return f"trainer {self.name!r} (rank {self.rank})"


class Spec(NamedTuple):
    """What all trainers of a server must agree on; the first one's makes it."""

    key: str
    hosts: tuple[str, ...]
    # How many trainers the first round waits for, and which, where that is known.
    expected: int
    expected_names: tuple[str, ...] = ()
    optimizer: OptimizerFactory | None = None
    asynchronous: bool = False
    replica: bool = False
    checkpoint: str | None = None
    checkpoint_every: int = 100


class Push(NamedTuple):
    """A piece, as a trainer sends it."""

    key: str
    piece: str
    trainer: Trainer
    # The round of the trainer; None for "the one that is open".
    at: int | None
    quorum: int | None
    # Of this trainer's pushes of this piece; a push that is repeated has the same.
    number: int
    # To another host, since the first one has been lost.
    is_repeated: bool
    tensors: list[Tensor]


class Answer(NamedTuple):
    """The result of a push. With a refusal there is nothing else."""

    refusal: str | None
    next_round: int = 0
    # How many rounds the result is of: a late trainer gets the sum of all that it has missed.
    rounds: int = 1
    tensors: list[Tensor] | None = None


class Entry(NamedTuple):
    """Who gives a trainer the parameters of a model, if not itself; and whether it is one of the first."""

    donor: Trainer | None
    is_initial: bool


@dataclasses.dataclass
class _Coming:
    """The tensors of one trainer in one round."""

    trainer: Trainer
    tensors: list[Tensor]
    is_owned: bool
    future: Future[Answer] | None
    is_added: bool = False


class _Round:
    """One round of a piece, until it is complete."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.quorum: int | None = None
        self.came: dict[int, _Coming] = {}
        # Whose tensors have come first, and what they were.
        self.first: tuple[Trainer, list[Any]] | None = None
        self.sum: list[Tensor] | None = None
        self.is_sum_owned = False
        self.is_busy = False
        # Nobody else's tensors will be in it. Those who come between then and its end wait for the result.
        self.is_closed = False
        self.late: list[_Coming] = []
        self.result: list[Tensor] | None = None
        self.has_asked = False

    def add(self, batch: Sequence[_Coming], divisor: int | None) -> None:
        """Add what has come, in that order; with a divisor, it is the last, and the sum becomes the mean."""
        tensors = [coming.tensors for coming in batch]
        owned = [coming.is_owned for coming in batch]
        for coming in batch:
            coming.is_added, coming.tensors = True, []
        if self.sum is not None:
            tensors.insert(0, self.sum)
            owned.insert(0, self.is_sum_owned)
        # Of the first two either may take the sum: addition commutes, to the bit.
        index = owned.index(True) if True in owned[:2] else 0
        total = tensors.pop(index)
        self.is_sum_owned = owned[index]
        if not self.is_sum_owned and (tensors or divisor is not None):
            total = [tensor.clone() for tensor in total]
            self.is_sum_owned = True
        for position, tensor in enumerate(total):
            _add(tensor, [other[position] for other in tensors], divisor)
        self.sum = total


# Elements that are added at a time, for each thread of torch: few enough to stay in its cache until they are divided,
# and what torch gives to one thread at least (at::internal::GRAIN_SIZE).
_GRAIN = 32_768


def _add(total: Tensor, others: Sequence[Tensor], divisor: int | None) -> None:
    """``total += each of others``, then ``/= divisor``, with one pass through memory instead of one for each."""
    steps = max(1, torch.get_num_threads()) * _GRAIN
    is_flat = all(tensor.is_contiguous() for tensor in (total, *others))
    if is_flat and total.device.type == "cpu" and total.numel() > steps:
        parts = [total.view(-1).split(steps), *(other.view(-1).split(steps) for other in others)]
    else:
        parts = [(total,), *((other,) for other in others)]
    for own, *rest in zip(*parts, strict=True):
        for other in rest:
            own.add_(other)
        if divisor is not None and divisor > 1:
            own.div_(divisor)


class _Stateful:
    """Parameters and their optimizer, of one piece."""

    def __init__(self, parameters: Sequence[Tensor], make: OptimizerFactory) -> None:
        self.parameters = [torch.nn.Parameter(tensor.detach().clone()) for tensor in parameters]
        self.optimizer = make(self.parameters)  # type: ignore[arg-type]
        self.updates = 0
        # By life of a trainer, its last push that was applied; for asynchronous ones.
        self.applied: dict[int, int] = {}
        self.lock = threading.Lock()
        # Where the replica is that has all of this.
        self.replica: str | None = None

    def update(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1

    def values(self) -> list[Tensor]:
        """A copy: the next update may come while this is being sent."""
        return [parameter.detach().clone() for parameter in self.parameters]

    def to_values(self) -> dict[str, Any]:
        return {
            "parameters": self.values(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            "applied": dict(self.applied),
        }

    @classmethod
    def from_values(cls, values: dict[str, Any], make: OptimizerFactory) -> _Stateful:
        made = cls(values["parameters"], make)
        made.optimizer.load_state_dict(values["optimizer"])
        made.updates, made.applied = values["updates"], dict(values["applied"])
        return made


class _Piece:
    def __init__(self) -> None:
        self.rounds: dict[int, _Round] = {}
        # The last round that was completed.
        self.done = -1
        self.is_begun = False
        self.state: _Stateful | None = None
        # By life of a trainer, the sum of the results that it has missed, and whether that is its own memory.
        self.missed: dict[int, tuple[list[Tensor], bool]] = {}
        # Lives of trainers that have pushed it.
        self.seen: set[int] = set()
        # Who gives the parameters, and who waits for that.
        self.filler: Trainer | None = None
        self.waiting: list[tuple[Trainer, Future[str]]] = []


class _Model:
    """The lives that have a copy of a model, and those that wait for one."""

    def __init__(self) -> None:
        self.holders: dict[int, Trainer] = {}
        self.entered: dict[int, tuple[Trainer, Future[Entry]]] = {}
        # Lives of those that began together: the first step waits for all of them.
        self.initial: set[int] = set()


class Host:
    """A worker's part of one server."""

    def __init__(self, spec: Spec, own_name: str, living: Callable[[], list[WorkerInfo]]) -> None:
        self.spec = spec
        self.own_name = own_name
        self._living = living
        self.lock = threading.RLock()
        self.pieces: dict[str, _Piece] = {}
        # By life: those that are waited for.
        self.trainers: dict[int, Trainer] = {}
        # All that have ever been there, or can come no more; and of these, the ones that are not there any more.
        self._counted: set[int] = set()
        self._counted_names: set[str] = set()
        self._ended: set[int] = set()
        self._lost_names: set[str] = set()
        self._models: dict[str, _Model] = {}
        self.has_begun = False

    # -- who is there

    def on_gone(self, life: int, name: str) -> None:
        with self.lock:
            if name in self.spec.hosts:
                self._lost_names.add(name)
            names = self.spec.expected_names
            if life in self._counted or (name in names if names else name not in self.spec.hosts):
                # If it was never there, it will not come.
                self._counted.add(life)
                self._counted_names.add(name)
                self._ended.add(life)
            self._forget(life)
        self._advance_all()

    def leave(self, trainer: Trainer) -> None:
        with self.lock:
            self._counted.add(trainer.life)
            self._counted_names.add(trainer.name)
            self._ended.add(trainer.life)
            self._forget(trainer.life)
        self._advance_all()

    def _forget(self, life: int) -> None:
        self.trainers.pop(life, None)
        for model in self._models.values():
            model.holders.pop(life, None)
            model.entered.pop(life, None)
        for piece in self.pieces.values():
            piece.missed.pop(life, None)
            if piece.filler is not None and piece.filler.life == life and piece.state is None:
                piece.filler = None
                self._find_filler(piece)

    def expect(self, trainers: int, names: tuple[str, ...]) -> None:
        """Have the first round wait for so many trainers, or also for these."""
        with self.lock:
            if names:
                if not self.spec.expected_names:
                    return  # a number has been given
                names = tuple(sorted({*self.spec.expected_names, *names}))
                trainers = len(names)
            self.spec = self.spec._replace(expected=trainers, expected_names=names)

    def admit(self, trainer: Trainer, positions: dict[str, int]) -> None:
        """Wait for a trainer from its positions on: it is given a copy of a model."""
        with self.lock:
            self._count(trainer)
            for name in positions:
                self._piece(name).seen.add(trainer.life)

    def _count(self, trainer: Trainer) -> None:
        self.trainers[trainer.life] = trainer
        self._ended.discard(trainer.life)
        self._counted.add(trainer.life)
        self._counted_names.add(trainer.name)

    def _are_all_there(self) -> bool:
        if self.has_begun:
            return True
        names = self.spec.expected_names
        return self._counted_names.issuperset(names) if names else len(self._counted) >= self.spec.expected

    def enter(self, name: str, trainer: Trainer) -> Future[Entry]:
        """From whom a trainer gets the parameters of its copy of a model."""
        future: Future[Entry] = Future()
        with self.lock:
            model = self._models.setdefault(name, _Model())
            others = [other for life, other in model.holders.items() if life != trainer.life]
            self._counted.add(trainer.life)
            self._counted_names.add(trainer.name)
            if others:
                entered = [(future, Entry(min(others), trainer.life in model.initial))]
            else:
                model.entered[trainer.life] = (trainer, future)
                entered = self._take_entered()
        for waiting, entry in entered:
            waiting.set_result(entry)
        return future

    def _take_entered(self) -> list[tuple[Future[Entry], Entry]]:
        """Those that may begin with a model: all, once all are there."""
        answers: list[tuple[Future[Entry], Entry]] = []
        for model in self._models.values():
            is_complete = self._are_all_there() and all(life in model.entered for life in self.trainers)
            if not model.entered or not is_complete:
                continue
            donor = min(trainer for trainer, _ in model.entered.values())
            for life, (trainer, future) in model.entered.items():
                self._count(trainer)
                model.initial.add(life)
                answers.append((future, Entry(None if life == donor.life else donor, True)))
            model.entered.clear()
        return answers

    def hold(self, name: str, trainer: Trainer) -> None:
        """A trainer has a copy of a model now, and can give it to others."""
        with self.lock:
            self._models.setdefault(name, _Model()).holders[trainer.life] = trainer

    # -- parameters

    def fill(self, name: str, trainer: Trainer) -> Future[str]:
        """Whether a trainer is to give the parameters of a piece ("give") or they are here ("there")."""
        future: Future[str] = Future()
        with self.lock:
            piece = self._piece(name)
            if piece.state is None:
                self._restore(name, piece)
            is_there = piece.state is not None
            if not is_there:
                piece.waiting.append((trainer, future))
                self._find_filler(piece)
        if is_there:
            future.set_result("there")
        return future

    def _find_filler(self, piece: _Piece) -> None:
        if piece.filler is None and piece.waiting:
            piece.filler, future = piece.waiting.pop(0)
            future.set_result("give")

    def take_parameters(self, name: str, parameters: list[Tensor]) -> None:
        assert self.spec.optimizer is not None
        with self.lock:
            piece = self._piece(name)
            if piece.state is None:
                piece.state = _Stateful(parameters, self.spec.optimizer)
            waiting, piece.waiting = piece.waiting, []
        for _, future in waiting:
            future.set_result("there")

    def describe(self, name: str) -> list[tuple[int, ...]] | None:
        """The shapes of a piece's parameters."""
        with self.lock:
            state = self._piece(name).state
            return None if state is None else [tuple(parameter.shape) for parameter in state.parameters]

    def _checkpoint_of(self, name: str) -> Path:
        assert self.spec.checkpoint is not None
        safe = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in f"{self.spec.key}-{name}")
        return Path(self.spec.checkpoint, f"{safe}.pt")

    def _restore(self, name: str, piece: _Piece) -> None:
        if self.spec.checkpoint is not None and self.spec.optimizer is not None:
            path = self._checkpoint_of(name)
            if path.exists():
                piece.state = _Stateful.from_values(torch.load(path, weights_only=True), self.spec.optimizer)
                _logger.info("%s: restored %s after %d updates from %s", self.own_name, name, piece.state.updates, path)

    def _save(self, name: str, state: _Stateful) -> None:
        path = self._checkpoint_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever is killed here leaves the former one whole.
        part = path.with_name(f"{path.name}.{os.getpid()}")
        torch.save(state.to_values(), part)
        part.replace(path)

    # -- rounds

    def _piece(self, name: str) -> _Piece:
        piece = self.pieces.get(name)
        if piece is None:
            piece = self.pieces[name] = _Piece()
        return piece

    def push(self, push: Push, is_owned: bool) -> Future[Answer]:
        future: Future[Answer] = Future()
        if self.spec.optimizer is not None and (refusal := self._prepare_state(push)):
            future.set_result(Answer(refusal))
            return future
        if self.spec.asynchronous:
            self._apply(push, future)
            return future
        answer = round_ = None
        with self.lock:
            piece = self._piece(push.piece)
            self._count(push.trainer)
            is_first = push.trainer.life not in piece.seen
            piece.seen.add(push.trainer.life)
            at = piece.done + 1 if push.at is None else push.at
            if at <= piece.done and is_first and piece.state is None and _NOT_SEEN not in piece.missed:
                # Nobody has waited for it: it joins now.
                at = piece.done + 1
            coming = _Coming(push.trainer, push.tensors, is_owned, future)
            if at <= piece.done:
                answer = self._answer_to_late(piece, push.trainer, at, is_first)
            else:
                round_ = piece.rounds.get(at)
                if round_ is None:
                    round_ = piece.rounds[at] = _Round(at)
                if refusal := _why_not(push, round_):
                    answer = Answer(refusal)
                elif round_.is_closed:
                    round_.late.append(coming)
                else:
                    round_.came[push.trainer.life] = coming
                    round_.quorum = push.quorum
                    if push.is_repeated and not round_.has_asked and self.spec.optimizer is None:
                        round_.has_asked = True
                        self._ask_for_result(push, round_)
        if answer is not None:
            future.set_result(answer)
        elif round_ is not None:
            self._advance(push.piece, piece, round_)
        return future

    def _answer_to_late(self, piece: _Piece, trainer: Trainer, at: int, is_first: bool = False) -> Answer:
        if piece.state is not None:
            return Answer(None, piece.done + 1, 1, piece.state.values())
        missed = piece.missed.pop(trainer.life, None)
        if missed is None and is_first and (of_all := piece.missed.get(_NOT_SEEN)):
            # The next one that comes for the first time gets it too.
            missed = ([tensor.clone() for tensor in of_all[0]], True)
        if missed is None:
            return Answer(
                f"{trainer} pushed a round that is over, and was not there in: it has to begin anew, with "
                f"reduction.serve and a new DataParallel"
            )
        return Answer(None, piece.done + 1, piece.done + 1 - at, missed[0])

    def _advance_all(self) -> None:
        with self.lock:
            entered = self._take_entered()
            rounds = [(name, piece, round_) for name, piece in self.pieces.items() for round_ in piece.rounds.values()]
        for waiting, entry in entered:
            waiting.set_result(entry)
        for name, piece, round_ in rounds:
            self._advance(name, piece, round_)

    def _advance(self, name: str, piece: _Piece, round_: _Round) -> None:
        """Add what can be added, and complete the round if it can be. One thread at a time does; others return."""
        while True:
            with self.lock:
                if round_.is_busy or round_.is_closed:
                    return
                is_complete = round_.result is not None or self._is_complete(round_)
                batch = [] if round_.result is not None else self._addable(round_, is_complete)
                if not batch and not is_complete:
                    return
                round_.is_busy = True
                round_.is_closed = is_complete
            if round_.result is None:
                round_.add(batch, len(round_.came) if is_complete else None)
            if is_complete:
                self.has_begun = True
                result = round_.sum if round_.result is None else round_.result
                assert result is not None
                self._finish(name, piece, round_, result)
                return
            with self.lock:
                round_.is_busy = False

    def _is_complete(self, round_: _Round) -> bool:
        if not round_.came:
            return False
        if round_.quorum is not None and len(round_.came) >= round_.quorum:
            return True
        return self._are_all_there() and all(life in round_.came for life in self.trainers)

    def _addable(self, round_: _Round, is_complete: bool) -> list[_Coming]:
        """In the order of ranks: all, or those before whom nobody is missing."""
        came = sorted(
            (coming for coming in round_.came.values() if not coming.is_added), key=lambda coming: coming.trainer
        )
        if is_complete:
            return came
        if not self._are_all_there():
            return []
        missing = [trainer for life, trainer in self.trainers.items() if life not in round_.came]
        first_missing = min(missing, default=None)
        batch = [coming for coming in came if first_missing is None or coming.trainer < first_missing]
        return batch if len(batch) >= _BATCH else []

    def _finish(self, name: str, piece: _Piece, round_: _Round, result: list[Tensor]) -> None:
        state = piece.state
        if state is None:
            self._publish(piece, round_, result)
            return
        with state.lock:
            state.update(result)
            values = state.values()
            self._maybe_save(name, state)
        origin = (round_.number, None, 0)
        self._replicate(name, piece, state, origin, result, lambda: self._publish(piece, round_, values))

    def _publish(self, piece: _Piece, round_: _Round, result: list[Tensor]) -> None:
        with self.lock:
            piece.done = max(piece.done, round_.number)
            piece.rounds.pop(round_.number, None)
            if piece.state is None:
                for life in piece.seen.intersection(self.trainers).difference(round_.came):
                    self._miss(piece, life, result)
                # Some that are there or expected have never pushed it: all of them have missed the same.
                is_seen_by_all = piece.seen.issuperset(self.trainers)
                if not is_seen_by_all or len(piece.seen | self._ended) < self.spec.expected:
                    self._miss(piece, _NOT_SEEN, result)
                else:
                    piece.missed.pop(_NOT_SEEN, None)
            futures = [coming.future for coming in round_.came.values()]
            late = [(coming, self._answer_to_late(piece, coming.trainer, round_.number)) for coming in round_.late]
        answer = Answer(None, round_.number + 1, 1, result)
        for future in futures:
            if future is not None:
                future.set_result(answer)
        for coming, answer_to_late in late:
            if coming.future is not None:
                coming.future.set_result(answer_to_late)

    @staticmethod
    def _miss(piece: _Piece, life: int, result: list[Tensor]) -> None:
        missed = piece.missed.get(life)
        if missed is None or [tensor.shape for tensor in missed[0]] != [tensor.shape for tensor in result]:
            piece.missed[life] = (result, False)
        elif missed[1]:
            for total, tensor in zip(missed[0], result, strict=True):
                total.add_(tensor)
        else:
            piece.missed[life] = ([a + b for a, b in zip(missed[0], result, strict=True)], True)

    # -- after the end of another host

    def _ask_for_result(self, push: Push, round_: _Round) -> None:
        """A trainer may have had the lost host's answer for the round that another repeats: then that is the result."""

        def take(future: Future[list[Tensor] | None]) -> None:
            try:
                result = future.value()
            except RuntimeError as error:
                _logger.debug("%s was not told of a result: %s", self.own_name, error)
                return
            if result is not None:
                self.give_result(push.piece, round_.number, result)

        for info in self._living():
            if info.name != push.trainer.name:
                try:
                    rpc.rpc_async(info, _kept, args=(push.key, push.piece, round_.number)).add_done_callback(take)
                except RuntimeError as error:
                    _logger.debug("%s was not asked for a result: %s", info.name, error)

    def give_result(self, name: str, number: int, result: list[Tensor]) -> None:
        with self.lock:
            piece = self._piece(name)
            round_ = piece.rounds.get(number)
            if round_ is None or round_.is_closed:
                return
            round_.result = result
        self._advance(name, piece, round_)

    def missing(self, name: str) -> list[str]:
        """The trainers that are missing in the oldest open round of a piece."""
        with self.lock:
            piece = self.pieces.get(name)
            if piece is None or not piece.rounds:
                return []
            round_ = piece.rounds[min(piece.rounds)]
            absent = [trainer.name for life, trainer in sorted(self.trainers.items()) if life not in round_.came]
            if not self._are_all_there():
                known = {trainer.name for trainer in self.trainers.values()}
                unknown = [name for name in self.spec.expected_names if name not in known]
                absent += unknown or [f"{self.spec.expected - len(self._counted)} more"]
            return absent

    # -- with an optimizer

    def _prepare_state(self, push: Push) -> str | None:
        """Have the parameters for a push; why they cannot be had, or do not fit."""
        with self.lock:
            piece = self._piece(push.piece)
            if piece.state is None:
                self._restore(push.piece, piece)
            state = piece.state
        if state is None:
            return (
                f"{self.own_name!r} has no parameters for the gradients of {push.trainer}: they were with a host that "
                f"has been lost. reduction.serve(..., replica=True) keeps a second copy, and checkpoint='a folder that "
                f"all hosts see' one on disk"
            )
        expected = [tuple(parameter.shape) for parameter in state.parameters]
        got = [tuple(tensor.shape) for tensor in push.tensors]
        return None if expected == got else _shapes_differ(push.trainer, got, "the server's parameters have", expected)

    def _apply(self, push: Push, future: Future[Answer]) -> None:
        """One trainer's gradients, as they come."""
        piece = self.pieces[push.piece]
        state = piece.state
        assert state is not None
        with self.lock:
            self._count(push.trainer)
        with state.lock:
            if is_new := state.applied.get(push.trainer.life, -1) < push.number:
                state.update(push.tensors)
                state.applied[push.trainer.life] = push.number
                self._maybe_save(push.piece, state)
            values = state.values()
            answer = Answer(None, state.updates, 1, values)
        if not is_new:
            future.set_result(answer)
            return
        origin = (state.updates, push.trainer.life, push.number)
        self._replicate(push.piece, piece, state, origin, push.tensors, lambda: future.set_result(answer))

    def _maybe_save(self, name: str, state: _Stateful) -> None:
        if self.spec.checkpoint is not None and state.updates % self.spec.checkpoint_every == 0:
            self._save(name, state)

    def _replicate(
        self,
        name: str,
        piece: _Piece,
        state: _Stateful,
        origin: tuple[int, int | None, int],
        gradients: list[Tensor],
        then: Callable[[], None],
    ) -> None:
        """Have the replica apply the same, and go on when it has."""
        other = self._replica_host() if self.spec.replica else None
        if other is None:
            then()
            return
        arguments: tuple[Any, ...]
        with state.lock:
            if state.replica == other:
                arguments = (self.spec.key, name, origin, gradients, None)
            else:
                state.replica = other
                arguments = (self.spec.key, name, origin, [], (self.spec, state.to_values()))

        def go_on(future: Future[None]) -> None:
            try:
                future.value()
            except RuntimeError as error:
                _logger.warning("%s: the replica of %s at %s is lost: %s", self.own_name, name, other, error)
                state.replica = None
            then()

        try:
            rpc.rpc_async(other, _mirror, args=arguments).add_done_callback(go_on)
        except RuntimeError as error:
            _logger.warning("%s: the replica of %s at %s is lost: %s", self.own_name, name, other, error)
            state.replica = None
            then()

    def _replica_host(self) -> str | None:
        """The next living host."""
        hosts = self.spec.hosts
        living = {info.name for info in self._living()} - self._lost_names
        start = hosts.index(self.own_name) if self.own_name in hosts else 0
        ring = [*hosts[start + 1 :], *hosts[:start]]
        return next((name for name in ring if name in living), None)

    def mirror(
        self, name: str, origin: tuple[int, int | None, int], gradients: list[Tensor], all_: dict[str, Any] | None
    ) -> None:
        assert self.spec.optimizer is not None
        number, life, push = origin
        with self.lock:
            piece = self._piece(name)
            if all_ is not None:
                piece.state = _Stateful.from_values(all_, self.spec.optimizer)
            state = piece.state
            # The other host may have died after this was sent, and a trainer may have repeated its push by now.
            if state is None or (life is None and number <= piece.done and all_ is None):
                if state is None:
                    raise LookupError(f"{self.own_name!r} has no copy of {name} yet")
                return
        with state.lock:
            if life is None:
                if all_ is None:
                    state.update(gradients)
            elif state.applied.get(life, -1) < push:
                state.update(gradients)
                state.applied[life] = push
            values = state.values()
        if life is None:
            with self.lock:
                piece.done = max(piece.done, number)
                self.has_begun = True
                over = [piece.rounds.pop(other) for other in sorted(piece.rounds) if other <= piece.done]
            for round_ in over:
                for coming in round_.came.values():
                    if coming.future is not None:
                        coming.future.set_result(Answer(None, number + 1, 1, values))


def _why_not(push: Push, round_: _Round) -> str | None:
    """Why tensors do not fit to those that have come before."""
    got = [(tuple(tensor.shape), tensor.dtype) for tensor in push.tensors]
    if round_.first is None:
        round_.first = (push.trainer, got)
        return None
    trainer, expected = round_.first
    return None if expected == got else _shapes_differ(push.trainer, got, f"{trainer} has pushed", expected)


def _shapes_differ(trainer: Trainer, got: Sequence[Any], whose: str, expected: Sequence[Any]) -> str:
    if len(got) != len(expected):
        what = f"{len(got)} tensors, and {whose} {len(expected)}"
    else:
        index = next(index for index, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1])
        what = f"{_shown(got[index])} as tensor {index}, and {whose} {_shown(expected[index])}"
    return f"{trainer} pushes gradients of {what}: all trainers of a server must have the same model"


def _shown(shape: Any) -> str:
    if shape and isinstance(shape[0], tuple):
        return f"{list(shape[0])} ({shape[1]})"
    return str(list(shape))


# --------------------------------------------------------------------------------------------------- called by others


def _host(key: str) -> Host:
    from torch_ucx_rpc.reduction._site import site

    return site().hosts[key]


@rpc.functions.async_execution
def _push(push: Push) -> Future[Answer]:
    from torch_ucx_rpc.reduction._site import site

    host = site().hosts.get(push.key)
    if host is None:
        future: Future[Answer] = Future()
        future.set_result(Answer(UNKNOWN))
        return future
    return host.push(push, True)


# A new life of a host, which does not know of the server yet.
UNKNOWN = "unknown server"


def _kept(key: str, piece: str, number: int) -> list[Tensor] | None:
    from torch_ucx_rpc.reduction._site import site

    server = site().servers.get(key)
    if server is None:
        return None
    kept = server.kept.get(piece)
    return kept[1] if kept is not None and kept[0] == number else None


def _mirror(
    key: str,
    piece: str,
    origin: tuple[int, int | None, int],
    gradients: list[Tensor],
    all_: tuple[Spec, dict[str, Any]] | None,
) -> None:
    from torch_ucx_rpc.reduction._site import site

    if all_ is not None:
        site().open(all_[0])
    site().hosts[key].mirror(piece, origin, gradients, None if all_ is None else all_[1])


def _open(spec: Spec) -> str | None:
    """Make the host of a server, or find it made; a refusal if it was made otherwise."""
    from torch_ucx_rpc.reduction._site import site

    return site().open(spec)


@rpc.functions.async_execution
def _fill(key: str, piece: str, trainer: Trainer) -> Future[str]:
    return _host(key).fill(piece, trainer)


def _take_parameters(key: str, piece: str, parameters: list[Tensor]) -> None:
    _host(key).take_parameters(piece, parameters)


def _describe(key: str, piece: str) -> list[tuple[int, ...]] | None:
    return _host(key).describe(piece)


@rpc.functions.async_execution
def _enter(key: str, model: str, trainer: Trainer) -> Future[Entry]:
    return _host(key).enter(model, trainer)


def _expect(key: str, trainers: int, names: tuple[str, ...]) -> None:
    _host(key).expect(trainers, names)


def _hold(key: str, model: str, trainer: Trainer) -> None:
    _host(key).hold(model, trainer)


def _admit(key: str, trainer: Trainer, positions: dict[str, int]) -> None:
    _host(key).admit(trainer, positions)


def _leave(key: str, trainer: Trainer) -> None:
    _host(key).leave(trainer)


def _missing(key: str, piece: str) -> list[str]:
    return _host(key).missing(piece)
