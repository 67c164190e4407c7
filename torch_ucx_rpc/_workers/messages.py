"""Members, epochs, and the messages with which the members of one epoch choose the next."""

from __future__ import annotations

from typing import NamedTuple


class Member(NamedTuple):
    """One membership. A worker that was left out and joins again gets another ``joined``."""

    rank: int
    name: str
    life: int
    joined: int = 0

    def __str__(self) -> str:
        return repr(self.name)


class Epoch(NamedTuple):
    """A number that no other epoch has, and the epoch's members by rank."""

    number: int
    members: tuple[Member, ...]
    decider: Member


# A ballot is (round, rank). Only the decider of an epoch uses round 0 of the next one.
Ballot = tuple[int, int]


class Beat(NamedTuple):
    """A member is alive. ``heard`` is the decider's time in its last answer."""

    number: int
    at: float
    heard: float


class Answer(NamedTuple):
    """The decider is alive. No epoch without the member begins for ``lease`` seconds after its ``beat``."""

    number: int
    beat: float
    at: float
    lease: float


class Prepare(NamedTuple):
    """A candidate asks for promises, and lists the dead members of the epoch."""

    epoch: Epoch
    ballot: Ballot
    dead: tuple[Member, ...]


class Promise(NamedTuple):
    """The sender will not accept a smaller ballot. ``accepted`` is the last proposal it has accepted, with its
    ballot."""

    number: int
    ballot: Ballot
    accepted: tuple[Ballot, Epoch] | None


class Refuse(NamedTuple):
    """The sender has promised a larger ballot."""

    number: int
    ballot: Ballot


class Propose(NamedTuple):
    """The epoch that is to follow ``after``."""

    after: Epoch
    ballot: Ballot
    epoch: Epoch
    at: float


class Accept(NamedTuple):
    """A vote for a proposal; ``at`` is the proposer's time in that proposal."""

    number: int
    ballot: Ballot
    at: float


class Chosen(NamedTuple):
    """An epoch that has begun."""

    epoch: Epoch


class Behind(NamedTuple):
    """The sender knows no later epoch than ``number``."""

    number: int


class Join(NamedTuple):
    """The sender is not a member, and wants to be one."""


class Found(NamedTuple):
    """The sender wants to found the group with this number, and asks the others to join no other group until it has."""

    number: int


class Free(NamedTuple):
    """The answer to ``asker``: the sender is not a member either. ``number`` is the largest epoch that the sender has
    heard of."""

    asker: Member
    number: int


class Over(NamedTuple):
    """``asker`` has founded the group, or no longer wants to."""

    asker: Member


class Leave(NamedTuple):
    """The sender wants to leave."""

    number: int


class Suspect(NamedTuple):
    """The sender cannot work with a member."""

    number: int
    member: Member


Message = (
    Beat
    | Answer
    | Prepare
    | Promise
    | Refuse
    | Propose
    | Accept
    | Chosen
    | Behind
    | Join
    | Found
    | Free
    | Over
    | Leave
    | Suspect
)


def epochs_in(message: Message) -> list[Epoch]:
    """Return the epochs that a message contains."""
    accepted = (message.accepted or ()) if isinstance(message, Promise) else ()
    return [part for part in (*message, *accepted) if isinstance(part, Epoch)]
