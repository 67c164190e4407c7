"""The epochs of a group, over a simulated network: losses, duplicates, cuts, pauses, deaths, newcomers."""

from __future__ import annotations

import functools
import os
import random

import pytest

from torch_ucx_rpc._workers import epochs
from torch_ucx_rpc._workers.epochs import Epochs
from torch_ucx_rpc._workers.messages import Epoch, Member, Prepare

# `make nightly` runs twenty times as many.
FACTOR = int(os.environ.get("SCHEDULES", "1"))
SCHEDULES = 50_000 * FACTOR
LIMIT = 1.0


# The schedules call this millions of times.
@functools.cache
def at_first(member: Member) -> Member:
    """Return the key of a worker: its member before it joined."""
    return member._replace(joined=0)


class World:
    """A group of workers, each with its own clock, and the network between them.

    A member makes progress while it is current. The world checks two rules:

    * Each number belongs to one epoch.
    * No worker is current in an epoch older than one in which a living worker has been current.

    `at_first` gives the key of a worker.
    """

    def __init__(self, seed: int, size: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.offsets: dict[Member, float] = {}
        self.machines: dict[Member, Epochs] = {}
        self.stopped: set[Member] = set()
        self.ended: list[Member] = []
        self.seen: dict[Member, set[Member]] = {}
        self.cuts: set[tuple[Member, Member]] = set()
        self.mail: list[tuple[Member, Member, object]] = []
        self.epochs: dict[int, Epoch] = {}
        # The first epoch is 2 in a group that workers can join, and 1 in a fixed group.
        self.is_static = self.random.random() < 0.3
        first = 1 if self.is_static else 2
        # The newest epoch in which each living worker has been current.
        self.newest: dict[Member, int] = {}
        members = tuple(Member(rank, f"w{rank}", 100 + rank) for rank in range(size))
        self.next_life = 200
        for one in members:
            self.start(one, Epoch(first, members, members[0]))

    def start(self, one: Member, epoch: Epoch | None = None) -> None:
        self.offsets[one] = self.random.uniform(-50, 50)
        self.seen[one] = {*self.ended}
        self.machines[one] = Epochs(one, LIMIT, self.clock(one), epoch)

    def clock(self, one: Member) -> float:
        return self.now + self.offsets[one]

    def check(self, one: Member) -> None:
        """Check the rules after an event at this worker."""
        machine = self.machines[one]
        if seen := self.seen[one]:
            for member in machine.epoch.members:
                if at_first(member) in seen:
                    machine.die(member, self.clock(one))
        self.mail += [(machine.me, to, message) for to, message in machine.take_outgoing()]
        epoch = machine.epoch
        if one in self.stopped or not machine.is_current(self.clock(one)):
            return
        newest = max(self.newest.values(), default=0)
        if not newest:
            # All workers that have been current have ended, so numbers may repeat.
            self.epochs.clear()
        assert self.epochs.setdefault(epoch.number, epoch) == epoch, "a number stands for two epochs"
        assert epoch.number >= newest, f"{one} is current in {epoch.number}, and {newest} was in force"
        self.newest[one] = epoch.number
        if epoch.number > newest:
            for other, its in self.machines.items():
                if other not in self.stopped and its.is_current(self.clock(other)):
                    assert its.epoch == epoch, f"{one} is current in {epoch} and {other} in {its.epoch}"

    def deliver(self, letter: tuple[Member, Member, object]) -> None:
        sender, to, message = letter
        worker, origin = at_first(to), at_first(sender)
        if worker in self.stopped:
            self.mail.append(letter)
        elif worker in self.machines and (origin, worker) not in self.cuts:
            self.machines[worker].receive(sender, message, self.clock(worker))
            self.check(worker)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for one, machine in self.machines.items():
            if one not in self.stopped:
                others = ({*self.machines, *self.ended} - self.seen[one]) - {one}
                machine.seek(tuple(sorted(others)), self.clock(one))
                machine.tick(self.clock(one))
                self.check(one)

    def kill(self, one: Member) -> None:
        del self.machines[one]
        self.stopped.discard(one)
        self.newest.pop(one, None)
        self.ended.append(one)

    def see_death(self, one: Member, dead: Member) -> None:
        if one not in self.stopped:
            self.seen[one].add(dead)
            self.check(one)

    def cut(self, side: list[Member], asymmetric: bool = False) -> None:
        for one in self.machines:
            for other in side:
                if one not in side:
                    self.cuts |= {(one, other)} if asymmetric else {(one, other), (other, one)}

    def misfortune(self) -> None:
        dice = self.random
        kind = dice.random()
        living = list(self.machines)
        if not living:
            return
        one = dice.choice(living)
        if kind < 0.2:
            self.kill(one)
        elif kind < 0.5:
            if self.ended:
                self.see_death(one, dice.choice(self.ended))
        elif kind < 0.6:
            self.cut(dice.sample(living, dice.randint(1, len(living))), dice.random() < 0.3)
        elif kind < 0.65:
            other = dice.choice(living)
            self.cuts |= {(one, other), (other, one)}
        elif kind < 0.72:
            self.cuts.clear()
        elif kind < 0.82:
            self.stopped ^= {one}
        elif kind < 0.9:
            if self.machines[one].is_out or dice.random() < 0.2:
                self.machines[one].rejoin(self.clock(one))
            elif len(self.offsets) < 12 and not self.is_static:
                self.next_life += 1
                self.start(Member(dice.randint(0, 9), f"n{self.next_life}", self.next_life))
        elif kind < 0.95:
            if members := self.machines[one].epoch.members:
                self.machines[one].suspect(dice.choice(members), self.clock(one))
                self.check(one)
        else:
            self.machines[one].leave(self.clock(one))

    def run(self, rounds: int) -> None:
        """Let time pass, with few or many faults. Messages of a round arrive in any order, or in a later round."""
        dice = self.random.random
        misfortunes, delay, loss = 0.05 + 0.4 * dice(), 0.6 * dice() ** 2, 0.1 * dice()
        for _ in range(rounds):
            if dice() < misfortunes:
                self.misfortune()
            mail, self.mail = self.mail, []
            self.random.shuffle(mail)
            for letter in mail:
                luck = dice()
                if luck < delay:
                    self.mail.append(letter)
                elif luck < 1 - loss:
                    self.deliver(letter)
                    if luck > 0.95:
                        self.mail.append(letter)
            self.wait(LIMIT * (0.03 + 0.15 * dice() if dice() < 0.9 else dice()))

    def calm_down(self, seconds: float) -> None:
        """End all faults: all deaths are seen, and messages arrive at once."""
        self.cuts.clear()
        self.stopped.clear()
        for one in list(self.machines):
            for dead in self.ended:
                self.see_death(one, dead)
        end = self.now + seconds
        while self.now < end:
            while self.mail:
                self.deliver(self.mail.pop())
            self.wait(LIMIT / 20)
            for one, machine in self.machines.items():
                if machine.is_out:
                    machine.rejoin(self.clock(one))


def simulate(seeds: range, rounds: int) -> None:
    for seed in seeds:
        try:
            World(seed, 2 + seed % 4).run(rounds)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error


@pytest.mark.parametrize("part", range(16 * FACTOR))
def test_no_schedule_has_two_sides_make_progress(part: int) -> None:
    simulate(range(part, SCHEDULES, 16 * FACTOR), 20)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LEASE", 2.0),
        ("is_current", lambda self, now: self.epoch is not None and not self.is_out),
        ("_is_quorum", lambda self, votes, now: 2 * len(votes) >= len(self.epoch.members)),
    ],
)
def test_the_simulation_finds_a_broken_rule(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    monkeypatch.setattr(epochs if name.isupper() else Epochs, name, value)
    with pytest.raises(AssertionError, match=r"is current in|a number stands for two epochs"):
        simulate(range(5000), 25)


def test_once_misfortunes_end_there_is_one_epoch() -> None:
    for seed in range(300):
        world = World(seed, 3 + seed % 3)
        world.run(20)
        world.calm_down(12 * LIMIT)
        current = {its.me: its.epoch for one, its in world.machines.items() if its.is_current(world.clock(one))}
        assert len(current) == len(world.machines), seed
        assert all({*current} == {*epoch.members} for epoch in current.values()), seed


class Line:
    """Members with a common clock. Their messages arrive at once, in order."""

    def __init__(self, size: int) -> None:
        self.members = tuple(Member(rank, f"w{rank}", 100 + rank) for rank in range(size))
        first = Epoch(1, self.members, self.members[0])
        self.now = 0.0
        self.machines = {one: Epochs(one, LIMIT, self.now, first) for one in self.members}
        self.away: set[Member] = set()
        # Messages of these members arrive, and messages to them do not.
        self.deaf: set[Member] = set()
        self.wait(0.3)

    def __getitem__(self, rank: int) -> Epochs:
        return next(machine for one, machine in self.machines.items() if one.rank == rank)

    def settle(self) -> None:
        busy = True
        while busy:
            busy = False
            for one, machine in self.machines.items():
                for to, message in machine.take_outgoing():
                    worker = at_first(to)
                    if not self.away & {one, worker} and worker in self.machines and worker not in self.deaf:
                        busy = True
                        self.machines[worker].receive(machine.me, message, self.now)

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.02
            for one, machine in self.machines.items():
                machine.seek(tuple(other for other in self.machines if other != one), self.now)
                machine.tick(self.now)
            self.settle()

    def kill(self, *ranks: int) -> None:
        dead = [one for one in self.machines if one.rank in ranks]
        for one in dead:
            del self.machines[one]
        for machine in self.machines.values():
            for one in dead:
                machine.die(one, self.now)
        self.settle()

    def ranks(self, rank: int) -> list[int]:
        """Return the members of this member's current epoch. Without an epoch the list is empty."""
        machine = self[rank]
        return [one.rank for one in machine.epoch.members] if machine.is_current(self.now) else []


def test_a_certain_death_begins_an_epoch_at_once() -> None:
    for dying, decider in ((2, 0), (0, 1)):
        line = Line(3)
        line.kill(dying)
        for rank in {0, 1, 2} - {dying}:
            assert line.ranks(rank) == sorted({0, 1, 2} - {dying})
            assert line[rank].epoch.decider.rank == decider


def test_a_sole_survivor_goes_on() -> None:
    line = Line(4)
    line.kill(0, 1, 3)
    assert line.ranks(2) == [2]


@pytest.mark.parametrize(
    ("size", "away", "goes_on"),
    [(2, {1}, {0}), (2, {0}, {0}), (3, {0}, {1, 2}), (3, {2}, {0, 1}), (5, {0, 1}, {2, 3, 4})],
)
def test_a_majority_or_the_decider_goes_on(size: int, away: set[int], goes_on: set[int]) -> None:
    line = Line(size)
    # The members that are away do not hear each other either. So only one side of the cut can go on.
    line.away = {one for one in line.members if one.rank in away}
    line.wait(3 * LIMIT)
    for rank in range(size):
        assert line.ranks(rank) == (sorted(goes_on) if rank in goes_on else []), rank
    line.away = set()
    line.wait(LIMIT)
    for rank in set(range(size)) - goes_on:
        assert line[rank].is_out


def test_a_silent_member_is_out_after_the_limit() -> None:
    line = Line(3)
    line.away = {line.members[2]}
    line.wait(1.3 * LIMIT)
    assert line.ranks(0) == line.ranks(1) == [0, 1]


@pytest.mark.parametrize("is_suspect", [False, True])
def test_a_member_that_is_heard_but_hears_nothing_is_out(is_suspect: bool) -> None:
    line = Line(4)
    line.deaf = {line.members[3]}
    if is_suspect:
        line[1].suspect(line.members[3], line.now)
    line.wait((1.3 if is_suspect else 2.5) * LIMIT)
    for rank in range(3):
        assert line.ranks(rank) == [0, 1, 2]
    assert line.ranks(3) == []


def test_after_a_deciders_death_a_hung_member_costs_the_limit() -> None:
    line = Line(4)
    line.away = {line.members[3]}
    line.kill(0)
    assert line[1].epoch.number == 1
    line.wait(1.3 * LIMIT)
    assert line.ranks(1) == line.ranks(2) == [1, 2]


@pytest.mark.parametrize("has_newcomer", [False, True])
def test_a_survivor_that_was_hung_founds_a_group_or_joins(has_newcomer: bool) -> None:
    line = Line(3)
    first = Epoch(2, line.members, line.members[0])
    line.machines = {one: Epochs(one, LIMIT, line.now, first) for one in line.members}
    line.wait(0.3)
    line.away = {line.members[2]}
    line.wait(2 * LIMIT)
    newcomer = Member(3, "w3", 103)
    if has_newcomer:
        # The survivor does not know the newcomer.
        line.machines[newcomer] = Epochs(newcomer, LIMIT, line.now)
        line.wait(0.5)
        assert line.ranks(3) == [0, 1, 3]
    line.kill(0, 1)
    line.wait(0.1)
    # The newcomer does not answer, but may be a member.
    assert line.ranks(2) == ([] if has_newcomer else [2])
    line.away = set()
    line.wait(LIMIT)
    assert line.ranks(2) == ([2, 3] if has_newcomer else [2])
    assert line[2].epoch.number >= (4 if has_newcomer else epochs._STRIDE)


def test_a_candidate_that_cannot_win_lets_another_stand() -> None:
    line = Line(4)
    first = Epoch(2, line.members, line.members[3])
    line.machines = {one: Epochs(one, LIMIT, line.now, first) for one in line.members}
    # Member 1 has no lease yet, so the deaths count only for member 2.
    line.away = {line.members[1]}
    line.wait(0.5)
    line.away = set()
    line.kill(0, 3)
    line.wait(3 * LIMIT)
    assert line.ranks(1) == line.ranks(2) == [1, 2]


def test_a_candidate_lists_the_dead_of_its_epoch_only() -> None:
    former, *members = (Member(rank, f"w{rank}", 100 + rank) for rank in range(4))
    candidate = Epochs(members[1], LIMIT, 0.0, Epoch(7, tuple(members), members[0]))
    for one in (former, members[0]):
        candidate.die(one, 0.0)
    asked = [message for _, message in candidate.take_outgoing() if isinstance(message, Prepare)]
    assert [message.dead for message in asked] == [(members[0],)]


@pytest.mark.parametrize("cut_off", [1.2, 1.5, 1.8, 2.2])
def test_a_decider_that_is_heard_again_has_no_rival(cut_off: float) -> None:
    line = Line(2)
    line.away = {line.members[1]}
    line.wait(cut_off * LIMIT)
    line.away = set()
    # Members check their state between two messages.
    for _ in range(500):
        line.now += LIMIT / 500
        for one, machine in line.machines.items():
            machine.tick(line.now)
            for to, message in machine.take_outgoing():
                line[to.rank].receive(one, message, line.now)
    assert line[1].is_out or line.ranks(1) == [0, 1]
    assert line.ranks(0) == ([0] if line[1].is_out else [0, 1])


def test_a_member_that_comes_back_is_a_new_member() -> None:
    line = Line(3)
    line.away = {line.members[1]}
    line.wait(2 * LIMIT)
    assert line.ranks(0) == [0, 2]
    line.away = set()
    line.wait(LIMIT)
    assert line[1].is_out
    line[1].rejoin(line.now)
    line.wait(0.5)
    assert [one.joined for one in line[1].epoch.members] == [0, 1, 0]
    assert line.ranks(1) == [0, 1, 2]


def test_a_decider_that_leaves_names_the_next() -> None:
    line = Line(3)
    line[0].leave(line.now)
    line.wait(0.5)
    assert line[0].is_out
    assert line.ranks(1) == line.ranks(2) == [1, 2]
    assert line[2].epoch.decider.rank == 1


def test_an_accepted_epoch_is_finished_by_the_next_decider() -> None:
    line = Line(4)
    line[0].suspect(line.members[3], line.now)
    proposals = dict(line[0].take_outgoing())
    line[2].receive(line.members[0], proposals[line.members[2]], line.now)
    assert [one.rank for one in line[2].voted_for().members] == [0, 1, 2]
    assert not line[2].is_current(line.now)
    line.kill(0)
    line.wait(LIMIT)
    # Member 2 had voted for an epoch without member 3.
    assert line.ranks(1) == line.ranks(2) == [1, 2]
    assert line[3].is_out
