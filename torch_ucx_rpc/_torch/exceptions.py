"""Exceptions of the callee keep their type on their way through torch's C++ futures.

torch pickles the type and the text of an exception of a Python function. At the caller, torch's
``internal._handle_exception`` raises it again. If a future lies between, as in ``rpc_sync`` and ``rpc_async``, torch
keeps only a ``std::runtime_error`` with the text (torch 2.13; ValueError and TypeError keep their types). So this
module remembers the exception by the text that it becomes. The extension asks for it when a ``std::runtime_error`` is
about to become a Python exception.

This module makes an exception of the original type that is a RuntimeError too. So ``except KeyError`` works, and so
does the ``except RuntimeError`` of programs that were written for torch's own agent.

Arguments that the callee cannot unpickle count as an exception of the function. torch alone would send the text, and
forget the RRef that the call was to make.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import pickle
import re
import threading
from collections import OrderedDict
from typing import Any, NoReturn

from torch.distributed.rpc import internal

from torch_ucx_rpc import errors

_torchs_handle_exception = internal._handle_exception
_torchs_deserialize = internal.deserialize

# Limit of the remembered exceptions. Once the oldest is dropped, a future that fails with its text raises torch's
# RuntimeError.
_MOST_REMEMBERED = 1024

# Each nested call doubles the text of an exception that passes through: torch writes the exception's repr and
# traceback, and both contain the earlier text. Sixteen levels would be 100 MB. The first cause is at the end.
_LONGEST_BEGINNING = 2 * 1024
_LONGEST_END = 30 * 1024

# torch decodes escapes in the text, since the repr of an exception has some. But it fails at other backslashes, as in
# "C:\\Users", and makes several letters of Latin-1 of each letter beyond ASCII. So these become escapes first.
_NOT_DECODABLE = re.compile(r"""(?P<escape>\\[\\'"nrt])|(?P<lost>[\0\ud800-\udfff])|\\|[^\0-\x7f]""")

# The answer of an RRef owner's agent, made without a Python function. torch sends the text alone.
_NO_VALUE = r"(?s)(Error on Node \d+: )?this RRef will never have a value: (?P<cause>.*)"

# The agent's sentences about a worker that is gone. torch keeps only the sentence if rpc.remote() fails at once.
_WORKER = r"worker '(?P<name>[^']*)' \(rank (?P<rank>\d+), pid \d+ on (?P<host>[^)]*)\)"
_LOST = rf"(?s)lost {_WORKER}: it has died or cannot be reached any more \((?P<cause>.*)\)"
_LEFT = rf"{_WORKER} (has left the group|is leaving the group|has shut down its RPC agent)"

# torch's error for any use of an RRef that torch or the agent has marked as timed out.
_NO_OBJECT = "RRef creation via rpc.remote() timed out"

# torch's descriptions of exceptions, by text. The exceptions themselves would keep the frames of tracebacks alive.
_remembered: OrderedDict[str, Any] = OrderedDict()
_lock = threading.Lock()


def handle_exception(result: Any) -> None:
    """Replaces torch's ``internal._handle_exception``: raises the exception of the callee, if ``result`` is one."""
    # In `to_here`, torch drops ``result`` without the GIL, so the traceback must keep it alive: leave the name to it.
    readable = result
    if isinstance(result, internal.RemoteException):
        text = result.msg if len(result.msg) <= _LONGEST_BEGINNING + _LONGEST_END else _shortened(result.msg)
        readable = result._replace(msg=_NOT_DECODABLE.sub(_escaped, text))
    try:
        _torchs_handle_exception(readable)
    except Exception as error:
        # The beginning of pybind11's text for a Python exception (error_already_set::what).
        text = f"{type(error).__name__}: {error}"
        with _lock:
            _remembered[text] = readable
            _remembered.move_to_end(text)
            if len(_remembered) > _MOST_REMEMBERED:
                _remembered.popitem(last=False)
        raise


def _shortened(text: str) -> str:
    # Cut between lines: torch decodes escapes, which must stay whole. A longer line is the message, and is cut before a
    # backslash.
    beginning = text[:_LONGEST_BEGINNING].rpartition("\n")[0]
    end = text[-_LONGEST_END:]
    end = end.partition("\n")[2] or end[max(0, end.find("\\")) :]
    return f"{beginning}\n[... {len(text) - len(beginning) - len(end)} characters left out ...]\n{end}"


def _escaped(found: re.Match[str]) -> str:
    if found["escape"]:
        return found[0]
    if found["lost"]:
        # C++ would end the text at NUL, and Python cannot encode a lone surrogate: show the escape.
        return f"\\\\{'x00' if found[0] == chr(0) else f'u{ord(found[0]):04x}'}"
    return f"\\U{ord(found[0]):08x}"


def original(text: str) -> Exception | None:
    """Make a new exception of the type that a C++ exception with this text came from; None if no callee raised it."""
    if never := re.match(_NO_VALUE, text):
        return errors.RRefLost(text, cause=never["cause"])
    if text.startswith(_NO_OBJECT):
        why = "rpc.remote() timed out, or the RRef's owner is gone and another worker has its rank"
        return errors.RRefLost(f"{text} ({why})", cause=why)
    for kind, sentence in ((errors.WorkerLost, _LOST), (errors.WorkerLeft, _LEFT)):
        if gone := re.fullmatch(sentence, text):
            fields = gone.groupdict()
            return kind(text, **{**fields, "rank": int(fields["rank"])})
    if not _remembered:
        return None
    # The rest of the text says where in this process the exception was first raised.
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


def deserialize(pickled: bytes, tensors: list[Any]) -> Any:
    """Replaces torch's ``internal.deserialize``: a call that cannot be unpickled becomes a call that raises the
    reason."""
    # Every call runs this function, twice.
    try:
        return _torchs_deserialize(pickled, tensors)
    except BaseException as error:
        # torch drops its table of tensors only after a success, and would keep the tensors after a failure.
        vars(internal._thread_local_tensor_tables).pop("recv_tables", None)
        if not _is_call(pickled):
            raise
        return internal.PythonUDF(_raise, (error,), {})


def _raise(error: BaseException) -> NoReturn:
    # If an RRef's function raises SystemExit, torch gives the RRef another type than the caller did, and then refuses
    # it.
    raise error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def _is_call(pickled: bytes) -> bool:
    unpickler = _FirstName(io.BytesIO(pickled))
    with contextlib.suppress(Exception):
        unpickler.load()
    return unpickler.found == (internal.PythonUDF.__module__, internal.PythonUDF.__name__)


class _FirstName(pickle.Unpickler):
    """Finds the first class or function that a pickle names, without importing it."""

    found: tuple[str, str] | None = None

    def find_class(self, module: str, name: str) -> NoReturn:
        self.found = module, name
        raise pickle.UnpicklingError


class _TypeOfBoth(type):
    """Metaclass of the types that `_that_is_a_runtime_error` makes, by which pickle recognizes them."""


@functools.cache
def _that_is_a_runtime_error(exception_type: type[Exception]) -> type[Exception]:
    if issubclass(exception_type, RuntimeError):
        return exception_type
    names = {name: getattr(exception_type, name) for name in ("__module__", "__qualname__", "__doc__")}
    try:
        both: type = _TypeOfBoth(exception_type.__name__, (exception_type, RuntimeError), names)
    except TypeError:
        # Some types cannot have this second base: their memory layout differs, or they have a metaclass.
        return exception_type
    return both


def reduce_type(both: _TypeOfBoth) -> tuple[Any, ...]:
    """Reducer for pickle: a worker may pass on another worker's exception, which travels as the original type."""
    return _identity, (both.__bases__[0],)


def _identity(value: Any) -> Any:
    return value


copyreg.pickle(_TypeOfBoth, reduce_type)
