"""`fail`: futures that end with an exception, and keep nothing else alive."""

# mypy: allow-untyped-calls

from __future__ import annotations

import copy
from typing import Any

from torch.futures import Future


def fail(future: Future[Any], error: BaseException) -> None:
    """Complete a future with an exception: ``Future.set_exception``, without a reference cycle.

    torch's futures are C++ objects, so Python's collector does not see the objects they keep. `set_exception` keeps the
    exception and raises that same object in every wait. Its traceback has the frames that it passed through, and the
    frames of the waiting threads. A frame that refers to the future closes a cycle that is never freed. Objects that
    these frames refer to stay too, such as tensors and agents of earlier lives. Here each wait raises a copy, and the
    kept exception has no traceback.
    """
    _drop_tracebacks(error)

    def raise_copy(_: Any) -> None:
        raise _copy_of(error) from error.__cause__

    future._set_unwrap_func(raise_copy)
    future.set_result(error)


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
