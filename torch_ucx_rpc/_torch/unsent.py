"""Messages that are pickled in part, and calls that are pickled and refused by the agent, leave nothing behind.

For each RRef that torch pickles, the sender or the owner begins to wait for news of the receiver's reference. If the
message never leaves, no news comes: the value stays, and a graceful shutdown waits 100 s for it. So this module ends
the wait. It sends nothing: an owner that is still making the value would take the end of the reference for the end of
the last one. torch also keeps the tensors that it has collected before an object that cannot be pickled. So this module
releases them.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch._C._distributed_rpc import PyRRef
from torch.distributed.rpc import internal

from torch_ucx_rpc._native import _C

_torchs_serialize = internal._InternalRPCPickler.serialize
_torchs_serialize_rref = PyRRef._serialize
# While torch pickles, ``send_tables`` has the tensors of the message.
_tensors_of_thread = internal._thread_local_tensor_tables


class _OfThread(threading.local):
    # The references in the message that this thread is pickling; None if it pickles none.
    pickling: list[Any] | None = None
    # The references in the message that this thread has pickled, and not sent yet.
    pickled: Sequence[Any] = ()


_of_thread = _OfThread()


# Every call runs this function, twice.
def serialize(pickler: Any, value: Any) -> Any:
    """Replaces torch's ``_InternalRPCPickler.serialize``."""
    of_thread = _of_thread
    # The pickling of an object may make a call of its own.
    outer = of_thread.pickling
    outer_tensors = None if outer is None else getattr(_tensors_of_thread, "send_tables", None)
    references: list[Any] = []
    of_thread.pickling = references
    try:
        pickled = _torchs_serialize(pickler, value)
    except BaseException:
        if outer_tensors is None:
            vars(_tensors_of_thread).pop("send_tables", None)
        else:
            _tensors_of_thread.send_tables = outer_tensors
        _take_back(references)
        raise
    finally:
        of_thread.pickling = outer
    of_thread.pickled = references
    return pickled


def serialize_rref(rref: PyRRef[Any]) -> Any:
    """Replaces torch's ``PyRRef._serialize``, which makes a reference for the receiver."""
    reference = _torchs_serialize_rref(rref)
    if _of_thread.pickling is not None:
        _of_thread.pickling.append(reference)
    return reference


def nothing_left(send: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of torch that sends what this thread has pickled, or raises."""

    @functools.wraps(send)
    def send_or_take_back(*arguments: Any) -> Any:
        references, _of_thread.pickled = _of_thread.pickled, ()
        try:
            return send(*arguments)
        except Exception:  # Ctrl-C comes after the message has been sent
            _take_back(references)
            raise

    return send_or_take_back


def _take_back(references: Sequence[Any]) -> None:
    for reference in references:
        _C.take_back(reference)
