"""What the services raise: RuntimeErrors, as all of RPC's, with types of their own."""

from __future__ import annotations

from torch_ucx_rpc._workers.lost import was_raised_there


class NameTaken(RuntimeError):
    """A name cannot be registered: the text says which worker has it, and what to do."""


class UnknownName(LookupError, RuntimeError):
    """No worker offers the name, or has the role: the text says which names come close."""


class NotServed(LookupError, RuntimeError):
    """The called worker does not offer the name, or no longer; it has executed nothing."""


class ReplicasLost(RuntimeError):
    """The called workers were lost, or have left, before they answered."""


def text_of_not_served(worker: str, name: str) -> str:
    return f"worker {worker!r} offers no {name!r}"


def was_not_served(error: BaseException, worker: str, name: str) -> bool:
    """True if this worker refused this name itself. A service that it executed may have raised the same type."""
    return was_raised_there(error, NotServed) and text_of_not_served(worker, name) in str(error)
