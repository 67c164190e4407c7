"""What trainers and hosts tell each other: plain values, which travel by pickle."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ucx_rpc._workers.life import Life

OptimizerFactory = Callable[[list[Tensor]], torch.optim.Optimizer]

# For a worker to say what it knows of a step. One that hangs is not waited for.
ASKING_S = 2.0

# The refusal of a new life of a host, which does not know of the server yet.
UNKNOWN = "unknown server"
# The refusal of a host that leaves the group.
LEFT = "the host leaves"


class Trainer(NamedTuple):
    """One life of a worker that trains; sums are made in the order of ranks."""

    rank: int
    name: str
    life: int

    def __str__(self) -> str:
        return f"trainer {self.name!r} (rank {self.rank})"

    @classmethod
    def of(cls, life: Life) -> Trainer:
        """This worker."""
        return cls(life.info.id, life.info.name, life.number)


class Spec(NamedTuple):
    """What all trainers of a server must agree on; the first one's makes it."""

    name: str
    hosts: tuple[str, ...]
    # How many trainers the first round waits for, and which, where that is known.
    expected: int
    expected_names: tuple[str, ...] = ()
    optimizer: OptimizerFactory | None = None
    asynchronous: bool = False
    replica: bool = False
    checkpoint: str | None = None
    checkpoint_every: int = 100
    # The hosts are trainers.
    on_trainers: bool = False
    # Into how many parts work is spread: as many as there were hosts at first.
    shards: int = 1
    # How often all hosts were lost, so that other trainers became the hosts.
    generation: int = 0
    # As this trainer has been told of the trainers: their number, their names, or nothing.
    trainers: int | tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        """By which hosts know the server: a worker may be one of its hosts again in a later generation."""
        return f"{self.name}, generation {self.generation}" if self.generation else self.name

    def refusal(self, asked: Spec, has_begun: bool) -> str | None:
        """Why the server, whose first step may be over, is not the one that is asked for."""
        if not self._agrees_with(asked):
            own, other = str(self), str(asked)
        elif not has_begun and self._expects_others_than(asked):
            own, other = f"trainers={self.trainers}", f"trainers={asked.trainers}"
        else:
            return None
        return (
            f"the server {self.key!r} was made with {own}, and is asked for with {other}: all trainers must call serve "
            f"alike, or give the servers different names"
        )

    def _agrees_with(self, asked: Spec) -> bool:
        own, other = (
            spec._replace(optimizer=None, expected=0, expected_names=(), trainers=None) for spec in (self, asked)
        )
        return own == other and pickle.dumps(self.optimizer) == pickle.dumps(asked.optimizer)

    def _expects_others_than(self, asked: Spec) -> bool:
        own, other = self.trainers, asked.trainers
        if own is None or other is None:
            return False
        if isinstance(own, tuple) and isinstance(other, tuple):
            return set(own) != set(other)
        first, second = (told if isinstance(told, int) else len(told) for told in (own, other))
        return first != second

    def __str__(self) -> str:
        optimizer = "no optimizer" if self.optimizer is None else f"optimizer={self.optimizer!r}"
        return (
            f"{optimizer}, asynchronous={self.asynchronous}, replica={self.replica}, checkpoint={self.checkpoint!r}, "
            f"checkpoint_every={self.checkpoint_every}, hosts {', '.join(self.hosts)}"
        )

    def ring(self, shard: int) -> tuple[str, ...]:
        """The host of a shard, and then those that take over from it, in their order."""
        start = shard % len(self.hosts)
        return self.hosts[start:] + self.hosts[:start]


class Opened(NamedTuple):
    """What a host says when a trainer first comes to it."""

    # Why the trainer may not use the server.
    refusal: str | None
    # The hosts that trainers do not use any more, as far as this one knows.
    lost: tuple[str, ...] = ()
    # The host has not known the server before.
    is_new: bool = False


class Push(NamedTuple):
    """A piece, as a trainer sends it."""

    key: str
    piece: str
    shard: int
    trainer: Trainer
    # The round of the trainer; None for "the one that is open".
    at: int | None
    quorum: int | None
    # Of this trainer's pushes of this piece; a push that is repeated has the same.
    number: int
    # To another host, since the first one has been lost.
    is_repeated: bool
    tensors: list[Tensor]
    # Of the parameters on the server.
    origin: int | None = None


class Answer(NamedTuple):
    """The result of a push. With a refusal there is nothing else."""

    refusal: str | None
    next_round: int = 0
    # How many rounds the result is of: a late trainer gets the sum of all that it has missed.
    rounds: int = 1
    tensors: list[Tensor] | None = None
    # Other trainers may be sent the same tensors: they must not be written to.
    is_shared: bool = False
    # It is refused since the trainer has missed what nobody can tell.
    is_behind: bool = False


class Entry(NamedTuple):
    """Who gives a trainer the parameters of a model, if not itself; and whether it is one of the first."""

    donor: Trainer | None
    is_initial: bool
    # The host leaves: another one knows.
    is_leaving: bool = False


class Admission(NamedTuple):
    """A trainer is given the state by another one, or takes part again by itself: it is waited for from now on."""

    trainer: Trainer
    donor: Trainer
    # Of this trainer's requests for a state.
    request: int | None = None
    # In these it goes on from what the donor has.
    pieces: tuple[str, ...] = ()
    # An earlier host has been told so. What the trainer has missed since, this host knows, or nobody.
    is_repeated: bool = False


class Kept(NamedTuple):
    """What parameters a host has."""

    origin: int
    shapes: list[tuple[int, ...]]
    # The file that they have been restored from.
    restored_from: str | None = None


class Update(NamedTuple):
    """An update of the parameters of a piece, as the host that made it tells the one that keeps a replica."""

    key: str
    piece: str
    # The round that it completes; for an asynchronous server, how many updates there have been.
    number: int
    # The trainer's life and the number of its push, for an asynchronous server.
    life: int | None
    push: int
    gradients: list[Tensor]
    # In place of the gradients, for a host that has no replica yet: how to make the server, and all that there is.
    everything: tuple[Spec, dict[str, Any]] | None = None
