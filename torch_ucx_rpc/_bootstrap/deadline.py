"""`Deadline`: the end of a wait that has several steps."""

from __future__ import annotations

import time


class Deadline:
    """The time ``timeout`` seconds from now; never if ``timeout`` is 0."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._end = time.monotonic() + timeout if timeout else float("inf")

    def remaining(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return self.remaining() == 0.0
