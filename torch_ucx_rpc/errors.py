"""The exceptions of calls that fail, apart from exceptions that the called function raises.

All are `RpcError`, and so RuntimeError: code that was written for torch's own agent catches them as before. The text of
an exception is one sentence, or a few, for a person; its attributes are for programs. An attribute is None where this
worker does not know its value.

Exceptions that the called function raises keep their own type. Wrong arguments are TypeError and ValueError.

Example::

    >>> try:
    ...     rpc.rpc_sync("ps", pull)
    ... except torch_ucx_rpc.errors.WorkerLost as error:
    ...     print(error.name, "on", error.host, "is lost:", error.cause)
    ... except torch_ucx_rpc.errors.CallTimedOut:
    ...     retry()

An exception that passes through a further worker keeps its type and its sentence. Its attributes are None then, since
torch sends only the type and the text of an exception.
"""

from __future__ import annotations

import inspect

__all__ = [
    "BarrierFailed",
    "CallTimedOut",
    "EpochEnded",
    "ForkedProcess",
    "JoinFailed",
    "JoinTimedOut",
    "MessageNotSent",
    "MessageRefused",
    "NotRunning",
    "OutOfResources",
    "RRefLost",
    "RpcError",
    "ShutDown",
    "UnknownWorker",
    "WorkerLeft",
    "WorkerLost",
]


class RpcError(RuntimeError):
    """A call, or another operation of RPC, that failed; the base of the exceptions of this module.

    Attributes:
        name (str | None): name of the other worker, such as the callee.
        rank (int | None): its rank.
        host (str | None): name of its host.
        cause (str | None): the reason that the sentence gives, such as "its process has ended".
    """

    name: str | None = None
    rank: int | None = None
    host: str | None = None
    cause: str | None = None

    # torch rebuilds the exception of a callee from its type and its text alone.
    def __init__(self, sentence: str = "", **attributes: object) -> None:
        super().__init__(sentence)
        if unknown := attributes.keys() - _attributes_of(type(self)):
            raise TypeError(f"{type(self).__name__} has no attribute {', '.join(sorted(unknown))}")
        vars(self).update(attributes)


class WorkerLost(RpcError):
    """The called worker has died, or cannot be reached any more. A lost worker stays lost."""


class WorkerLeft(RpcError):
    """The called worker has announced its end: it has shut down RPC, has left the group, or is about to leave it."""


class ShutDown(RpcError):
    """RPC has been shut down on this worker, before the call or before its answer."""


class NotRunning(RpcError):
    """RPC does not run in this process, or not with the backend UCX where that is needed: call ``init_rpc`` first."""


class CallTimedOut(RpcError, TimeoutError):
    """No answer came within the call's timeout, or no value, or room for one, within that of a channel.

    The callee may still run the function.

    Attributes:
        timeout (float | None): the timeout of the call or of the channel, in seconds.
    """

    timeout: float | None = None


class MessageRefused(RpcError):
    """A worker has refused a request, an answer or a value of a channel that arrived.

    Either it is malformed, or its content differs from the content that the sender sealed with the secret of the job.
    """


class MessageNotSent(RpcError):
    """The request could not be sent, though the worker is not known to be lost; a later call may succeed."""


class OutOfResources(RpcError):
    """A worker ran out of a resource that the call needs; it goes on with other calls.

    Attributes:
        resource (str | None): ``"memory"``, ``"files"`` (open files) or ``"threads"``.
    """

    resource: str | None = None


class UnknownWorker(RpcError):
    """No worker of the group has the name, or the rank, that was called."""


class RRefLost(RpcError):
    """The RRef has no value: the worker that was to make it is gone or has refused, or ``rpc.remote`` timed out.

    `name`, `rank` and `host` are those of that worker, where they are known.
    """


class BarrierFailed(RpcError):
    """Some worker did not come to a point where all workers meet, such as a graceful ``shutdown``."""


class EpochEnded(RpcError):
    """A value of a channel belongs to an epoch that is over, here or at its receiver.

    Attributes:
        group (str | None): the group of the channel.
        epoch (int | None): the epoch that the worker `name` is in; None if it has closed the channel, or the epoch is
            not known.
    """

    group: str | None = None
    epoch: int | None = None


