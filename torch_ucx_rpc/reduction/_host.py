"""The server's side of reduction: what a worker does that holds a shard of a server (`Host`).

A server is spread over hosts. Each host has pieces: a bucket of gradients, a part of one, or the parameters of a shard.
The trainers push a piece once in each round, and get back what all of them made of it, in the answer to that push.
Pieces know nothing of each other.

The way of one push: a trainer calls `push`, which finds the host, which finds the piece. The piece puts the tensors
into their round (`_piece`). When the round is complete its sum is divided (`_round`), or the parameters are updated
with it (`_parameters`), and all futures of the round get the answer.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable

import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from torch_ucx_rpc._observe.life import Life, PerLife
from torch_ucx_rpc._observe.lost import Gone
from torch_ucx_rpc.reduction._messages import (
    LEFT,
    UNKNOWN,
    Admission,
    Answer,
    Entry,
    Kept,
    Opened,
    Push,
    Spec,
    Trainer,
    Update,
)
from torch_ucx_rpc.reduction._parameters import ParameterPiece
from torch_ucx_rpc.reduction._piece import Piece
from torch_ucx_rpc.reduction._roster import NOWHERE, Copies, Roster


class Host:
    """A worker's part of one server.

    The lock of its roster guards all of it but the parameters, which have one for each piece. Futures are resolved
    without a lock: whoever waits for one may do anything.
    """

    def __init__(self, spec: Spec, life: Life) -> None:
        self._life = life
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
                piece = ParameterPiece(name, self._roster, self._life, self)
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

    # -- the other hosts, as a piece with parameters sees them

    def next_host(self) -> str | None:
        # One that was started anew keeps the replica, though trainers do not push to it.
        hosts, own_name = self.spec.hosts, self._life.info.name
        living = {info.name for info in self._life.living()} - {own_name}
        ring = self.spec.ring(hosts.index(own_name) if own_name in hosts else 0)
        return next((name for name in ring if name in living), None)

    def send_update(self, host: str, update: Update) -> Future[None]:
        sent: Future[None] = rpc.rpc_async(host, take_update, args=(update,))
        return sent


class Hosts:
    """The hosts on this worker, by the key of their server. Any thread may use it."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._lock = threading.Lock()
        self._hosts: dict[str, Host] = {}
        self._gone: list[Gone] = []
        life.watch(self._on_gone)
        life.before_leaving(self._close)

    def _close(self) -> None:
        with self._lock:
            hosts = list(self._hosts.values())
        for host in hosts:
            host.close()

    def __getitem__(self, key: str) -> Host:
        return self._hosts[key]

    def get(self, key: str) -> Host | None:
        return self._hosts.get(key)

    def open(self, spec: Spec, lost: Iterable[str] = (), trainer: Trainer | None = None) -> Opened:
        """Make the host of a server, or find it made; a refusal if it was made otherwise.

        ``lost``: the hosts that the trainer does not use any more. ``trainer``: who asks, if it is one.
        """
        with self._lock:
            host = self._hosts.get(spec.key)
            is_new = host is None
            if host is None:
                host = self._hosts[spec.key] = Host(spec, self._life)
                living = {info.name for info in self._life.living()}
                for gone in self._gone:
                    host.on_gone(gone.session, gone.name, has_successor=gone.name in living)
        if refusal := host.refusal(spec):
            return Opened(refusal)
        if trainer is not None:
            host.note_serve(trainer)
        return Opened(None, host.note_lost(lost), is_new)

    def close_unused(self, key: str) -> None:
        """Take back what `open` has made, unless a trainer has used it since."""
        with self._lock:
            if (host := self._hosts.get(key)) is not None and host.is_unused:
                del self._hosts[key]

    def _on_gone(self, gone: Gone) -> None:
        with self._lock:
            self._gone.append(gone)
            hosts = list(self._hosts.values())
        for host in hosts:
            host.on_gone(gone.session, gone.name)


hosts = PerLife(Hosts)


# --------------------------------------------------------------------------------------------- what other workers call


def open_host(spec: Spec, lost: tuple[str, ...], trainer: Trainer) -> Opened:
    return hosts().open(spec, lost, trainer)


def hosts_of(key: str) -> tuple[str, ...] | None:
    host = hosts().get(key)
    return None if host is None else host.spec.hosts


def is_newcomer(key: str, trainer: Trainer) -> bool:
    return hosts()[key].is_newcomer(trainer)


@rpc.functions.async_execution
def push(push: Push, is_owned: bool) -> Future[Answer]:
    return take_push(push, is_owned)


def take_push(push: Push, is_owned: bool) -> Future[Answer]:
    """The same here, without a call."""
    host = hosts().get(push.key)
    if host is None:
        future: Future[Answer] = Future()
        future.set_result(Answer(UNKNOWN))
        return future
    return host.push(push, is_owned)


def keep_copy(push: Push) -> None:
    """A trainer of this worker may write to the tensors of a push from now on, which may still wait to be added."""
    if (host := hosts().get(push.key)) is not None:
        host.keep_copy(push)


def take_update(update: Update) -> None:
    if update.everything is not None:
        hosts().open(update.everything[0])
    hosts()[update.key].parameters(update.piece).take_update(update)


@rpc.functions.async_execution
def fill(key: str, piece: str, trainer: Trainer) -> Future[str]:
    return hosts()[key].parameters(piece).fill(trainer)


@rpc.functions.async_execution
def take_parameters(key: str, piece: str, parameters: list[Tensor]) -> Future[None]:
    return hosts()[key].parameters(piece).take_parameters(parameters)


def kept(key: str, piece: str) -> Kept | None:
    return hosts()[key].parameters(piece).kept()


@rpc.functions.async_execution
def enter(key: str, model: str, trainer: Trainer) -> Future[Entry]:
    return hosts()[key].enter(model, trainer)


def expect(key: str, trainers: int, names: tuple[str, ...], is_all: bool = False) -> None:
    hosts()[key].expect(trainers, names, is_all)


def hold(key: str, model: str, trainer: Trainer) -> None:
    hosts()[key].hold(model, trainer)


def models(key: str) -> list[str]:
    return hosts()[key].models()


def hold_no_more(key: str, model: str, trainer: Trainer, request: int) -> None:
    if (host := hosts().get(key)) is not None:
        host.hold_no_more(model, trainer, request)


def admit(key: str, admission: Admission) -> None:
    hosts()[key].admit(admission)


def close_unused(key: str) -> None:
    hosts().close_unused(key)


def let_go(key: str, model: str, trainer: Trainer) -> None:
    hosts()[key].let_go(model, trainer)


def leave(key: str, trainer: Trainer) -> None:
    # One that was started anew may not know the server.
    if (host := hosts().get(key)) is not None:
        host.leave(trainer)


def absent(key: str, piece: str) -> list[str]:
    return hosts()[key].absent(piece)
