"""The trainers of a server, as one of its hosts knows them: `Roster`, and `Copies` of the models that they train.

A trainer belongs to a piece's rounds from its first push on, or from the round with which another trainer has admitted
it. The first round also waits for the trainers that are expected. A trainer that has ended or left is not waited for.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import threading

from torch.futures import Future

from torch_ucx_rpc.reduction._messages import Entry, Spec, Trainer

# Of a host that cannot say from whom: another one knows.
NOWHERE = Entry(None, False, is_leaving=True)


class Roster:
    """Which trainers are waited for, and whether all have come that are expected.

    ``lock`` guards the roster, the copies and the pieces of one host. Methods are called with the lock held.
    """

    def __init__(self, spec: Spec) -> None:
        self.lock = threading.RLock()
        self.spec = spec
        # By life: those that are waited for.
        self.trainers: dict[int, Trainer] = {}
        # Lives that are there, and are not waited for now.
        self.paused: set[int] = set()
        # A round has been completed: nobody is expected any more.
        self.has_begun = False
        # All that have ever been there, or can come no more; and of these, the ones that are not there any more.
        self._counted: set[int] = set()
        self._counted_names: set[str] = set()
        self.ended: set[int] = set()
        # Lives of all workers that have ended. What they have sent before may arrive later.
        self._gone: set[int] = set()
        # By life of a trainer: that of the one which is about to give it the state.
        self._donors: dict[int, int] = {}
        # By life of a trainer: the last request for a state that it does not wait for any more.
        self._given_up: dict[int, int] = {}
        # Hosts whose shards others have taken over. One of the same name that comes later is not among them again.
        self.lost_hosts: set[str] = set()
        # Lives that have called serve, and may begin.
        self._served: set[int] = set()
        # By model: the lives that have let go of it, and may train others.
        self._without: dict[str, set[int]] = {}

    def count(self, trainer: Trainer, is_newcomer: bool = False) -> None:
        """Wait for a trainer from now on, unless it has ended meanwhile. A newcomer is none of those expected."""
        if trainer.life in self._gone:
            return
        self.trainers[trainer.life] = trainer
        self.paused.discard(trainer.life)
        self.ended.discard(trainer.life)
        self._donors.pop(trainer.life, None)
        if not is_newcomer:
            self.note_arrival(trainer)

    def count_with(self, trainer: Trainer, donor: Trainer) -> None:
        """Wait for a trainer that another one gives the state, unless that one ends before the trainer is heard of.

        Whether it has the state then, nobody else knows.
        """
        if trainer.life in self.trainers and trainer.life not in self._donors:
            return
        self.count(trainer)
        if donor.life in self._gone:
            self.pause(trainer.life)
        elif donor.life != trainer.life:
            self._donors[trainer.life] = donor.life

    def note_serve(self, life: int) -> None:
        """A worker has called serve: it is a trainer."""
        self._served.add(life)

    def is_gone(self, trainer: Trainer) -> bool:
        return trainer.life in self._gone

    def note_arrival(self, trainer: Trainer) -> None:
        """A trainer is there, and need not be expected."""
        self._counted.add(trainer.life)
        self._counted_names.add(trainer.name)

    def let_go(self, model: str, trainer: Trainer) -> None:
        """Wait for a trainer in the rounds of a model no more."""
        self._without.setdefault(model, set()).add(trainer.life)

    def awaited(self, model: str) -> dict[int, Trainer]:
        """By life, the trainers that are waited for in the rounds of a model, or of any other piece of that name."""
        without = self._without.get(model)
        if not without:
            return self.trainers
        return {life: trainer for life, trainer in self.trainers.items() if life not in without}

    def pause(self, life: int) -> None:
        """Do not wait for a trainer until it is counted again; it misses what is completed meanwhile."""
        if self.trainers.pop(life, None) is not None:
            self.paused.add(life)

    def give_up(self, trainer: Trainer, request: int) -> None:
        """Do not wait for a trainer that does not wait for a state any more, and has not got it."""
        self._given_up[trainer.life] = request
        self.pause(trainer.life)

    def has_given_up(self, trainer: Trainer, request: int | None) -> bool:
        return request is not None and request <= self._given_up.get(trainer.life, -1)

    def leave(self, trainer: Trainer) -> None:
        self._end(trainer.life, trainer.name)

    def on_gone(self, life: int, name: str, has_successor: bool = False) -> None:
        """A worker has ended. If it was expected and never there, it will not come; its successor of that name will."""
        self._gone.add(life)
        self._given_up.pop(life, None)
        names = self.spec.expected_names
        # Where a number is expected, others that end need not be trainers.
        is_expected = name in names and not has_successor if names else life in self._served
        if life in self._counted or is_expected:
            self._end(life, name)
        for lives in self._without.values():
            lives.discard(life)
        for trainer in [trainer for trainer, donor in self._donors.items() if donor == life]:
            del self._donors[trainer]
            self.pause(trainer)

    def _end(self, life: int, name: str) -> None:
        self._counted.add(life)
        self._counted_names.add(name)
        self.ended.add(life)
        self.trainers.pop(life, None)
        self.paused.discard(life)
        self._donors.pop(life, None)

    def expect(self, trainers: int, names: tuple[str, ...], is_all: bool) -> None:
        """Have the first round wait for so many trainers, or also for these; with ``is_all``, for these alone."""
        if names and not is_all:
            if not self.spec.expected_names:
                return  # a number has been given
            names = tuple(sorted({*self.spec.expected_names, *names}))
            trainers = len(names)
        self.spec = self.spec._replace(expected=trainers, expected_names=names)

    def are_all_there(self) -> bool:
        if self.has_begun:
            return True
        names = self.spec.expected_names
        return self._counted_names.issuperset(names) if names else len(self._counted) >= self.spec.expected

    def is_newcomer(self, trainer: Trainer) -> bool:
        """Whether a trainer comes after the first round of all, which has not waited for it."""
        names = self.spec.expected_names
        if names:
            is_expected = trainer.name in names and trainer.name not in self._counted_names
        else:
            is_expected = len(self._counted) < self.spec.expected
        return (self.has_begun or self.spec.generation > 0) and not is_expected

    def absent(self, model: str, came: set[int]) -> list[str]:
        """Those that a model waits for and whose lives are not among these; in words where names are not known."""
        absent = [trainer.name for life, trainer in sorted(self.awaited(model).items()) if life not in came]
        if not self.are_all_there():
            known = {trainer.name for trainer in self.trainers.values()}
            unknown = [name for name in self.spec.expected_names if name not in known]
            absent += unknown or [f"{self.spec.expected - len(self._counted)} more"]
        return absent


class _Model:
    """The lives that have a copy of a model, and those that wait for one."""

    def __init__(self) -> None:
        self.holders: dict[int, Trainer] = {}
        self.entered: dict[int, tuple[Trainer, Future[Entry]]] = {}
        # Lives of those that began together: the first step waits for all of them.
        self.initial: set[int] = set()


class Copies:
    """Which trainers have a copy of a model, and from which of them a new one gets its own.

    Methods are called with the lock of the roster held. The futures that they return are resolved without it.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._models: dict[str, _Model] = {}
        # Requests of trainers that do not wait any more. All the same, each gets an answer.
        self._given_up: list[tuple[Future[Entry], Entry]] = []

    def enter(self, name: str, trainer: Trainer, future: Future[Entry]) -> list[tuple[Future[Entry], Entry]]:
        """A trainer asks for a copy; the answers that can be given now."""
        model = self._models.setdefault(name, _Model())
        self._roster.note_arrival(trainer)
        model.entered[trainer.life] = (trainer, future)
        return self.take_entered()

    def take_entered(self) -> list[tuple[Future[Entry], Entry]]:
        """Those that may begin with a model: once another has a copy, or all are there."""
        answers, self._given_up = self._given_up, []
        for name, model in self._models.items():
            for life, (trainer, future) in list(model.entered.items()):
                if others := [other for held_in, other in model.holders.items() if held_in != life]:
                    answers.append((future, Entry(min(others), trainer.life in model.initial)))
                    del model.entered[life]
            awaited = self._roster.awaited(name)
            is_complete = self._roster.are_all_there() and all(life in model.entered for life in awaited)
            if not model.entered or not is_complete:
                continue
            donor = min(trainer for trainer, _ in model.entered.values())
            for life, (trainer, future) in model.entered.items():
                self._roster.count(trainer)
                model.initial.add(life)
                answers.append((future, Entry(None if life == donor.life else donor, True)))
            model.entered.clear()
        return answers

    def hold(self, name: str, trainer: Trainer) -> list[tuple[Future[Entry], Entry]]:
        """A trainer has a copy of a model now, and can give it to others; the answers that can be given now."""
        if self._roster.is_gone(trainer):
            return []
        self._models.setdefault(name, _Model()).holders[trainer.life] = trainer
        # Rounds of what this host takes over will wait for it, before it has pushed any here.
        self._roster.count(trainer)
        return self.take_entered()

    def let_go(self, name: str, trainer: Trainer) -> None:
        """A trainer has no copy of a model any more, and waits for none."""
        if (model := self._models.get(name)) is not None:
            model.holders.pop(trainer.life, None)
            if (entered := model.entered.pop(trainer.life, None)) is not None:
                self._given_up.append((entered[1], NOWHERE))

    def held(self) -> list[str]:
        """The models of which somebody has a copy."""
        return [name for name, model in self._models.items() if model.holders]

    def forget(self, life: int) -> None:
        for model in self._models.values():
            model.holders.pop(life, None)
            model.entered.pop(life, None)

    def close(self) -> list[Future[Entry]]:
        """This host leaves: the requests that another host has to answer."""
        waiting = [future for model in self._models.values() for _, future in model.entered.values()]
        self._models.clear()
        return waiting
