"""Exceptions of the callee keep their type on their way through torch's C++ futures.

torch pickles the type and the text of what a Python function raises, and its ``internal._handle_exception`` raises it
anew at the caller. Where a future lies between, as in ``rpc_sync`` and ``rpc_async``, torch keeps of that a
``std::runtime_error`` with the text (torch 2.13; a ValueError and a TypeError stay what they are). So what was raised
is remembered here by the text that it becomes, and the extension asks whenever a ``std::runtime_error`` is about to
become a Python exception.

It gets an exception of the original type that is a RuntimeError too. So ``except KeyError`` works, and so does the
``except RuntimeError`` of a program that was written for what torch makes of it.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import copyreg
import functools
import threading
from collections import OrderedDict
from typing import Any

from torch.distributed.rpc import internal

_torchs_handle_exception = internal._handle_exception

# Calls that have failed, each in its own way, and whose futures have not been asked yet. With more of them, the oldest
# are the RuntimeErrors that torch makes of them.
_MOST_REMEMBERED = 1024

# An exception that passes through nested calls doubles its text at each: torch writes its repr and its traceback, both
# with all that was before. Sixteen levels would be 100 MB. The end has the first cause.
_LONGEST_BEGINNING = 2 * 1024
_LONGEST_END = 30 * 1024

# By that text, what torch makes the exception of. Not the exception, whose traceback keeps everything in its frames.
_remembered: OrderedDict[str, Any] = OrderedDict()
_lock = threading.Lock()


def handle_exception(result: Any) -> None:
    """In the place of ``internal._handle_exception`` of torch: raises what the callee raised, if it did."""
    if isinstance(result, internal.RemoteException) and len(result.msg) > _LONGEST_BEGINNING + _LONGEST_END:
        result = result._replace(msg=_shortened(result.msg))
    try:
        _torchs_handle_exception(result)
    except Exception as error:
        # As pybind11 begins the text of a Python exception (error_already_set::what).
        text = f"{type(error).__name__}: {error}"
        with _lock:
            _remembered[text] = result
            _remembered.move_to_end(text)
            if len(_remembered) > _MOST_REMEMBERED:
                _remembered.popitem(last=False)
        raise


def _shortened(text: str) -> str:
    # Between lines: torch will decode escapes, which must not be cut in two.
    beginning = text[:_LONGEST_BEGINNING].rpartition("\n")[0]
    end = text[-_LONGEST_END:].partition("\n")[2]
    return f"{beginning}\n[... {len(text) - len(beginning) - len(end)} characters left out ...]\n{end}"


def original(text: str) -> Exception | None:
    """A new exception of the type that became a ``std::runtime_error`` with this text; None if a callee raised none."""
    if not _remembered:
        return None
    # What follows is where in this process it was raised for the first time.
    beginning, _, _ = text.rpartition("\n\nAt:\n")
    with _lock:
        result = _remembered.get(beginning)
    if result is None:
        return None
    try:
        _torchs_handle_exception(result._replace(exception_type=_that_is_a_runtime_error(result.exception_type)))
    except Exception as error:
        return error.with_traceback(None)
    return None


class _TypeOfBoth(type):
    """The type of the types that `_that_is_a_runtime_error` makes, for pickle to know them by."""


@functools.cache
def _that_is_a_runtime_error(exception_type: type[Exception]) -> type[Exception]:
    if issubclass(exception_type, RuntimeError):
        return exception_type
    names = {name: getattr(exception_type, name) for name in ("__module__", "__qualname__", "__doc__")}
    try:
        both: type = _TypeOfBoth(exception_type.__name__, (exception_type, RuntimeError), names)
    except TypeError:
        # Not every type can have a second base: its memory is laid out otherwise, or it has a metaclass.
        return exception_type
    return both


def reduce_type(both: _TypeOfBoth) -> tuple[Any, ...]:
    """For pickle: a worker may raise on what another one has raised. It goes on as the original type."""
    return _identity, (both.__bases__[0],)


def _identity(value: Any) -> Any:
    return value


copyreg.pickle(_TypeOfBoth, reduce_type)
