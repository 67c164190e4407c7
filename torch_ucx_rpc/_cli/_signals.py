"""`Signals`, the signals that end a job, noted for the agent to find; and the names of all signals."""

from __future__ import annotations

import signal
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def signal_name(number: int) -> str:
    """The name of a signal. Python has no names for most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Signals:
    """Ctrl-C, SIGTERM, SIGHUP and SIGQUIT end this process at once, until `note`: from then on this object only notes
    them.

    A signal that this process was started to ignore stays ignored, here and in the workers, as after ``nohup``.
    """

    def __init__(self) -> None:
        # The first signal that was noted.
        self.first: signal.Signals | None = None
        self._heeded = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        # Python's own handler of Ctrl-C would wait for C++ code, which may wait for other machines.
        for number in self._heeded:
            signal.signal(number, signal.SIG_DFL)

    def note(self) -> None:
        for number in self._heeded:
            signal.signal(number, self._note)

    def for_workers(self, number: signal.Signals) -> signal.Signals:
        """Return the signal for this machine's workers when another machine has received ``number``."""
        # Workers ignore the signals that this process ignores.
        return number if number in self._heeded else signal.SIGTERM

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(number)
