"""What the services raise: RuntimeErrors, as all of RPC's, with types of their own."""

from __future__ import annotations

from torch_ucx_rpc._observe.lost import was_raised_there


class NameTaken(RuntimeError):
    """A name cannot be registered: the text says which worker has it, and what to do."""


class UnknownName(LookupError, RuntimeError):
    """Nobody offers the name, or plays the role: the text says which names come close."""


class NotServed(LookupError, RuntimeError):
    """The worker that was called does not offer the name, or not any more; nothing has been executed."""


class NotAMember(RuntimeError):
    """The worker that was called offers the name to the members of a group, and the caller is none."""


class ReplicasLost(RuntimeError):
    """The workers that were called have been lost, or have left, before they answered."""


def was_not_served(error: BaseException) -> bool:
    """True if the callee refused the name before it executed anything."""
    return was_raised_there(error, NotServed)
