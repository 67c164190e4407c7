"""The steps of one model, as trainers and the decider see them: `Standing` and `Ledger`.

Both are state machines without threads, clocks or a network. docs/development/reduction.md has the protocol.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping

from torch_ucx_rpc.reduction._messages import NEVER, Kept, Opening, Report, Spec, generation


class Next(enum.Enum):
    """A trainer's reaction to an opening."""

    WAIT = enum.auto()
    # Take the state of the model.
    TAKE = enum.auto()
    # Put gradients, and get means.
    PUT = enum.auto()
    # Its step is closed: apply the means.
    CLOSE = enum.auto()
    # Others have a later state.
    FALL_BEHIND = enum.auto()
    REFUSED = enum.auto()
    NO_HOST = enum.auto()


class Standing:
    """The step of a trainer, and its progress in it. `Report` explains the attributes."""

    def __init__(self) -> None:
        self.step = self.committed = self.prepared = self.void = NEVER
        self.former = (NEVER, NEVER)
        self.is_late = False

    def begin(self, step: int, committed: int) -> None:
        """Begin a step with its state."""
        self.step, self.committed, self.prepared, self.former = step, committed, NEVER, (NEVER, NEVER)

    def close(self) -> None:
        """Close the step: the prepared means have been applied."""
        self.begin(self.step + 1, self.prepared)
        self.is_late = False

    def lose(self, is_late: bool) -> None:
        """Give up the state for a later one. ``is_late`` tells whether the trainer's gradients do not count."""
        former = self.step, self.committed
        self.begin(NEVER, NEVER)
        self.former, self.is_late = former, is_late

    def judge(self, opening: Opening, me: str) -> Next:
        """Choose the reaction to an opening of the epoch that is in force."""
        is_in = me in opening.recipients
        if self.step == NEVER:
            return Next.TAKE if is_in else Next.WAIT
        if opening.step == self.step + 1 and NEVER != self.prepared == opening.committed:
            return Next.CLOSE
        if (opening.step, opening.committed) != (self.step, self.committed):
            return Next.FALL_BEHIND
        is_over = opening.generation in (self.void, self.prepared)
        if opening.refusal is not None and opening.refusal[0] in ("", me) and not is_over:
            return Next.REFUSED
        if is_over or not (is_in and opening.contributors):
            return Next.NO_HOST if is_in and not opening.hosts and opening.spec.hosts else Next.WAIT
        return Next.PUT if opening.hosts else Next.NO_HOST


