"""How long this process was kept from running: `Stalls`."""

from __future__ import annotations

import threading
import time

_PERIOD_S = 0.01
_HARMLESS_S = 0.05  # turns of the GIL, and of the processor


class Stalls:
    """Measures, for the time of a ``with``, by how much a sleeping thread of this process oversleeps.

    That is the machine's doing. A time may exceed its bound by as much.
    """

    def __init__(self) -> None:
        # When the thread woke up, in seconds of time.monotonic(), in order.
        self.wake_ups: list[float] = []
        self._stalled_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sleep_again, daemon=True)

    def seconds(self) -> float:
        """All stalls so far together."""
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
