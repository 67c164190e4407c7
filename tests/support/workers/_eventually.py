"""Waiting for a state that no message announces."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], what: str, timeout: float = 20.0) -> None:
    """Return as soon as ``condition()`` is true. Raise AssertionError after ``timeout`` seconds.

    Only for states that no message announces, such as the deletion of an RRef on its owner. The pauses grow, so that
    the questions do not delay the state.
    """
    deadline = time.monotonic() + timeout
    pause = 0.001
    while not condition():
        assert time.monotonic() < deadline, f"{what}: still not so after {timeout:.0f} s"
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
