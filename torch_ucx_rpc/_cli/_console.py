"""Output of the commands: a console of the package rich, progress bars, and units as text. And a check of times."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import rich.console

T = TypeVar("T")

# Python and UCX can wait so long. Nobody wants more than these eleven days.
_MOST_SECONDS = 1e6


def check_seconds(arguments: argparse.Namespace, option: str, seconds: float) -> None:
    """End the command with an error if it cannot wait so long, or if ``seconds`` is NaN."""
    if not 0 < seconds <= _MOST_SECONDS:
        arguments.error(
            f"{option} must be a number of seconds above 0, at most {_MOST_SECONDS:.0f}; it cannot be {seconds:g}"
        )


def console(arguments: argparse.Namespace) -> rich.console.Console:
    """A console on stdout; without rich the command ends with an error that says how to get it."""
    try:
        import rich.console
    except ImportError:
        arguments.error("this command needs the package rich: pip install rich")
    # Names of services may have brackets, and names of workers colons.
    return rich.console.Console(soft_wrap=False, markup=False, emoji=False)


def with_progress(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Pass ``items`` on, with a progress bar on stderr where that is a terminal and rich is installed."""
    try:
        import rich.console
        import rich.progress
    except ImportError:
        yield from items
        return
    stderr = rich.console.Console(stderr=True)
    yield from rich.progress.track(items, what, total, console=stderr, transient=True, disable=not stderr.is_terminal)


def human_bytes(count: float) -> str:
    """A number of bytes as text, such as "1.5 MB"."""
    # Do not use rich.filesize, since --json works without rich.
    power = min(4, int(math.log10(max(count, 1)) / 3))
    number = count / 1000**power
    return f"{number:.{0 if power == 0 or number >= 100 else 1}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def human_us(microseconds: float) -> str:
    """A duration as text, such as "161 us"."""
    if not math.isfinite(microseconds):
        return ""
    if microseconds < 10_000:
        return f"{microseconds:.0f} us"
    return f"{microseconds / 1000:.0f} ms" if microseconds < 10_000_000 else f"{microseconds / 1e6:.0f} s"
