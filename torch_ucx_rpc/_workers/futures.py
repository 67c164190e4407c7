"""`fail`: futures that end with an exception, and keep nothing else alive."""

# mypy: allow-untyped-calls

from __future__ import annotations

import copy
import traceback
from typing import Any

from torch.distributed.rpc.internal import RemoteException
from torch.futures import Future

from torch_ucx_rpc._workers.lost import current_agent


def fail(future: Future[Any], error: BaseException) -> None:
    """Complete a future with an exception: ``Future.set_exception``, without a reference cycle.

    torch's futures are C++ objects, so Python's collector does not see the objects they keep. `set_exception` keeps the
    exception and raises that same object in every wait. Its traceback has the frames that it passed through, and the
    frames of the waiting threads. A frame that refers to the future closes a cycle that is never freed. Objects that
    these frames refer to stay too, such as tensors and agents of earlier lives. Here each wait raises a copy, and the
    kept exception has no traceback.

    A function with ``rpc.functions.async_execution`` may return the future. Its caller then gets the exception too,
    where `set_exception` would make the exception the result of the call.
    """
    _drop_tracebacks(error)

    def raise_copy(_: Any) -> None:
        raise _copy_of(error) from error.__cause__

    future._set_unwrap_func(raise_copy)
    future.set_result(_Failed(error))


def answer_of(error: BaseException) -> RemoteException:
    """Return what torch sends in place of a result when a function has raised this exception."""
    text = "".join(traceback.format_exception(error))
    return RemoteException(f"On {current_agent().get_worker_info()}:\n{error!r}\n{text}", type(error))


class _Failed:
    """The value of a future that has failed. It travels as `answer_of` the exception."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteException, tuple(answer_of(self._error))

    def __str__(self) -> str:
        # DDP puts the value of a hook's failed future into its own error.
        return str(self._error)


def _drop_tracebacks(error: BaseException) -> None:
    """Drop the traceback of an exception, and those of its causes and contexts."""
    open_: list[BaseException | None] = [error]
    seen: set[int] = set()
    while open_:
        one = open_.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            open_ += [one.__cause__, one.__context__]


def _copy_of(error: BaseException) -> BaseException:
    try:
        made = copy.copy(error)
    except Exception:
        # An exception of a type that cannot be copied.
        return error
    return made if type(made) is type(error) else error
