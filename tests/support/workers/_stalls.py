"""How long this process was kept from running: `Stalls`."""

from __future__ import annotations

import threading
import time

_PERIOD_S = 0.01
_HARMLESS_S = 0.05  # waits for the GIL and for a processor


class Stalls:
    """Measures, during a ``with``, by how much a sleeping thread of this process oversleeps.

    A busy machine causes stalls. A test may let a time exceed its bound by the sum of the stalls.
    """

    def __init__(self) -> None:
        # When the thread woke up, in seconds of time.monotonic(), in order.
        self.wake_ups: list[float] = []
        self._stalled_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sleep_again, daemon=True)

    def seconds(self) -> float:
        """Return the sum of all stalls so far."""
        return self._stalled_s

    def _sleep_again(self) -> None:
        while not self._is_over.is_set():
            due = time.monotonic() + _PERIOD_S
            time.sleep(_PERIOD_S)
            now = time.monotonic()
            self._stalled_s += max(0.0, now - due - _HARMLESS_S)
            self.wake_ups.append(now)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()
