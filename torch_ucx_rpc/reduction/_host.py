"""The server's side of reduction: what a worker does that holds a shard of a server (`Host`).

A server is spread over hosts. Each host has pieces: a bucket of gradients, a part of one, or the parameters of a shard.
The trainers push a piece once in each round, and get back what all of them made of it, in the answer to that push.
Pieces know nothing of each other.

The way of one push: a trainer calls `push` (`_hosts`), which finds the host, which finds the piece. The piece puts the
tensors into their round (`_piece`). When the round is complete its sum is divided (`_round`), or the parameters are
updated with it (`_parameters`), and all futures of the round get the answer.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch.futures import Future

from torch_ucx_rpc._workers.life import Life
from torch_ucx_rpc.reduction._messages import LEFT, Admission, Answer, Entry, Push, Spec, Trainer
from torch_ucx_rpc.reduction._parameters import OtherHosts, ParameterPiece
from torch_ucx_rpc.reduction._piece import Piece
from torch_ucx_rpc.reduction._roster import NOWHERE, Copies, Roster


class Host:
    """A worker's part of one server.

    The lock of its roster guards all of it but the parameters, which have one for each piece. Futures are resolved
    without a lock: whoever waits for one may do anything.
    """

    def __init__(self, spec: Spec, life: Life, others: OtherHosts) -> None:
        self._life = life
        self._others = others
        self._roster = Roster(spec)
        self._copies = Copies(self._roster)
        self._pieces: dict[str, Piece] = {}
        self._is_closed = False

    @property
    def spec(self) -> Spec:
        return self._roster.spec

    @property
    def is_unused(self) -> bool:
        """Whether no trainer has done anything here yet."""
        with self._roster.lock:
            return not (self._pieces or self._roster.trainers)

    def refusal(self, spec: Spec) -> str | None:
        """Why a trainer may not use the server, if it asks for another one than has been made."""
        return self.spec.refusal(spec, self._roster.has_begun)

    def note_serve(self, trainer: Trainer) -> None:
        """A worker has called serve: it is a trainer."""
        with self._roster.lock:
            self._roster.note_serve(trainer.life)

    def is_newcomer(self, trainer: Trainer) -> bool:
        """Whether a trainer comes after the first round, which has not waited for it."""
        with self._roster.lock:
            return self._roster.is_newcomer(trainer)

    # -- who is there

    def on_gone(self, life: int, name: str, has_successor: bool = False) -> None:
        """A worker has ended. ``has_successor``: another one of that name is the host, or expected."""
        with self._roster.lock:
            if name in self.spec.hosts and not has_successor:
                self._roster.lost_hosts.add(name)
                for piece in self._pieces.values():
                    piece.forget_host(name)
            self._roster.on_gone(life, name, has_successor)
            self._forget(life)
        self._advance_all()

    def close(self) -> None:
        """This worker leaves: all who wait here go to another host."""
        with self._roster.lock:
            self._is_closed = True
            pushes = [future for piece in self._pieces.values() for future in piece.close()]
            entered = self._copies.close()
        for push in pushes:
            push.set_result(Answer(LEFT))
        for waiting in entered:
            waiting.set_result(NOWHERE)

    def note_lost(self, names: Iterable[str]) -> tuple[str, ...]:
        """Hosts that a trainer has lost; all that are known to be."""
        own_name = self._life.info.name
        with self._roster.lock:
            self._roster.lost_hosts.update(name for name in names if name != own_name)
            return tuple(sorted(self._roster.lost_hosts))

    def leave(self, trainer: Trainer) -> None:
        """A trainer takes part no more."""
        with self._roster.lock:
            self._roster.leave(trainer)
            self._forget(trainer.life)
        self._advance_all()

    def let_go(self, model: str, trainer: Trainer) -> None:
        """A trainer has no copy of a model any more, and may train others."""
        with self._roster.lock:
            self._roster.let_go(model, trainer)
            self._copies.let_go(model, trainer)
            if not self._roster.awaited(model):
                # Nobody trains it any more.
                self._pieces = {name: piece for name, piece in self._pieces.items() if piece.model != model}
        self._advance_all()

    def _forget(self, life: int) -> None:
        self._copies.forget(life)
        for piece in self._pieces.values():
            piece.forget(life)

    def _advance_all(self) -> None:
        with self._roster.lock:
            entered = self._copies.take_entered()
            pieces = list(self._pieces.values())
        for waiting, entry in entered:
            waiting.set_result(entry)
        for piece in pieces:
            piece.advance_all()

    def expect(self, trainers: int, names: tuple[str, ...], is_all: bool) -> None:
        """Have the first round wait for so many trainers, or also for these; with ``is_all``, for these alone."""
        with self._roster.lock:
            self._roster.expect(trainers, names, is_all)
        self._advance_all()

    def admit(self, admission: Admission) -> None:
        """Wait for a trainer from now on."""
        trainer, donor = admission.trainer, admission.donor
        with self._roster.lock:
            if self._roster.is_gone(trainer) or self._roster.has_given_up(trainer, admission.request):
                return
            self._roster.count_with(trainer, donor)
            for name in admission.pieces:
                self._piece(name).admit(trainer, None if admission.is_repeated else donor)

    def enter(self, model: str, trainer: Trainer) -> Future[Entry]:
        """From whom a trainer gets the parameters of its copy of a model."""
        future: Future[Entry] = Future()
        with self._roster.lock:
            entered = [(future, NOWHERE)] if self._is_closed else self._copies.enter(model, trainer, future)
        for waiting, entry in entered:
            waiting.set_result(entry)
        return future

    def hold(self, model: str, trainer: Trainer) -> None:
        """A trainer has a copy of a model now, and can give it to others."""
        with self._roster.lock:
            entered = self._copies.hold(model, trainer)
        for waiting, entry in entered:
            waiting.set_result(entry)

    def models(self) -> list[str]:
        """The models of which some trainer has a copy."""
        with self._roster.lock:
            return self._copies.held()

    def hold_no_more(self, model: str, trainer: Trainer, request: int) -> None:
        """A trainer's copy of a model is behind, or it has not got one in time: nobody waits for it.

        ``request``: its last one, for which another trainer may admit it still.
        """
        with self._roster.lock:
            self._copies.let_go(model, trainer)
            self._roster.give_up(trainer, request)
        self._advance_all()

    def absent(self, piece: str) -> list[str]:
        """The trainers that are missing in the oldest open round of a piece."""
        with self._roster.lock:
            known = self._pieces.get(piece)
            return [] if known is None else known.absent()

    # -- pieces

    def _piece(self, name: str) -> Piece:
        """The caller holds the lock."""
        piece = self._pieces.get(name)
        if piece is None:
            if self.spec.optimizer is None:
                piece = Piece(name, self._roster, self._life)
            else:
                piece = ParameterPiece(name, self._roster, self._life, self._others)
            self._pieces[name] = piece
        return piece

    def push(self, push: Push, is_owned: bool) -> Future[Answer]:
        """Take a trainer's tensors. ``is_owned``: they are memory of this process that nobody else reads."""
        with self._roster.lock:
            if self._is_closed:
                future: Future[Answer] = Future()
                future.set_result(Answer(LEFT))
                return future
            piece = self._piece(push.piece)
            own_name = self._life.info.name
            passed = set(itertools.takewhile(lambda name: name != own_name, self.spec.ring(push.shard)))
            self._roster.lost_hosts |= passed
        return piece.push(push, is_owned, takes_over=bool(passed) or self.spec.generation > 0)

    def keep_copy(self, push: Push) -> None:
        with self._roster.lock:
            piece = self._pieces.get(push.piece)
        if piece is not None:
            piece.keep_copy(push.trainer)

    def parameters(self, name: str) -> ParameterPiece:
        """A piece of a server with an optimizer."""
        with self._roster.lock:
            piece = self._piece(name)
        assert isinstance(piece, ParameterPiece)
        return piece
