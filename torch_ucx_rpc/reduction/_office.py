"""This worker among the others: `Office`, which knows the epoch and carries the messages of trainers, hosts and
decider.

The office drops messages of epochs before this worker's epoch. A message of a later epoch waits until this worker
enters that epoch.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from torch_ucx_rpc._threads import later
from torch_ucx_rpc._workers import members
from torch_ucx_rpc._workers.life import Life, PerLife
from torch_ucx_rpc.channel import Channel
from torch_ucx_rpc.channel._channel import advance_all
from torch_ucx_rpc.reduction._decider import Decider
from torch_ucx_rpc.reduction._host import Fill, Host, Values
from torch_ucx_rpc.reduction._messages import CHANNELS, NEVER, Knowledge, Opening, Report, Spec, channel_of, generation

_logger = logging.getLogger(__name__)

# Seconds between two checks whether the epoch is in force.
_LOOK_AGAIN_S = 0.02
# Seconds after which a host that was left out comes back. The time doubles with each return.
_COMING_BACK_S, _MOST_S = 1.0, 60.0
# Seconds between two searches for restarted hosts.
_CALLING_BACK_S = 0.5
# Seconds after which the decider asks a worker outside the epoch again whether it has a model.
_ASKING_S = 5.0


class TimedOut(Exception):
    """The awaited event has not come in time."""


class Trained(Protocol):
    """A model that this worker trains: `Steps`."""

    # The reason why the decider does not take this trainer.
    refusal: str | None

    def report(self) -> Report:
        """Report the trainer's step. The caller holds the lock of the office."""

    def give(self) -> Future[Any]:
        """Return the state of the model at the beginning of a step, with its step and commit."""


