"""`Chaos`: the misfortunes of the workers and of their hosts, and their times."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from labs import VirtualHost

from ._crew import Crew
from ._worker import HEARTBEAT_LIMIT_S

# Of a cut that loses nothing, and of one after which both sides have given each other up (docs/failure_model.md).
_SHORTEST_CUT_S, _LONGEST_SURVIVED_S = 0.2, HEARTBEAT_LIMIT_S / 2
_SLACK_S = 0.3
_FATAL_CUT_S = 1.05 * HEARTBEAT_LIMIT_S + 2.5

# What a run has seen each of at least once, as the timeline calls them.
MISFORTUNES = ("kill", "cut", "cut off", "restart")


class Chaos:
    """Bad luck for a crew, the same for the same seed; the first half of its workers, by rank, is never killed.

    Attributes:
        timeline: all that was done, with the time of the monotonic clock ``at`` which it began.
    """

    def __init__(self, crew: Crew, seed: int) -> None:
        self._crew = crew
        self._choice = random.Random(seed)
        self._bag: list[Callable[[], None]] = []
        self.timeline: list[dict[str, Any]] = []

    @property
    def missing(self) -> list[str]:
        """Misfortunes that have not happened yet."""
        happened = {event["what"] for event in self.timeline}
        return [what for what in MISFORTUNES if what not in happened]

    def strike(self) -> None:
        """One misfortune and what repairs it, after a while in which there is peace."""
        if not self._bag:
            self._bag = [self._kill, self._kill, self._cut, self._cut, self._kill_while_cut, self._cut_off]
            self._choice.shuffle(self._bag)
        self._crew.watch(self._choice.uniform(0.5, 3))
        self._bag.pop()()

    def _kill(self) -> None:
        rank = self._any_mortal()
        self._end(rank)
        self._crew.watch(self._choice.uniform(0.1, 2))
        self._start(rank)

    def _cut(self) -> None:
        with self._cable_of(self._choice.choice(self._crew.hosts)):
            self._crew.watch(self._choice.uniform(_SHORTEST_CUT_S, _LONGEST_SURVIVED_S))

    def _kill_while_cut(self) -> None:
        rank = self._any_mortal()
        with self._cable_of(self._choice.choice(self._crew.hosts)):
            self._crew.watch(self._choice.uniform(_SHORTEST_CUT_S, _LONGEST_SURVIVED_S / 2))
            self._end(rank)
            self._crew.watch(self._choice.uniform(0, _LONGEST_SURVIVED_S / 2 - _SHORTEST_CUT_S))
        self._start(rank)

    def _cut_off(self) -> None:
        with self._cable_of(self._choice.choice(self._crew.hosts)):
            self._crew.watch(_FATAL_CUT_S + self._choice.uniform(0, 2))

    @contextlib.contextmanager
    def _cable_of(self, host: VirtualHost) -> Iterator[None]:
        """It is out until the block is left."""
        event = self._log("cut", host=host.name)
        host.cut()
        try:
            yield
        finally:
            host.heal()
            event["until"] = time.monotonic()
        # By how long it was, not by how long it was to be: this process may have been held up.
        if event["until"] - event["at"] > _LONGEST_SURVIVED_S + _SLACK_S:
            event["what"] = "cut off"
            self._reunite(host)
        else:
            # TCP asks again after pauses that double: it may need as long again to find out that the cut has ended, and
            # another cut before that is the same one.
            self._crew.watch(event["until"] - event["at"])

    def _reunite(self, host: VirtualHost) -> None:
        """Of the workers that all others have lost, one joins again, and the other is another one from now on."""
        # Messages that queued on either side arrive now, and are dropped.
        self._crew.watch(self._choice.uniform(0.1, 1))
        for rank in sorted(self._crew.current):
            if self._crew.host_of(rank) != host.name:
                continue
            if self._is_mortal(rank):
                self._end(rank)
                self._start(rank)
            else:
                self._log("rejoin", name=self._crew.current[rank].name)
                self._crew.rejoin(rank)

    def _any_mortal(self) -> int:
        return self._choice.choice([rank for rank in sorted(self._crew.current) if self._is_mortal(rank)])

    def _is_mortal(self, rank: int) -> bool:
        return rank >= len(self._crew.hosts)

    def _end(self, rank: int) -> None:
        member = self._crew.current[rank]
        self._log("kill", name=member.name, life=str(member.life))
        self._crew.kill(rank)

    def _start(self, rank: int) -> None:
        self._log("restart", name=self._crew.past[-1].name)
        self._crew.start(rank)

    def _log(self, what: str, **values: Any) -> dict[str, Any]:
        event = {"what": what, "at": time.monotonic(), **values}
        self.timeline.append(event)
        return event
