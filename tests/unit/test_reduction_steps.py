"""Steps of a model over a simulated network: deaths, takeovers, late trainers, leaves, late messages."""

from __future__ import annotations

import itertools
import os
import random
import threading
from unittest import mock

import pytest
import torch
from torch.futures import Future

from torch_ucx_rpc._workers.epochs import _STRIDE
from torch_ucx_rpc._workers.messages import Epoch, Member
from torch_ucx_rpc.errors import EpochEnded
from torch_ucx_rpc.reduction import _steps
from torch_ucx_rpc.reduction._decider import Decider
from torch_ucx_rpc.reduction._ledger import Ledger, Next, Standing
from torch_ucx_rpc.reduction._messages import NEVER, Kept, Knowledge, Opening, Report, Spec, generation
from torch_ucx_rpc.reduction._office import TimedOut
from torch_ucx_rpc.reduction._steps import Steps

# `make nightly` runs twenty times as many.
SCHEDULES = 6000 * int(os.environ.get("SCHEDULES", "1"))
SPEC = Spec("server", ("host",), 1, None, None, 100)


def only_host(step: int) -> tuple[str, ...]:
    return ("host",)


class Trainer:
    """A trainer. Its copy of the model is its initial state and the sums that it has applied."""

    def __init__(self, name: str, quorum: int | None, expected: int) -> None:
        self.name = name
        self.epoch = 0
        self.standing = Standing()
        self.copy: list[object] = [name]
        self.opening: Opening | None = None
        self.quorum, self.expected = quorum, expected
        self.mean: object = None
        self.is_in_step = self.has_left = False
        self.number = 0

    def report(self) -> Report:
        at = self.standing
        self.number += 1
        return Report(
            self.number,
            at.step,
            at.committed,
            at.prepared,
            at.void,
            self.is_in_step,
            at.former,
            at.is_late,
            self.has_left,
            self.quorum,
            self.expected,
        )