class Office:
    """This worker's part in all models, in one life of the worker. Any thread may use it.

    Attributes:
        name (str): name of this worker.
        epoch (Epoch): the last one that this worker has entered; None before the first.
        changed (Condition): notified of epochs, openings and answers. Its lock guards this object.
        steps (dict): the models that this worker trains, by key.
        servers (dict): servers that this worker has called `serve` for, by name.
        left (set): servers that it has left.
        host (Host): its work as a host.
        numbers (Iterator): counts the reports.
    """

    def __init__(self, life: Life) -> None:
        self.life = life
        self.name = life.info.name
        self.changed = threading.Condition(threading.RLock())
        self.epoch: members.Epoch | None = None
        self.steps: dict[str, Trained] = {}
        self.servers: dict[str, Spec] = {}
        self.left: set[str] = set()
        self.host = Host(self)
        self.numbers = itertools.count()
        self._openings: dict[str, Opening] = {}
        # The last generations of models that were dropped in this epoch: this worker ignores late openings of them.
        self._dropped: dict[str, int] = {}
        # The decider, if this worker decides.
        self._decider: Decider | None = None
        # Messages for an epoch that this worker has not entered, or does not decide yet.
        self._early: list[tuple[int, bool, Callable[[], None]]] = []
        # Seconds until this worker rejoins the group. They double with each return, and fall back to the first value
        # after a membership of _MOST_S.
        self._coming_back_s = _COMING_BACK_S
        self._came_at = 0.0
        self._looks_again = False
        self._called_back = 0.0
        # The decider asks workers outside the epoch whether they have a model: questions by model's key and worker.
        self._asked: dict[tuple[str, str], Future[bool]] = {}
        self.group = members.group("reduction")
        self.group.subscribe(self._enter)

    # -- epochs

    def _enter(self, epoch: members.Epoch) -> None:
        with self.changed:
            if epoch.number <= self._number():
                return
            was_in, self.epoch = self._is_in(), epoch
            if not was_in:
                self._came_at = time.monotonic()
            self._end_steps(epoch.number)
            self._dropped.clear()
            if self._decider is not None:
                self._decider.end()
            decides = epoch.decider.name == self.name
            workers = self.group.not_ended if self.life.is_static else None
            elsewhere = None if self.life.is_static else self._may_have
            self._asked.clear()
            self._decider = Decider(epoch, workers, elsewhere) if decides else None
            due = self._take_early(decides=False)
            self.changed.notify_all()
        for act in due:
            act()
        if decides:
            for one in epoch.members:
                self._call(one.name, _tell_all, epoch.number, then=functools.partial(self._learn, epoch, one.name))
        elif self._is_in():
            # The decider may know the group only by its messages, and have no office yet.
            self._call(epoch.decider.name, _come)
        else:
            # A trainer comes back at once, through `keep_in`.
            if time.monotonic() - self._came_at > _MOST_S:
                self._coming_back_s = _COMING_BACK_S
            delay, self._coming_back_s = self._coming_back_s, min(2 * self._coming_back_s, _MOST_S)
            self._later(delay, self.keep_in)

    def _end_steps(self, number: int) -> None:
        """End the waits of earlier epochs, and drop values for them.

        This worker may have been left out, and have missed the openings or the end of a model.
        """
        with contextlib.suppress(RuntimeError):  # RPC has been shut down
            advance_all(CHANNELS, generation(number, 0))
        self._openings.clear()

    def _number(self) -> int:
        return -1 if self.epoch is None else self.epoch.number

    def _is_in(self) -> bool:
        return self.epoch is not None and any(one.name == self.name for one in self.epoch.members)

    def keep_in(self) -> None:
        """Rejoin if the latest epoch does not have this worker."""
        with self.changed:
            epoch = self.group.epoch
            if epoch is not None and self.group.me not in epoch.members and self.life.lasts():
                self.group.rejoin()

    @staticmethod
    def _later(delay: float, act: Callable[[], None]) -> None:
        later(delay, act, name="torch_ucx_rpc-later")

    def sleep(self, deadline: float | None) -> None:
        """Wait for a change, with the lock held. Raises TimedOut after the deadline."""
        # Condition.wait without a limit does not see Ctrl-C on every platform. While the epoch is not in force, look
        # more often: it may be in force soon.
        longest = 0.1 if self.group.is_current() else _LOOK_AGAIN_S
        left = longest if deadline is None else min(longest, deadline - time.monotonic())
        if left <= 0:
            raise TimedOut
        self.changed.wait(left)

    def _at(self, number: int, decides: bool, act: Callable[[], None]) -> None:
        """Run a function once this worker is in this epoch. With ``decides``, the function also waits until the decider
        has the knowledge of all members."""
        with self.changed:
            is_early = number > self._number()
            if is_early or (decides and number == self._number() and self._decider and not self._decider.is_open):
                self._early.append((number, decides, act))
                return
        act()

    def _take_early(self, decides: bool) -> list[Callable[[], None]]:
        now = self._number()
        # A request to the decider of an epoch that is over gets the answer None.
        due = [one for one in self._early if one[0] < now or (one[0] == now and (decides or not one[1]))]
        self._early = [one for one in self._early if one not in due]
        return [act for _, _, act in due]

    # -- calls

    def _call(
        self,
        name: str,
        function: Callable[..., Any],
        *arguments: Any,
        then: Callable[[Future[Any]], None] | None = None,
    ) -> Future[Any] | None:
        """Call a function on a worker; on this one without RPC. A worker becomes suspect if the call fails."""
        try:
            if name == self.name:
                future: Future[Any] = getattr(function, "__wrapped__", function)(*arguments)
            else:
                future = rpc.rpc_async(name, function, args=arguments, timeout=0)
        except RuntimeError as error:
            self._suspect(name, error)
            return None

        def end(done: Future[Any]) -> None:
            try:
                done.value()
            except RuntimeError as error:
                self._suspect(name, error)
            else:
                if then is not None:
                    then(done)
            self.notify()

        if future is not None:
            future.add_done_callback(end)
        return future

    def notify(self) -> None:
        """Wake all threads that wait for a change."""
        with self.changed:
            self.changed.notify_all()

    def _suspect(self, name: str, error: RuntimeError) -> None:
        _logger.info("%s: no message reaches %s: %s", self.name, name, error)
        self.group.suspect(name)

    # -- the beginning of an epoch

    def tell_all(self, number: int) -> Future[Knowledge]:
        """Return this worker's knowledge once it is in this epoch. From then on it drops messages of earlier epochs."""
        future: Future[Knowledge] = Future()

        def tell() -> None:
            with self.changed:
                reports = {key: steps.report() for key, steps in self.steps.items()}
                known = Knowledge(dict(self.servers), frozenset(self.left), reports, self.host.report())
            future.set_result(known)

        self._at(number, False, tell)
        return future

    def _learn(self, epoch: members.Epoch, name: str, done: Future[Knowledge]) -> None:
        known = done.value()
        with self.changed:
            if self._decider is None or self._decider.epoch is not epoch:
                return
            self._decider.learn(name, known)
            due = self._take_early(decides=True) if self._decider.is_open else []
        self._carry_out()
        for act in due:
            act()

    # -- the decider

    def ask(self, deadline: float | None, method: str, *arguments: Any) -> Any:
        """Ask the decider of the epoch that is in force, and wait for its answer. Raises TimedOut after the
        deadline."""
        while True:
            self.keep_in()
            with self.changed:
                while self.epoch is None or not self.group.is_current():
                    self.keep_in()
                    self.sleep(deadline)
                epoch = self.epoch
            future = self._ask(epoch, method, arguments)
            with self.changed:
                while epoch is self.epoch and (future is None or not _is_answered(future)):
                    self.sleep(deadline)
            if future is not None and _is_answered(future) and (answer := future.value()) is not None:
                return answer

    def _ask(self, epoch: members.Epoch, method: str, arguments: tuple[Any, ...], **options: Any) -> Future[Any] | None:
        return self._call(epoch.decider.name, _decide, epoch.number, method, self.name, arguments, **options)

    def update(self, key: str, report: Report) -> None:
        """Report to the decider. The next opening may be the answer."""
        with self.changed:
            epoch = self.epoch if self._is_in() else None

        def take(done: Future[Opening | str | None]) -> None:
            answer = done.value()
            if isinstance(answer, Opening):
                self.receive(answer)
            elif answer is not None and (steps := self.steps.get(key)) is not None:
                steps.refusal = answer

        # When this worker enters an epoch, it reports anyway.
        if epoch is not None:
            self._ask(epoch, "update", (key, report), then=take)

    def decide(self, number: int, method: str, name: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """Answer a request to the decider of an epoch, with None if the epoch is over."""
        future: Future[Any] = Future()

        def act() -> None:
            with self.changed:
                decider = self._decider if number == self._number() else None
                if decider is None or name not in decider.ranks:
                    future.set_result(None)
                    return
                getattr(decider, method)(name, *arguments, future)
            self._carry_out()

        self._at(number, True, act)
        return future

    def _look_again(self) -> None:
        self._looks_again = False
        self._carry_out()

    def _carry_out(self) -> None:
        """Send the decider's decisions."""
        with self.changed:
            decider = self._decider
            if decider is None:
                return
            # A step is committed only in an epoch that is in force at this moment.
            is_waiting = decider.look_again()
            is_late = decider.close(self.group.is_current)
            answers, openings = decider.take_mail()
        if (is_late or is_waiting) and not self._looks_again:
            self._looks_again = True
            self._later(_LOOK_AGAIN_S if is_late else _CALLING_BACK_S, self._look_again)
        for future, answer in answers:
            future.set_result(answer)
        for name, opening in openings:
            self._call(name, _receive, opening)

    def _may_have(self, key: str) -> bool:
        """Tell whether a living worker outside the epoch has a model, or has not answered yet. The caller holds the
        lock."""
        assert self.epoch is not None
        inside = {one.name for one in self.epoch.members}
        outside = [info.name for info in self.life.living() if info.name not in inside]
        for name in outside:
            asked = self._asked.get((key, name))
            if asked is None or (asked.done() and not _is_answered(asked)):
                with contextlib.suppress(RuntimeError):  # the worker has just ended
                    self._asked[key, name] = asked = rpc.rpc_async(name, _has, args=(key,), timeout=_ASKING_S)
                    asked.add_done_callback(lambda _: self._later(0, self._look_again))
        answers = [self._asked.get((key, name)) for name in outside]
        return any(asked is None or not _is_answered(asked) or asked.value() for asked in answers)

    # -- decisions

    def receive(self, opening: Opening) -> None:
        """Take an opening. The opening of a later epoch waits until this worker enters that epoch."""
        self._at(opening.epoch, False, lambda: self._take(opening))

    def _take(self, opening: Opening) -> None:
        with self.changed:
            known = self._openings.get(opening.key)
            if opening.epoch != self._number():
                return
            if known is not None and (known.generation, known.step) >= (opening.generation, opening.step):
                return
            if opening.generation <= self._dropped.get(opening.key, NEVER):
                return
            self._openings[opening.key] = opening
            is_new = known is None or known.generation != opening.generation
            # This ends all waits for values of earlier generations.
            channel = Channel(channel_of(opening.key), epoch=opening.generation)
            if opening.is_over and opening.key not in self.steps:
                self._drop(opening.key, channel)
            self.changed.notify_all()
        self.host.open(opening, channel if is_new else None)

    def _drop(self, key: str, channel: Channel) -> None:
        self._dropped[key] = channel.epoch
        # Do not close the channel: values that come late, as after a network cut, would wait for ever.
        channel.advance(channel.epoch + 1)
        del self._openings[key]

    def opening(self, key: str) -> Opening | None:
        """Return the last opening of a model, if its epoch is in force. The caller holds the lock."""
        known = self._openings.get(key)
        return known if known is not None and known.epoch == self._number() and self.group.is_current() else None

    def is_over(self, opening: Opening) -> bool:
        """Tell whether the generation of an opening is over, as far as this worker knows. The caller holds the lock."""
        known = self._openings.get(opening.key)
        return known is None or known.generation != opening.generation

    def is_last(self, opening: Opening) -> bool:
        """Tell whether an opening is the latest known, in force or not. The caller holds the lock."""
        return self._openings.get(opening.key) is opening and opening.epoch == self._number()

    def forget(self, key: str) -> None:
        """Drop a model."""
        with self.changed:
            self.steps.pop(key, None)
            if (known := self._openings.get(key)) is not None:
                with contextlib.suppress(RuntimeError):  # RPC has been shut down
                    self._drop(key, Channel(channel_of(key), epoch=known.generation))

    def refuse(self, opening: Opening, name: str, reason: str) -> None:
        """Report that a step cannot be done. Either the gradients of the trainer ``name`` do not fit, or this host
        cannot sum any (``name`` is "")."""
        with self.changed:
            epoch = self.epoch
        if epoch is not None and epoch.number == opening.epoch:
            self._ask(epoch, "refuse", (opening.key, opening.generation, name, reason))

    def are_lost(self, spec: Spec) -> bool:
        """Tell whether all hosts of a server have ended for good. A silent host may come back."""
        return self.life.is_static and not self.group.not_ended() & {*spec.hosts}

    def call_back(self, spec: Spec) -> None:
        """In a group that workers may join, ask restarted hosts to join, at most every ``_CALLING_BACK_S``."""
        with self.changed:
            now, epoch = time.monotonic(), self.epoch
            if self.life.is_static or epoch is None or now < self._called_back + _CALLING_BACK_S:
                return
            self._called_back = now
            absent = {*spec.hosts} - {one.name for one in epoch.members}
        for info in self.life.living() if absent else ():
            if info.name in absent:
                with contextlib.suppress(RuntimeError):
                    rpc.rpc_async(info.name, _come, timeout=_CALLING_BACK_S)


def _is_answered(future: Future[Any]) -> bool:
    if not future.done():
        return False
    try:
        return future.value() is not None
    except RuntimeError:
        return False


office = PerLife(Office)


# ---------------------------------------------------------------------------------------------- what others call here


@rpc.functions.async_execution
def _tell_all(number: int) -> Future[Knowledge]:
    return office().tell_all(number)


@rpc.functions.async_execution
def _decide(number: int, method: str, name: str, arguments: tuple[Any, ...]) -> Future[Any]:
    return office().decide(number, method, name, arguments)


def _receive(opening: Opening) -> None:
    office().receive(opening)


def _come() -> None:
    office().keep_in()


def _has(key: str) -> bool:
    """Tell whether this worker trains a model, and has its state. If so, the worker comes back to the group."""
    if not office.is_made():
        return False
    own = office()
    with own.changed:
        steps = own.steps.get(key)
        report = None if steps is None else steps.report()
    if report is None or report.has_left or (report.step, *report.former) == (NEVER, NEVER, NEVER):
        return False
    own.keep_in()
    return True


@rpc.functions.async_execution
def give(key: str) -> Future[Any]:
    """Return the state of a model of this worker; None if it has dropped the model."""
    if (steps := office().steps.get(key)) is not None:
        return steps.give()
    nothing: Future[Any] = Future()
    nothing.set_result(None)
    return nothing


def fill(key: str, number: int, spec: Spec, tensors: list[Tensor]) -> Fill:
    """Call `Host.fill` of this worker."""
    return office().host.fill(key, number, spec, tensors)


@rpc.functions.async_execution
def values(key: str, number: int, spec: Spec, step: int) -> Future[Values]:
    """Call `Host.values` of this worker."""
    found = office().host.values(key, number, spec, step)
    # torch would send the exception of a failed future as its value.
    return found.then(lambda done: done.value())
