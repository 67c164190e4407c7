"""Messages between the trainers, hosts and decider of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

OptimizerFactory = Callable[[list[Any]], Any]

# Stands for "no step yet" and "no generation yet".
NEVER = -1
# A generation is the number of an epoch with the number of an attempt in its low bits. With a quorum each step is an
# attempt: at 1,000 steps a second an epoch may last for half a year. 29 bits are left for epochs: a group can be
# founded again 500 times (epochs._STRIDE).
_ATTEMPTS = 34


# The beginning of the names of all channels of models.
CHANNELS = "reduction/"


def channel_of(key: str) -> str:
    """The channel that carries the gradients and means of a model."""
    return f"{CHANNELS}{key}"


def server_of(key: str) -> str:
    """The server of a model, whose key is ``server/model``."""
    return key.rpartition("/")[0]


def generation(epoch: int, attempt: int) -> int:
    return epoch << _ATTEMPTS | attempt


class Spec(NamedTuple):
    """The arguments of `serve`, equal in all trainers."""

    name: str
    hosts: tuple[str, ...]
    # The number or the names of the trainers that the first step waits for.
    expected: int | tuple[str, ...]
    # Makes the optimizer of a server that updates, as pickled bytes: factories cannot be compared.
    optimizer: bytes | None
    checkpoint: str | None
    checkpoint_every: int


class Report(NamedTuple):
    """The step of a trainer in a model, and its progress in it.

    Trainers with the same ``step`` and ``committed`` have the same state.
    """

    # Of several reports of one trainer, the largest number counts.
    number: int
    # The trainer's step; NEVER if it has no state.
    step: int = NEVER
    # The generation in which the previous step was closed, or the model was begun.
    committed: int = NEVER
    # The generation in which the trainer has all means of its step.
    prepared: int = NEVER
    # The trainer's gradients in this generation do not count: its backward failed, or its time was over.
    void: int = NEVER
    # The trainer has all gradients of its step.
    is_ready: bool = False
    # The step and commit of the trainer's parameters, if it has no state, since the others had a later state.
    former: tuple[int, int] = (NEVER, NEVER)
    # The trainer takes a later state in the middle of its step, so its gradients do not count.
    is_late: bool = False
    has_left: bool = False
    quorum: int | None = None
    expected: int | tuple[str, ...] = 1


class Kept(NamedTuple):
    """The step of the parameters that a host keeps."""

    step: int
    committed: int
    shards: tuple[int, ...]


class Knowledge(NamedTuple):
    """The knowledge of a member when an epoch begins."""

    servers: dict[str, Spec]
    # Servers that the member has left.
    left: frozenset[str]
    # Reports by model.
    reports: dict[str, Report]
    kept: dict[str, Kept]


class Opening(NamedTuple):
    """The decider has opened a step of a model. While the contributors and recipients stay the same, later steps go on
    in this generation. With a quorum, each step has a new generation.

    It also says that the previous step was closed, in the generation ``committed``.
    """

    key: str
    generation: int
    step: int
    committed: int
    # Trainers in the order of ranks, in which hosts add gradients. With a quorum, empty until enough of them are ready.
    contributors: tuple[str, ...]
    # The contributors, and late trainers, which get the means and put nothing.
    recipients: tuple[str, ...]
    # The trainers that have the state at the beginning of the step.
    donors: tuple[str, ...]
    # The host of each shard.
    hosts: tuple[str, ...]
    spec: Spec
    # The trainer whose gradients do not fit, or "" if a host cannot sum, and why.
    refusal: tuple[str, str] | None = None
    # No trainer is left.
    is_over: bool = False

    @property
    def epoch(self) -> int:
        return self.generation >> _ATTEMPTS


def hosts_of(spec: Spec, living: Iterable[str], kept: dict[str, Kept], may_keep: bool = False) -> tuple[str, ...]:
    """Return the living host of each shard; none if trainers share the work.

    If several hosts have the parameters of a shard, this takes the one with the latest step. If none has them, and
    ``may_keep`` says that a silent host may, there are no hosts: the shard waits for that host.
    """
    names = [name for name in spec.hosts if name in living]
    if spec.optimizer is None or not names:
        return tuple(names)
    hosts = []
    for shard in range(len(spec.hosts)):
        having = [(known.step, name) for name, known in kept.items() if shard in known.shards]
        if not having and may_keep:
            return ()
        ring = spec.hosts[shard:] + spec.hosts[:shard]
        hosts.append(max(having)[1] if having else next(name for name in ring if name in names))
    return tuple(hosts)
