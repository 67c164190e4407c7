"""What trainers, hosts and the decider of an epoch tell each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

OptimizerFactory = Callable[[list[Any]], Any]

# In the place of a step or a generation: there has been none.
NEVER = -1
# A generation is the number of an epoch with the number of an attempt in its low bits.
_ATTEMPTS = 20


def channel_of(key: str) -> str:
    """The channel that carries the gradients and means of a model."""
    return f"reduction/{key}"


def server_of(key: str) -> str:
    """The server of a model, whose key is ``server/model``."""
    return key.rpartition("/")[0]


def generation(epoch: int, attempt: int) -> int:
    return epoch << _ATTEMPTS | attempt


class Spec(NamedTuple):
    """What `serve` was told, by every trainer alike."""

    name: str
    hosts: tuple[str, ...]
    # How many trainers the first step waits for, or which.
    expected: int | tuple[str, ...]
    # Makes the optimizer of a server that updates, as pickled bytes: factories do not compare.
    optimizer: bytes | None
    checkpoint: str | None
    checkpoint_every: int


class Report(NamedTuple):
    """Where a trainer stands in a model.

    Trainers with the same ``step`` and ``committed`` have the same state.
    """

    # Of several reports of one trainer, the largest number counts.
    number: int
    # The step that it is in; NEVER if it has no state.
    step: int = NEVER
    # The generation in which the step before was closed, or the model was begun.
    committed: int = NEVER
    # The generation in which it has all means of its step.
    prepared: int = NEVER
    # What it has put up to this generation does not count: its backward failed, or its time was over.
    void: int = NEVER
    # It has all gradients of its step.
    is_ready: bool = False
    # It takes the state of another in the middle of its step, so its gradients do not count.
    is_late: bool = False
    has_left: bool = False
    quorum: int | None = None
    expected: int | tuple[str, ...] = 1


class Kept(NamedTuple):
    """Where the parameters stand that a host keeps."""

    step: int
    committed: int
    shards: tuple[int, ...]


class Knowledge(NamedTuple):
    """What a member knows when an epoch begins."""

    servers: dict[str, Spec]
    # The servers that it has left.
    left: frozenset[str]
    # By model.
    reports: dict[str, Report]
    kept: dict[str, Kept]


class Opening(NamedTuple):
    """The decider has opened a step of a model; it goes on with the next steps as they are closed.

    It also tells that the step before was closed, in the generation ``committed``.
    """

    key: str
    generation: int
    step: int
    committed: int
    # In the order of ranks, in which gradients are added. With a quorum there are none before they have come.
    contributors: tuple[str, ...]
    # Those, and the late ones, which get the means and put nothing.
    recipients: tuple[str, ...]
    # Those that have the state at the beginning of the step.
    donors: tuple[str, ...]
    # The host of each shard.
    hosts: tuple[str, ...]
    spec: Spec
    # A trainer whose gradients do not fit ("" for all), and why.
    refusal: tuple[str, str] | None = None
    # No trainer is left.
    is_over: bool = False

    @property
    def epoch(self) -> int:
        return self.generation >> _ATTEMPTS


def hosts_of(spec: Spec, living: Iterable[str], kept: dict[str, Kept]) -> tuple[str, ...]:
    """The host of each shard, of those that are left; none where trainers share the work.

    Of a shard whose parameters several hosts have, it is the one that is furthest.
    """
    names = [name for name in spec.hosts if name in living]
    if spec.optimizer is None or not names:
        return tuple(names)
    hosts = []
    for shard in range(len(spec.hosts)):
        having = [(known.step, name) for name, known in kept.items() if shard in known.shards]
        ring = spec.hosts[shard:] + spec.hosts[:shard]
        hosts.append(max(having)[1] if having else next(name for name in ring if name in names))
    return tuple(hosts)
