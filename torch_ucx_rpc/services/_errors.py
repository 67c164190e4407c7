"""What the services raise: RuntimeErrors, as all of RPC's, with types of their own."""

from __future__ import annotations

from torch_ucx_rpc._workers.lost import was_raised_there


class NameTaken(RuntimeError):
    """A name cannot be registered: the text says which worker has it, and what to do."""


class NameContested(RuntimeError):
    """Two workers that have lost each other offer what only one may: the text says which, and what to do."""


class UnknownName(LookupError, RuntimeError):
    """Nobody offers the name, or plays the role: the text says which names come close."""


class NotServed(LookupError, RuntimeError):
    """The worker that was called does not offer the name, or not any more; nothing has been executed."""


class NotAMember(RuntimeError):
    """The worker that was called offers the name to the members of a group, and the caller is none."""


class ReplicasLost(RuntimeError):
    """The workers that were called have been lost, or have left, before they answered."""


def contested(name: str, owners: list[str]) -> NameContested:
    return NameContested(
        f"the name {name!r} has several owners, and may have one: {', '.join(owners)}. They have lost each other, in a "
        f"cut of the network or since one was stopped for long, and each side has decided for itself: have one of them "
        f"unregister it, or end"
    )


def text_of_not_served(worker: str, name: str) -> str:
    return f"worker {worker!r} offers no {name!r}"


def was_not_served(error: BaseException, worker: str, name: str) -> bool:
    """True if this worker refused this name before it executed anything: not what it called itself."""
    return was_raised_there(error, NotServed) and text_of_not_served(worker, name) in str(error)