class World:
    """Trainers, a decider among them, and a host that sums. Messages arrive in any order, or after their epoch.

    The rule: trainers of one epoch with the same step and the same commit have applied the same sums. So have all
    trainers in one step of an opening.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.expected = self.random.randint(2, 5)
        self.quorum = self.random.choice([None, self.random.randint(1, self.expected)])
        self.names = 0
        self.trainers: dict[str, Trainer] = {}
        self.epoch = 0
        self.ledger: Ledger | None = None
        self.reports: dict[str, Report] = {}
        # Each message has a receiver, an epoch, and an opening or a report for the decider.
        self.mail: list[tuple[str, int, Opening | Report]] = []
        self.puts: dict[tuple[int, int], dict[str, object]] = {}
        self.next_gradient = 0
        for _ in range(self.expected):
            self.come()

    def come(self) -> None:
        name = f"t{self.names}"
        self.names += 1
        self.trainers[name] = Trainer(name, self.quorum, self.expected)
        self.begin_epoch()

    def living(self) -> list[Trainer]:
        return list(self.trainers.values())

    def begin_epoch(self) -> None:
        self.epoch += 1
        self.reports = {}
        self.ledger = None

    def enter(self, one: Trainer) -> None:
        """Tell the trainer the epoch; it reports. When all have reported, the decider begins."""
        one.epoch = self.epoch
        self.reports[one.name] = one.report()
        if self.reports.keys() < self.trainers.keys():
            return
        ranks = {name: int(name[1:]) for name in self.trainers}
        left = {one.name for one in self.living() if one.has_left}
        first = next(iter(self.reports.values()))
        workers = {*ranks}
        self.ledger = Ledger("model", self.epoch, ranks, SPEC, only_host, first, left=left, workers=lambda: workers)
        self.ledger.resume(self.reports, ())
        self.carry_out()

    def carry_out(self) -> None:
        assert self.ledger is not None
        openings, self.ledger.openings = self.ledger.openings, []
        self.mail += [(name, self.epoch, opening) for opening in openings for name in self.ledger.trainers]

    def say(self, one: Trainer) -> None:
        self.mail.append((one.name, one.epoch, one.report()))

    # -- a trainer

    def go_on(self, one: Trainer) -> None:
        """Let a trainer act without a message."""
        at, opening = one.standing, one.opening
        if one.has_left or opening is None or opening.epoch != one.epoch:
            return
        what = at.judge(opening, one.name)
        if not one.is_in_step and what is not Next.TAKE:
            # The trainer is between two steps.
            if at.step != NEVER and self.random.random() < 0.3:
                one.is_in_step = True
                self.say(one)
            return
        if what is Next.TAKE:
            self.take(one, opening)
        elif what is Next.CLOSE:
            at.close()
            one.copy.append(one.mean)
            one.is_in_step = False
        elif what is Next.FALL_BEHIND:
            at.lose(is_late=True)
            self.say(one)
        elif what is Next.PUT:
            self.put(one, opening)

    def put(self, one: Trainer, opening: Opening) -> None:
        came = self.puts.setdefault((opening.generation, opening.step), {})
        if one.name in opening.contributors and one.name not in came:
            self.next_gradient += 1
            came[one.name] = (one.name, self.next_gradient)
        if came.keys() >= {*opening.contributors}:
            one.mean = tuple(came[name] for name in opening.contributors)
            one.standing.prepared = opening.generation
            self.say(one)

    def take(self, one: Trainer, opening: Opening) -> None:
        if one.name in opening.donors:
            furthest = max(
                len(other.copy) for other in self.living() if other.epoch == one.epoch and not other.has_left
            )
            assert len(one.copy) == furthest, f"{one.name} begins, and another trainer has done more steps"
            one.standing.begin(opening.step, opening.committed)
        else:
            donor = self.trainers.get(self.random.choice(opening.donors))
            if donor is None or donor.has_left or donor.epoch != one.epoch or donor.standing.step == NEVER:
                return
            one.copy = list(donor.copy)
            one.standing.begin(donor.standing.step, donor.standing.committed)
        self.say(one)

    # -- the world

    def check(self) -> None:
        copies: dict[tuple[int, int], tuple[str, list[object]]] = {}
        for one in self.living():
            at = one.standing
            if at.step != NEVER and not one.has_left:
                other, copy = copies.setdefault((at.step, at.committed), (one.name, one.copy))
                assert copy == one.copy, f"{one.name} and {other} differ in step {at.step}"

    def deliver(self) -> None:
        name, epoch, message = self.mail.pop(self.random.randrange(len(self.mail)))
        one = self.trainers.get(name)
        if isinstance(message, Report):
            # The fence: messages of another epoch are dropped.
            if self.ledger is not None and epoch == self.epoch:
                self.ledger.update(name, message)
                self.carry_out()
            elif epoch == self.epoch:
                # The decider does not decide yet.
                self.mail.append((name, epoch, message))
        elif one is not None and one.epoch == epoch and not one.has_left:
            known = one.opening
            if known is None or (known.generation, known.step) < (message.generation, message.step):
                one.opening = message

    def misfortune(self) -> None:
        dice = self.random
        one = dice.choice(self.living())
        if dice.random() < 0.4 and len(self.trainers) > 1:
            del self.trainers[one.name]
            self.begin_epoch()
        elif dice.random() < 0.3:
            self.begin_epoch()
        elif dice.random() < 0.3:
            self.come()
        elif one.epoch == self.epoch and not one.has_left:
            if dice.random() < 0.5 and sum(not one.has_left for one in self.living()) > 1:
                one.has_left, one.standing = True, Standing()
                self.say(one)
            elif one.opening is not None and one.opening.epoch == one.epoch and one.standing.step != NEVER:
                one.standing.void, one.is_in_step = one.opening.generation, False
                self.say(one)

    def step(self, misfortunes: float) -> None:
        dice = self.random.random()
        if dice < misfortunes:
            self.misfortune()
        elif dice < 0.5 and self.mail:
            self.deliver()
        else:
            one = self.random.choice(self.living())
            if one.epoch != self.epoch:
                self.enter(one)
            else:
                self.go_on(one)
        if self.ledger is not None and self.ledger.is_complete and self.random.random() < 0.5:
            self.ledger.close()
            self.carry_out()
        self.check()

    def settle(self) -> None:
        """Without further faults, all trainers that have not left do steps."""
        before = {one.name: one.standing.step for one in self.living()}
        for _ in range(20_000):
            self.step(0.0)
            if all(one.standing.step > before[one.name] + 2 for one in self.living() if not one.has_left):
                return
        waiting = {one.name: (vars(one.standing), one.is_in_step, one.opening) for one in self.living()}
        raise AssertionError(f"no progress: {waiting}")


@pytest.mark.parametrize("part", range(4))
def test_copies_are_equal_in_every_schedule(part: int) -> None:
    for seed in range(part, SCHEDULES, 4):
        world = World(seed)
        try:
            for _ in range(world.random.randint(10, 300)):
                world.step(0.04)
            world.settle()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("expected", [2, ("t0", "t1")])
def test_the_first_step_waits_for_a_silent_trainer(expected: int | tuple[str, ...]) -> None:
    workers, first = {"host", "t0", "t1"}, Report(0, expected=expected)
    # The epoch has left t1 out.
    ledger = Ledger("model", 2, {"host": 0, "t0": 1}, SPEC, only_host, first, left=set(), workers=lambda: workers)
    ledger.resume({"t0": first}, ())
    assert ledger.look_again()
    assert not ledger.openings
    workers.remove("t1")
    assert not ledger.look_again()
    assert ledger.openings[-1].contributors == ("t0",)


def test_training_goes_on_from_the_latest_state_left() -> None:
    # The trainers in step 9 have died. t1 was behind, and had not got their state.
    reports = {"t0": Report(1), "t1": Report(1, former=(5, 77), is_late=True), "t2": Report(1, former=(4, 66))}
    ranks = {name: int(name[1:]) for name in reports}
    ledger = Ledger("model", 3, ranks, SPEC, only_host, reports["t0"], left=set())
    ledger.resume(reports, ())
    opening = ledger.openings[-1]
    assert (opening.step, opening.committed, opening.donors) == (5, 77, ("t1",))
    assert opening.recipients == ("t0", "t1", "t2")


def test_gradients_of_the_committed_step_make_no_quorum() -> None:
    # In the former epoch the decider closed step 4. t0 has all its means, and t1 has applied it.
    reports = {
        "t0": Report(1, step=4, committed=66, prepared=77, is_ready=True, quorum=1),
        "t1": Report(1, step=5, committed=77, quorum=1),
    }
    ledger = Ledger("model", 2, {"t0": 0, "t1": 1}, SPEC, only_host, reports["t0"], left=set())
    ledger.resume(reports, ())
    assert (ledger.openings[-1].step, ledger.openings[-1].contributors) == (5, ())
    ledger.update("t1", reports["t1"]._replace(number=2, is_ready=True))
    assert ledger.openings[-1].contributors == ("t1",)


def test_a_report_that_comes_after_the_leave_is_answered() -> None:
    members = tuple(Member(rank, f"t{rank}", 100 + rank) for rank in range(2))
    decider = Decider(Epoch(1, members, members[0]), None)
    for name in ("t0", "t1"):
        decider.learn(name, Knowledge({"server": SPEC}, frozenset(), {}, {}))
    waits, leaves = (Report(number, has_left=number == 2, expected=2) for number in (1, 2))
    late: Future[object] = Future()
    decider.update("t0", "server/model", leaves, Future())
    decider.update("t0", "server/model", waits, late)
    answers, _ = decider.take_mail()
    assert any(future is late and answer is None for future, answer in answers)


def test_a_trainer_that_comes_back_gets_another_opening() -> None:
    first = Report(1, expected=2)
    ledger = Ledger("model", 1, {"t0": 0, "t1": 1}, SPEC, only_host, first, left=set())
    for name in ("t0", "t1"):
        ledger.update(name, first)
    [opening] = ledger.openings
    assert opening.recipients == ("t0", "t1")
    # The trainer drops the opening when it leaves. Its report of that comes after the one of its return.
    ledger.update("t1", first._replace(number=3))
    assert not ledger.update("t1", first._replace(number=2, has_left=True))
    assert ledger.openings[-1] == opening._replace(generation=opening.generation + 1)


@pytest.mark.parametrize("is_refused", [True, False], ids=["one takes part", "all have left"])
def test_trainers_of_a_model_have_one_quorum(is_refused: bool) -> None:
    members = tuple(Member(rank, f"t{rank}", 100 + rank) for rank in range(2))
    decider = Decider(Epoch(1, members, members[0]), None)
    # The trainer with the later step has the quorum that counts.
    known = {"t0": Report(1, quorum=2, expected=1), "t1": Report(1, step=5, committed=7, quorum=1, expected=1)}
    for name, report in known.items():
        decider.learn(name, Knowledge({"server": SPEC}, frozenset(), {"server/tensors": report}, {}))

    def answer(name: str, number: int, quorum: int, has_left: bool = False) -> object:
        future: Future[object] = Future()
        decider.update(name, "server/tensors", Report(number, quorum=quorum, expected=1, has_left=has_left), future)
        answers, _ = decider.take_mail()
        return next((value for one, value in answers if one is future), None)

    assert "gives quorum=2 for 'server/tensors', and others quorum=1" in str(answer("t0", 2, quorum=2))
    # The others do not wait for a trainer that gives up.
    assert answer("t0", 3, quorum=2, has_left=True) is None
    assert decider._ledgers["server/tensors"].trainers == ("t1",)
    if not is_refused:
        answer("t1", 2, quorum=1, has_left=True)
    assert isinstance(answer("t0", 4, quorum=2), str) is is_refused


def test_a_refusal_counts_for_one_push() -> None:
    standing = Standing()
    standing.begin(0, 7)
    refused = Opening("m", 8, 0, 7, ("t0", "t1"), ("t0", "t1"), ("t0",), ("host",), SPEC, ("t1", "its shape differs"))
    assert standing.judge(refused, "t1") is Next.REFUSED
    # The trainer gives up this push, and pushes again before the decider's next opening arrives.
    standing.void = refused.generation
    assert standing.judge(refused, "t1") is Next.WAIT
    assert standing.judge(refused._replace(generation=9, refusal=None), "t1") is Next.PUT


def test_an_epoch_has_room_for_billions_of_steps() -> None:
    report = Report(0, quorum=1, is_ready=True)
    ledger = Ledger("m", 2, {"t0": 0}, SPEC, lambda _: ("host",), report, left=set(), attempt=10**10)
    assert ledger.update("t0", report)
    assert ledger.openings[-1].epoch == 2
    # A group can be founded again many times.
    assert generation(500 * _STRIDE, 10**10) < 2**63


def test_a_bucket_that_cannot_be_sent_is_an_error_at_once() -> None:
    opening = Opening("server/model", generation(1, 1), 0, 7, ("t0",), ("t0",), ("t0",), ("host",), SPEC)
    office = mock.Mock(**{"opening.return_value": opening, "name": "t0", "numbers": itertools.count(), "steps": {}})
    office.changed = threading.RLock()
    office.name = "t0"
    with (
        mock.patch.object(_steps, "office", return_value=office),
        mock.patch.object(Steps, "_send", side_effect=RuntimeError("no device map")),
    ):
        steps = Steps("server", "model", expected=1)
        steps.standing.begin(0, 7)
        with pytest.raises(RuntimeError, match="no device map"):
            steps.put([torch.ones(1)])
        assert not steps.is_busy


def test_a_hook_that_begins_after_the_first_step_is_an_error() -> None:
    opening = Opening("model", generation(1, 0), 1, generation(1, 0), (), ("t0", "t1"), ("t0",), ("host",), SPEC)
    office = mock.Mock(**{"opening.return_value": opening})
    office.name, office.changed, office.steps, office.numbers = "t1", threading.RLock(), {}, itertools.count()
    with mock.patch.object(_steps, "office", return_value=office), mock.patch.object(_steps, "rpc_deadline"):
        steps = Steps("server", "model", expected=2)
        with pytest.raises(RuntimeError, match="'t1' is behind: the others have closed step 0 of 'server/model'"):
            steps.begin(are_equal=True)
        assert steps.standing.step == NEVER


@pytest.mark.parametrize("is_over", [False, True])
def test_means_that_are_overwritten_close_no_step(is_over: bool) -> None:
    first = Opening("server/model", 8, 0, 7, ("t0", "t1"), ("t0", "t1"), ("t0",), ("t0", "t1"), SPEC)
    later, closed = first._replace(generation=9), first._replace(generation=10, step=1, committed=8)
    office = mock.Mock(**{"is_last.side_effect": lambda opening: not is_over or opening is first})
    office.name, office.changed, office.steps, office.numbers = "t0", threading.RLock(), {}, itertools.count()

    def wait(timeout: float | None) -> None:
        # The means of the first opening come. The epoch of the later opening ends before its means come.
        if steps._generation == later.generation:
            raise EpochEnded("over")

    posted = mock.Mock(**{"wait.side_effect": wait})
    with (
        mock.patch.object(_steps, "office", return_value=office),
        mock.patch.object(_steps, "Channel", return_value=mock.Mock(**{"post.return_value": posted})),
    ):
        steps = Steps("server", "model", expected=2)
        steps.standing.begin(0, 7)
        office.opening.return_value = first
        steps.put([torch.ones(8)])
        steps._put_all(first, None)
        assert steps.standing.judge(later, "t0") is Next.PUT
        office.opening.return_value = later
        steps._put_all(later, None)
    # The trainer closes the step only if it has all means of the committed generation.
    assert steps.standing.judge(closed, "t0") is (Next.CLOSE if is_over else Next.FALL_BEHIND)
    assert bool(steps._results) is is_over


def test_parameters_that_do_not_come_in_time_are_an_error() -> None:
    office = mock.Mock(**{"opening.return_value": None, "sleep.side_effect": TimedOut})
    office.changed = threading.RLock()
    office.group.is_current.return_value = False
    with mock.patch.object(_steps, "office", return_value=office), mock.patch.object(_steps, "rpc_deadline"):
        steps = Steps("server", "parameters", expected=1, keeps=True)
        with pytest.raises(
            RuntimeError, match="parameters of 'server/parameters' have not come within rpc_timeout: this"
        ):
            steps.values_of({0}, 1)


def test_a_step_waits_for_a_silent_host_that_keeps_parameters() -> None:
    spec = Spec("server", ("ps0", "ps1"), 1, b"an optimizer", None, 100)
    workers = {"ps0", "ps1", "t0"}
    members = Member(1, "ps1", 101), Member(2, "t0", 102)
    decider = Decider(Epoch(2, members, members[0]), lambda: workers)
    key = "server/model0"
    report = Report(1, step=5, committed=77)
    decider.learn("ps1", Knowledge({}, frozenset(), {}, {key: Kept(5, 77, (1,))}))
    decider.learn("t0", Knowledge({"server": spec}, frozenset(), {key: report}, {}))

    def hosts() -> list[tuple[str, ...]]:
        return [opening.hosts for _, opening in decider.take_mail()[1]]

    assert hosts() == [()]
    assert decider.look_again()
    assert not hosts()
    workers.remove("ps0")
    assert not decider.look_again()
    assert hosts() == [("ps1", "ps1"), ("ps1", "ps1")], "to the trainer and to the host"


@pytest.mark.parametrize("former", [(NEVER, NEVER), (5, 77)], ids=["newcomer", "fallen_behind"])
def test_model_waits_while_an_outside_worker_may_have_its_state(former: tuple[int, int]) -> None:
    may_have = True
    reports = {"t0": Report(1, former=former), "t1": Report(1)}
    ranks = {name: int(name[1:]) for name in reports}
    ledger = Ledger("model", 3, ranks, SPEC, only_host, reports["t0"], left=set(), elsewhere=lambda: may_have)
    ledger.resume(reports, ())
    assert ledger.look_again()
    assert not ledger.openings
    may_have = False
    assert not ledger.look_again()
    assert ledger.openings[-1].donors == ("t0",)
