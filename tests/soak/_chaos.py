"""What is done to the workers and to their hosts, and when: `Chaos`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from ._crew import Crew
from ._worker import HEARTBEAT_LIMIT_S

# Of a cut that loses nothing, and of one after which both sides have given each other up (docs/failure_model.md).
_SHORTEST_CUT_S, _LONGEST_SURVIVED_S = 0.2, HEARTBEAT_LIMIT_S / 2
_FATAL_CUT_S = 1.05 * HEARTBEAT_LIMIT_S + 2.5


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
        host = self._choice.choice(self._crew.hosts)
        with _Cut(self, host, is_fatal=False):
            self._crew.watch(self._choice.uniform(_SHORTEST_CUT_S, _LONGEST_SURVIVED_S))

    def _kill_while_cut(self) -> None:
        host = self._choice.choice(self._crew.hosts)
        rank = self._any_mortal()
        with _Cut(self, host, is_fatal=False):
            self._crew.watch(self._choice.uniform(_SHORTEST_CUT_S, _LONGEST_SURVIVED_S / 2))
            self._end(rank)
            self._crew.watch(self._choice.uniform(_SHORTEST_CUT_S, _LONGEST_SURVIVED_S / 2))
        self._start(rank)

    def _cut_off(self) -> None:
        """For so long that its workers are lost: one of them joins again, the other is another one then."""
        host = self._choice.choice(self._crew.hosts)
        with _Cut(self, host, is_fatal=True):
            self._crew.watch(_FATAL_CUT_S + self._choice.uniform(0, 2))
        # What has queued on either side arrives now, and is dropped.
        self._crew.watch(self._choice.uniform(0.1, 1))
        for rank, _ in sorted(self._crew.current.items()):
            if self._crew.host_of(rank) == host.name:
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


class _Cut:
    def __init__(self, chaos: Chaos, host: Any, is_fatal: bool) -> None:
        self._chaos = chaos
        self._host = host
        self._is_fatal = is_fatal

    def __enter__(self) -> None:
        self._event = self._chaos._log("cut off" if self._is_fatal else "cut", host=self._host.name)
        self._host.cut()

    def __exit__(self, *exception: object) -> None:
        self._host.heal()
        self._event["until"] = time.monotonic()
