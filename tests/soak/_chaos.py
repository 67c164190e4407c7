"""`Chaos`: the misfortunes of the workers and of their hosts, and their times."""

from __future__ import annotations

import contextlib
import functools
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.labs import VirtualHost

from ._crew import Crew
from ._worker import HEARTBEAT_LIMIT_S

# The lengths of a cut that loses nothing, and of one after which both sides have lost each other
# (docs/failure_model.md).
_SHORTEST_CUT_S, _LONGEST_SURVIVED_S = 0.2, HEARTBEAT_LIMIT_S / 2
_SLACK_S = 0.3
_FATAL_CUT_S = 1.05 * HEARTBEAT_LIMIT_S + 2.5

# The time for workers to join, and then to call all others.
_JOINING_S, _TALKING_S = 90.0, 3.0
_LONGEST_WITHOUT_FILES_S = 2.0

# The misfortunes that each run must see at least once, by their names in the timeline.
MISFORTUNES = (
    *("kill", "kill while cut", "kill while stopped", "restart"),
    *("cut", "cut off", "stop", "long stop", "no files", "reset"),
)


class Misfortunes:
    """Misfortunes for a crew. The same seed gives the same misfortunes.

    Attributes:
        expected: the kinds, each of which must happen.
        timeline: all misfortunes. ``at`` is the time of the monotonic clock at which one began, and ``until`` is its
            end, if it lasts. If it may make living workers lose each other, ``parted`` is the time from which on it
            may. If a group may leave out silent workers, ``left out`` is the time from which on it may.
    """

    expected: tuple[str, ...] = ()

    def __init__(self, crew: Crew, seed: int) -> None:
        self._crew = crew
        self._choice = random.Random(seed)
        self.timeline: list[dict[str, Any]] = []

    @property
    def missing(self) -> list[str]:
        """Misfortunes that have not happened yet."""
        happened = {event["what"] for event in self.timeline}
        return [what for what in self.expected if what not in happened]

    def strike(self) -> None:
        """Do a misfortune and its repair, after a pause."""
        raise NotImplementedError

    def close(self) -> None:
        """Undo the effects that outlast misfortunes. By default there are none."""