class Ledger:
    """The steps of one model in one epoch, as its decider keeps them.

    After each change of a report, `_decide` looks at all reports. Trainers are known by their names.

    Attributes:
        openings (list): openings for all trainers and hosts; the caller takes them away.
        left (set): trainers that have left the server, and are not expected to begin.
        attempt (int): number of the last opening.
    """

    def __init__(
        self,
        key: str,
        epoch: int,
        ranks: Mapping[str, int],
        spec: Spec,
        hosts: Callable[[int], tuple[str, ...]],
        first: Report,
        *,
        left: set[str],
        workers: Callable[[], set[str]] | None = None,
        elsewhere: Callable[[], bool] | None = None,
        whole: int = 0,
        attempt: int = 0,
    ) -> None:
        """``hosts`` returns the hosts for a step. ``first`` is any trainer's report. The first ``whole`` steps need all
        trainers, even with a quorum. ``attempt`` is the last one of a ledger that was dropped in this epoch.
        ``workers`` returns all workers of a job of fixed size that have not certainly ended, members or not. In other
        jobs, ``elsewhere`` tells whether a living worker outside the epoch has, or may have, the state of the model."""
        self.openings: list[Opening] = []
        self.left = left
        self.quorum, self._expected = first.quorum, first.expected
        self._key, self._epoch, self._ranks, self._spec, self._hosts = key, epoch, ranks, spec, hosts
        self._workers, self._elsewhere, self._whole = workers, elsewhere, whole
        # True while no trainer in the epoch has the state, but a worker outside the epoch may have it.
        self._is_asking = False
        self.attempt = attempt
        self._opening: Opening | None = None
        # Trainers that report these two have the state of the model.
        self._step, self._committed = 0, NEVER
        # The trainer whose own state becomes the state of the model; None again once the step is closed.
        self._first: str | None = None
        self._reports: dict[str, Report] = {}

    # -- reports

    def resume(self, reports: Mapping[str, Report], kept: Iterable[Kept]) -> None:
        """Go on from the members' steps when the epoch begins: a step that one member has applied counts as
        committed."""
        self._reports = {**reports}
        states = [(one.step, one.committed) for one in self._trainers().values()]
        states += [(one.step, one.committed) for one in kept]
        states = [state for state in states if state[1] != NEVER]
        self._step, self._committed = max(states, default=(0, NEVER))
        self._decide()

    def update(self, name: str, report: Report) -> bool:
        """Take a trainer's report. Returns False if the trainer has sent a newer report, which counts instead."""
        known = self._reports.get(name)
        if known is not None and known.number >= report.number:
            opening = self._opening
            if report.has_left and opening is not None and name in opening.recipients:
                # The trainer has come back, but dropped the opening when it left.
                self._open(opening.contributors, opening.recipients, opening.donors)
            return False
        self._reports[name] = report
        self._decide()
        return True

    def leave(self, name: str) -> None:
        """Take note that a trainer has left the server."""
        if name in self._reports:
            self._reports[name] = self._reports[name]._replace(has_left=True)
        self._decide()

    def refuse(self, number: int, name: str, reason: str) -> None:
        """Refuse the step of a generation, which a host cannot make. Either the gradients of one trainer do not fit, or
        the host cannot sum any (``name`` is "")."""
        opening = self._opening
        if opening is not None and number == opening.generation:
            self._open(opening.contributors, opening.recipients, opening.donors, (name, reason))

    def look_again(self) -> bool:
        """Take note of changes outside the epoch. Returns False if the step waits for none."""
        if not self._trainers():
            return False
        if self._opening is None or self._is_asking:
            self._decide()
        opening = self._opening
        lacks_hosts = opening is not None and not opening.hosts and bool(self._spec.hosts)
        if opening is not None and lacks_hosts and self._hosts(self._step):
            self._open(opening.contributors, opening.recipients, opening.donors)
            lacks_hosts = False
        if self._is_asking or self._workers is None or not (opening is None or lacks_hosts):
            return self._is_asking
        return bool(self._workers() - self._ranks.keys())

    # -- the end of a step

    @property
    def has_begun(self) -> bool:
        """Whether the first step has been opened."""
        return self._committed != NEVER

    @property
    def trainers(self) -> tuple[str, ...]:
        """The trainers that take part, or want to."""
        return tuple(self._trainers())

    @property
    def is_complete(self) -> bool:
        """Whether all trainers of the step have all means: it may be closed, while the epoch is in force."""
        opening = self._opening
        return opening is not None and bool(opening.contributors) and not self._not_prepared(opening)

    def _not_prepared(self, opening: Opening) -> list[str]:
        reports = {name: self._reports[name] for name in opening.recipients}
        return [
            name
            for name, one in reports.items()
            if (one.step, one.prepared) != (opening.step, opening.generation) or one.void == opening.generation
        ]

    def close(self) -> None:
        """Commit the step."""
        opening = self._opening
        assert opening is not None
        self._step, self._committed, self._first = opening.step + 1, opening.generation, None
        for name in opening.recipients:
            self._reports[name] = self._reports[name]._replace(
                step=self._step, committed=self._committed, prepared=NEVER, is_ready=False, is_late=False
            )
        # The same workers go on in the same generation, unless a quorum has to choose them again.
        self._opening = opening._replace(step=self._step, committed=self._committed, donors=opening.recipients)
        if self.quorum is not None:
            self._opening = self._opening._replace(contributors=())
        said = len(self.openings)
        self._decide()
        if len(self.openings) == said:
            self.openings.append(self._opening)

    def missing(self) -> tuple[str, ...]:
        """The trainers that the step waits for, as far as they are known."""
        opening, trainers = self._opening, self._trainers()
        if opening is None:
            names = () if isinstance(self._expected, int) else self._expected
            return tuple(name for name in names if name in self._may_come() and name not in trainers)
        if opening.contributors:
            return tuple(self._not_prepared(opening))
        return self._sorted(name for name, one in trainers.items() if not one.is_ready)

    # -- how it goes on

    def _sorted(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=lambda name: (self._ranks.get(name, 0), name)))

    def _trainers(self) -> dict[str, Report]:
        return {name: one for name, one in self._reports.items() if not one.has_left and name in self._ranks}

    def _decide(self) -> None:
        """Open a step if the present opening does not fit the reports."""
        trainers = self._trainers()
        if not trainers:
            if self._opening is not None:
                self._open((), (), (), is_over=True)
                self._opening = None
            return
        self._is_asking = False
        holders = self._holders(trainers) or self._find_holders(trainers)
        if not holders:
            return
        takers = {name for name, one in trainers.items() if one.step == NEVER} - holders
        late = {name for name, one in trainers.items() if one.is_late}
        if late >= holders | takers:
            # Gradients that have come late are better than none.
            late = set()
        opening = self._opening
        is_open = (
            opening is not None
            and (opening.step, opening.committed) == (self._step, self._committed)
            and {*opening.donors} <= holders
            and {*opening.recipients} <= holders | takers
            and all(trainers[name].void != opening.generation for name in opening.recipients)
        )
        if self.quorum is None:
            contributors, recipients = (holders | takers) - late, holders | takers
        elif is_open and opening is not None and opening.contributors:
            return
        else:
            counting = trainers.keys() - late
            # A trainer that still has to apply the committed step has only the gradients of that step.
            present = {name for name in counting & holders if trainers[name].step in (self._step, NEVER)}
            ready = {name for name in present if trainers[name].is_ready}
            is_enough = len(ready) >= (len(counting) if self._step < self._whole else min(self.quorum, len(counting)))
            contributors = ready if is_enough else set()
            recipients = ready | late if is_enough else holders | takers - late
            recipients &= holders | takers
        chosen = self._sorted(contributors), self._sorted(recipients)
        if not is_open or opening is None or chosen != (opening.contributors, opening.recipients):
            self._open(*chosen, self._sorted(holders))

    def _holders(self, trainers: Mapping[str, Report]) -> set[str]:
        """Return the trainers that have the state of the model, or will have it after applying the committed step."""
        return {
            name
            for name, one in trainers.items()
            if name == self._first
            or (one.committed != NEVER and (one.step, one.committed) == (self._step, self._committed))
            or (one.step == self._step - 1 and NEVER != one.prepared == self._committed)
        }

    def _find_holders(self, trainers: Mapping[str, Report]) -> set[str]:
        """Choose trainers whose state becomes the state of the model, since no trainer has that state. Returns none if
        it is too early."""
        latest = max(_latest(one) for one in trainers.values())
        if latest[1] != NEVER and self._spec.optimizer is None:
            if self._may_be_elsewhere():
                return set()
            self._step, self._committed = latest
            if not (holders := self._holders(trainers)):
                # This trainer fell behind a later state, and all trainers with that state have ended.
                self._first = self._sorted(name for name, one in trainers.items() if _latest(one) == latest)[0]
                holders = {self._first}
            return holders
        wanting = {name for name, one in trainers.items() if one.step == NEVER}
        if not (self.has_begun or self._may_begin(wanting)) or self._may_be_elsewhere():
            return set()
        self._first = self._sorted(wanting or trainers)[0]
        if self._spec.optimizer is None or not self.has_begun:
            # A trainer that has taken another state at this step must take this state.
            self._committed = generation(self._epoch, self.attempt + 1)
        return {self._first}

    def _may_be_elsewhere(self) -> bool:
        self._is_asking = self._elsewhere is not None and self._elsewhere()
        return self._is_asking

    def _may_begin(self, came: set[str]) -> bool:
        if self.quorum is not None and not self._whole and len(came) >= self.quorum:
            return True
        if not isinstance(self._expected, int):
            return came >= ({*self._expected} & self._may_come()) - self.left
        most = self._expected
        if self._workers is not None:
            most = min(most, len(self._may_come() - ({*self._spec.hosts} - came)))
        return len(came) >= most - len(self.left - came)

    def _may_come(self) -> set[str]:
        """Return the workers that may train. In a job of fixed size, silent workers may train too."""
        return {*self._ranks} if self._workers is None else self._workers()

    def _open(
        self,
        contributors: tuple[str, ...],
        recipients: tuple[str, ...],
        donors: tuple[str, ...],
        refusal: tuple[str, str] | None = None,
        is_over: bool = False,
    ) -> None:
        self.attempt += 1
        hosts = self._hosts(self._step) if self._spec.hosts else contributors
        self._opening = Opening(
            self._key,
            generation(self._epoch, self.attempt),
            self._step,
            self._committed,
            contributors,
            recipients,
            donors,
            hosts,
            self._spec,
            refusal,
            is_over,
        )
        self.openings.append(self._opening)


def _latest(report: Report) -> tuple[int, int]:
    """Return the step and commit of a trainer's parameters."""
    return max((report.step, report.committed), report.former)
