"""Exceptions of the services: RuntimeErrors like all of RPC's, with types of their own."""

from __future__ import annotations

from torch_ucx_rpc._workers.lost import was_raised_there


class NameTaken(RuntimeError):
    """A name cannot be registered: the message names its owner and the remedy."""


class UnknownName(LookupError, RuntimeError):
    """No worker offers the name, or has the role: the message lists similar names."""


class NotServed(LookupError, RuntimeError):
    """The called worker does not offer the name (any more), and has executed nothing.

    Raised by the futures of `call_role` and of some `call_async`, and by a reference that `get` has returned. `call`
    tries another replica instead.
    """


class ReplicasLost(RuntimeError):
    """The called workers were lost, have left, or have withdrawn the name, before they answered."""


def text_of_not_served(worker: str, name: str) -> str:
    return f"worker {worker!r} offers no {name!r}"


def was_not_served(error: BaseException, worker: str, name: str) -> bool:
    """Tell whether this worker has refused the name. A service may raise the same type, so the text must fit too."""
    return was_raised_there(error, NotServed) and text_of_not_served(worker, name) in str(error)
