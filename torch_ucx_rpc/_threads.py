"""Threads of this package that use torch. They end before the interpreter does.

While the interpreter ends, it unwinds each other thread that comes back from C++. The unwinding aborts the process
where it reaches a C++ destructor ("terminate called without an active exception"), as in most functions of torch.
"""

from __future__ import annotations

import ctypes
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# Modules whose functions wait in C for long. While a thread waits there, no C++ is on its stack.
_WAITS = (threading.__file__, socket.__file__)


class Thread(threading.Thread):
    """A daemon thread that `interrupt_all` interrupts. It must wait for long only in ``threading`` and ``socket``."""

    def __init__(self, target: Callable[..., object], args: tuple[Any, ...] = (), *, name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)


def later(delay: float, act: Callable[[], object], *, name: str) -> None:
    """Run a function on a thread of its own after ``delay`` seconds."""

    def run() -> None:
        # Unlike time.sleep(), this waits in ``threading``.
        threading.Event().wait(delay)
        act()

    Thread(run, name=name).start()


def interrupt_all(until: float) -> None:
    """Raise SystemExit in all threads, and wait until they have left C++, at most until ``until`` (monotonic)."""
    running = [thread for thread in threading.enumerate() if isinstance(thread, Thread)]
    for thread in running:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    while any(map(_may_be_in_torch, running)) and time.monotonic() < until:
        time.sleep(0.001)


def _may_be_in_torch(thread: Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return thread.is_alive() and frame is not None and frame.f_code.co_filename not in _WAITS
