"""Warnings of the agent, which is written in C++, go to Python's logging: the logger ``torch_ucx_rpc``.

The warnings arrive on their own thread, soon after their cause. The agent's shutdown waits for them. Programs that set
up no logging see them on stderr, since Python shows warnings there.
"""

from __future__ import annotations

import atexit
import logging

from torch_ucx_rpc._native import _C

_logger = logging.getLogger("torch_ucx_rpc")


def receive_warnings() -> None:
    """Pass warnings on until the end of the interpreter, when C++ writes to stderr again."""
    _C.set_warning_receiver(_log)
    atexit.register(_C.set_warning_receiver, None)


def _log(sentence: str) -> None:
    _logger.warning("%s", sentence)