class ForkedProcess(RpcError):
    """RPC was used in a process that was forked from a worker, without ``init_rpc`` of its own."""


class JoinFailed(RpcError):
    """``init_rpc`` has failed, and can be called again.

    Either the workers do not fit together: a rank, a name, the world size, a version, or a secret. Or there is no Store
    where they could meet. Or this process does not allow RPC: its settings of UCX, its limits, a port in use, a missing
    package or GPU. Or RPC runs already: then call ``shutdown`` first.
    """


class JoinTimedOut(JoinFailed, TimeoutError):
    """Within ``init_rpc``'s ``init_timeout`` other workers have not come, or the Store could not be reached.

    Attributes:
        timeout (float | None): the ``init_timeout``, in seconds.
        missing (tuple[int, ...] | None): the ranks that have not come, in ascending order; None if the Store could not
            be reached.
    """

    timeout: float | None = None
    missing: tuple[int, ...] | None = None


# The kinds of errors in C++, and the exceptions that they become. Python raises the other exceptions itself. The
# comments name the sentences in csrc, and the attributes that come with them. Further attributes are name, rank and
# host of the worker that the sentence is about.
KINDS: dict[str, type[RpcError]] = {
    # "lost worker ...: it has died or cannot be reached any more (<cause>)"; cause
    "worker_lost": WorkerLost,
    # "worker ... has shut down its RPC agent", "... has left the group", "... is leaving the group"
    "worker_left": WorkerLeft,
    # "RPC was shut down on worker ... before worker ... answered", "RPC has been shut down on this worker",
    # "RPC is not running on worker ...: it has been shut down, ..."; the worker is the callee. Without a callee: "RPC
    # has been shut down on worker ...", "RPC was shut down on worker ... while it waited for the others"
    "shut_down": ShutDown,
    # torch's "RPC ran for more than set timeout (... ms) and will now be marked with an error", "; called worker ...".
    # Channels: "tag ... of channel ... could not be put within ... ms: ...", "no value has come from worker ...".
    # timeout, in seconds
    "timed_out": CallTimedOut,
    # ErrorCode::kProtocol: "the answer of worker ... is unreadable: <cause>", "the value of worker ... under tag ... is
    # unreadable: <cause>", "malformed message: ...", "a message of worker ... has arrived with another content than it
    # was sealed with"; cause
    "message_refused": MessageRefused,
    # "could not send to worker ...: <cause>", with any code but those of the next entry; cause
    "not_sent": MessageNotSent,
    # ErrorCode::kOutOfMemory and kOutOfFiles, "the system has no thread left for RPC": "could not send to ...", "could
    # not receive the answer of ...: <cause>"; cause, and resource: "memory", "files", "threads"
    "out_of_resources": OutOfResources,
    # "could not find destination worker ..."; name or rank, as it was called
    "unknown_worker": UnknownWorker,
    # "this RRef will never have a value: <cause>"; cause
    "rref_lost": RRefLost,
    # "the shutdown is over, but not all workers have come to it: <cause>"; cause. "worker ... waited ... ms for all
    # workers to come to the same point; missing: ...", "worker ... has tried to leave the group for ... ms: ..."
    "barrier_failed": BarrierFailed,
    # "RPC cannot be used in a process that was forked from worker ..."
    "forked": ForkedProcess,
    # "worker ... is in epoch ... of channel ...", "worker ... has closed channel ..."; group, epoch
    "epoch_ended": EpochEnded,
}


def from_native(kind: str, what: str, fields: dict[str, object]) -> RpcError | None:
    """For the extension: the exception that a C++ error becomes.

    Args:
        kind: a key of `KINDS`.
        what: the sentence, which becomes the text of the exception unchanged.
        fields: attributes by name. Names that the exception does not have are ignored: a mistake here must not hide the
            error itself. Empty texts mean unknown.

    Returns None for a kind that is not in `KINDS`; the error then becomes a RuntimeError.
    """
    found = KINDS.get(kind)
    if found is None:
        return None
    known = _attributes_of(found)
    return found(what, **{name: value for name, value in fields.items() if name in known and value not in (None, "")})


def _attributes_of(kind: type[RpcError]) -> set[str]:
    return {name for base in kind.__mro__ if issubclass(base, RpcError) for name in inspect.get_annotations(base)}