class Chaos(Misfortunes):
    """The misfortunes of the general soak. Workers in the first half of the ranks are never killed."""

    expected = MISFORTUNES

    def __init__(self, crew: Crew, seed: int) -> None:
        super().__init__(crew, seed)
        self._bag: list[Callable[[], None]] = []

    def strike(self) -> None:
        if not self._bag:
            self._bag = [self._kill, self._kill, self._cut, self._cut, self._kill_while_cut, self._cut_off]
            self._bag += [self._stop, self._stop, self._long_stop, self._kill_while_stopped]
            self._bag += [self._no_files, self._reset]
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
            self._log("kill while cut")
            self._end(rank)
            self._crew.watch(self._choice.uniform(0, _LONGEST_SURVIVED_S / 2 - _SHORTEST_CUT_S))
        self._start(rank)

    def _cut_off(self) -> None:
        with self._cable_of(self._choice.choice(self._crew.hosts)):
            self._crew.watch(_FATAL_CUT_S + self._choice.uniform(0, 2))

    def _stop(self) -> None:
        with self._stopped(self._any()):
            self._crew.watch(self._choice.uniform(_SHORTEST_CUT_S, _LONGEST_SURVIVED_S))

    def _long_stop(self) -> None:
        """Workers of the same host wait for the stopped worker; workers of other hosts lose it."""
        with self._stopped(self._any()):
            self._crew.watch(_FATAL_CUT_S + self._choice.uniform(0, 2))

    def _kill_while_stopped(self) -> None:
        rank = self._any_mortal()
        with self._stopped(rank):
            self._crew.watch(self._choice.uniform(_SHORTEST_CUT_S, _LONGEST_SURVIVED_S))
            self._log("kill while stopped")
            self._end(rank)
            # The end of the block sends SIGCONT to the current process of this rank, so start it here.
            self._start(rank)

    def _no_files(self) -> None:
        """Forbid a worker to open files for a while. The worker needs a file to connect to a worker that has just
        joined."""
        stranger = self._any_mortal()
        self._end(stranger)
        self._start(stranger)
        self._meet()
        rank = self._choice.choice([rank for rank in sorted(self._crew.current) if rank != stranger])
        event = self._log("no files", name=self._crew.current[rank].name)
        try:
            self._crew.limit_files(rank, self._crew.first_free_file(rank))
            self._crew.watch(self._choice.uniform(_SHORTEST_CUT_S, _LONGEST_WITHOUT_FILES_S))
            self._crew.limit_files(rank, None)
        finally:
            event["until"] = time.monotonic()

    def _reset(self) -> None:
        """Reset a host's connections to the others, like a firewall that has forgotten them."""
        self._meet()
        self._crew.watch(_TALKING_S)
        host = self._choice.choice(self._crew.hosts)
        event = self._log("reset", host=host.name)
        event["parted"] = event["at"]
        host.reset_connections()
        event["until"] = time.monotonic()
        self._reunite(host.name)

    def _meet(self) -> None:
        """Wait until all have joined. A worker that cannot join ends, which is a finding."""
        self._crew.all_say("joined", _JOINING_S)

    def _cable_of(self, host: VirtualHost) -> contextlib.AbstractContextManager[None]:
        """Cut the host off during the block."""
        return self._silence("cut", "cut off", host.name, host.cut, host.heal)

    def _stopped(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """Keep the worker stopped during the block."""
        stop, go_on = (functools.partial(self._crew.signal, rank, one) for one in (signal.SIGSTOP, signal.SIGCONT))
        return self._silence("stop", "long stop", self._crew.host_of(rank), stop, go_on)

    @contextlib.contextmanager
    def _silence(
        self, short: str, long: str, host: str, begin: Callable[[], None], end: Callable[[], None]
    ) -> Iterator[None]:
        event = self._log(short, host=host)
        begin()
        try:
            yield
        finally:
            end()
            event["until"] = time.monotonic()
        # The real length counts, not the planned one: this process may have been delayed.
        if event["until"] - event["at"] > _LONGEST_SURVIVED_S + _SLACK_S:
            event["what"] = long
            # A cut of half the limit loses no worker. In a longer one, silence before the cut counts too.
            event["parted"] = event["at"] + HEARTBEAT_LIMIT_S / 2
            self._reunite(host)
        else:
            # TCP doubles the pauses between its resends, so it may notice the end of a cut of 2 s only 2 s later. A
            # further cut before that would prolong the first.
            self._crew.watch(event["until"] - event["at"])

    def _reunite(self, host: str) -> None:
        """Make the workers of this host join again, as new members: all others have lost them."""
        # Queued messages of either side arrive now, and are dropped.
        self._crew.watch(self._choice.uniform(0.1, 1))
        for rank in sorted(self._crew.current):
            if self._crew.host_of(rank) != host:
                continue
            if self._is_mortal(rank):
                self._end(rank)
                self._start(rank)
            else:
                self._log("rejoin", name=self._crew.current[rank].name)
                self._crew.rejoin(rank)

    def _any(self) -> int:
        return self._choice.choice(sorted(self._crew.current))

    def _any_mortal(self) -> int:
        return self._choice.choice([rank for rank in sorted(self._crew.current) if self._is_mortal(rank)])

    def _is_mortal(self, rank: int) -> bool:
        return rank >= len(self._crew.hosts)

    def _end(self, rank: int) -> None:
        member = self._crew.current[rank]
        event = self._log("kill", name=member.name, life=str(member.life))
        self._crew.kill(rank, lambda at: event.update(gone=at))

    def _start(self, rank: int) -> None:
        self._log("restart", name=self._crew.past[-1].name)
        self._crew.start(rank)

    def _log(self, what: str, **values: Any) -> dict[str, Any]:
        event = {"what": what, "at": time.monotonic(), **values}
        self.timeline.append(event)
        return event
