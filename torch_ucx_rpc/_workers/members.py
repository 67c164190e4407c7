"""The members of a group in each epoch: `group`. docs/development/membership.md has the protocol.

An epoch is a number and its members. One member, the decider, begins the next one. At no moment are two epochs of a
group in force. A library puts the number into its messages, and drops messages with another number.

Example, on every worker::

    >>> from torch_ucx_rpc._workers import members
    >>> workers = members.group("mine")          # the same object for the same name
    >>> epoch = workers.epoch                    # the latest that this worker knows
    >>> epoch.number, [one.name for one in epoch.members], epoch.decider.name
    (1, ['worker0', 'worker1'], 'worker0')
    >>> workers.is_current(epoch.number)         # False once a worker has died, hung or come
    True
    >>> stop = workers.subscribe(lambda epoch: print(epoch.number))

A step of a library counts if `Group.is_current` holds on the decider before and after it. A message counts if it holds
on the receiver with the number in the message.

In a group of fixed size all workers, even dead ones, are the members of epoch 1. Elsewhere workers join as they make
the group. When one worker makes the group, all workers that it can reach make it too.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import WorkerInfo
from torch.futures import Future

from torch_ucx_rpc._threads import Thread
from torch_ucx_rpc._workers.epochs import BEAT, Epochs
from torch_ucx_rpc._workers.life import Life, PerLife
from torch_ucx_rpc._workers.lost import Gone
from torch_ucx_rpc._workers.messages import Epoch, Member, Message, epochs_in
from torch_ucx_rpc._workers.probes import Address, Lifelines

__all__ = ["Epoch", "Group", "Member", "group"]

_logger = logging.getLogger(__name__)

# Default of the seconds of silence after which a member is left out.
LIMIT_S = 5.0
# In groups up to this size all members know each other's ports (`Lifelines`); in larger ones they know only the
# decider's.
_ACQUAINTED = 64
# Limit of unanswered messages to a worker; further ones are dropped.
_UNANSWERED = 4


class Group:
    """The epochs of one group, in one life of this worker. Any thread may use it; `group` returns it."""

    def __init__(self, known: _Groups, name: str, limit: float) -> None:
        self.name = name
        self.limit = limit
        self._known = known
        self._life = life = known.life
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._told: Epoch | None = None
        self._callbacks: dict[object, Callable[[Epoch], None]] = {}
        self._unanswered: dict[str, int] = {}
        self._is_leaving = False
        now = time.monotonic()
        me = Member(life.info.id, life.info.name, known.number_of(life.info.name))
        if life.is_static:
            members = tuple(sorted(Member(one.id, one.name, known.number_of(one.name)) for one in known.workers()))
            self._epochs = Epochs(me, limit, now, Epoch(1, members, members[0]))
        else:
            self._epochs = Epochs(me, limit, now)

    # ------------------------------------------------------------------------------------------------------ public

    @property
    def me(self) -> Member:
        return self._epochs.me

    @property
    def epoch(self) -> Epoch | None:
        """The latest epoch that this worker knows; it may be over. None before this worker has joined."""
        epoch = self._epochs.epoch
        return epoch if epoch.number else None

    def is_current(self, number: int | None = None) -> bool:
        """Tell whether `epoch` is in force now with this worker as a member, and has this number, if given."""
        with self._lock:
            is_it = number is None or self._epochs.epoch.number == number
            return is_it and self._epochs.is_current(time.monotonic())

    @property
    def is_left_out(self) -> bool:
        """True if the others have left this worker out; False if it has left, or is a member."""
        with self._lock:
            return self._epochs.is_out and not self._is_leaving

    def has_ended(self, name: str, life: int) -> bool:
        """Tell whether a worker has certainly ended in this life (`Member.life`), as far as this one knows."""
        return (name, life) in self._known.ended

    def not_ended(self) -> set[str]:
        """Return the workers of a job of fixed size, except those known to have ended.

        It also asks the ports of workers outside the epoch whether those workers have ended.
        """
        others = self._known.others()
        members = {one.name for one in self._epochs.epoch.members}
        for one in others:
            if one.name not in members:
                self._known.ask_after(one)
        return {one.name for one in others} | {self.me.name}

    def subscribe(self, callback: Callable[[Epoch], None]) -> Callable[[], None]:
        """Have ``callback(epoch)`` called with each epoch that this worker enters, and with one that leaves it out.

        It runs on a thread for callbacks, in the order of the numbers. The first call has the present epoch, if there
        is one. Returns a function that ends the subscription.
        """
        token = object()
        with self._lock:
            self._callbacks[token] = callback
            if self._told is not None:
                self._known.tell(self, token, self._told)

        def stop() -> None:
            with self._lock:
                self._callbacks.pop(token, None)

        return stop

    def suspect(self, name: str) -> None:
        """Have a member left out that this worker cannot work with, for instance since a call to it has failed."""
        with self._lock:
            epoch = self._epochs.epoch
            for one in [one for one in epoch.members if one.name == name]:
                self._known.ask_after(one)
                self._epochs.suspect(one, time.monotonic())
            self._flush()

    def leave(self, timeout: float | None = None) -> None:
        """Leave the group. Returns once that is decided, or after ``timeout`` seconds (default: the limit)."""
        deadline = time.monotonic() + (self.limit if timeout is None else timeout)
        with self._changed:
            self._is_leaving = True
            self._epochs.leave(time.monotonic())
            self._epochs.tick(time.monotonic())
            self._flush()
            while not self._epochs.is_out and self._epochs.epoch.number and time.monotonic() < deadline:
                self._changed.wait(self.limit * BEAT)

    def rejoin(self) -> None:
        """Join again as a newcomer, after this worker was left out, has left, or was cut off. `wait` works again."""
        with self._lock:
            self._is_leaving = False
            now = time.monotonic()
            self._epochs.rejoin(now)
            self._changed.notify_all()
            self._tick(now)

    # ---------------------------------------------------------------------------------------------- from the driver

    def tick(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._tick(now)
            doubtful, epoch = self._epochs.quiet(now, self.limit / 2), self._epochs.epoch
            if doubtful and epoch.decider != self.me:
                # The others may go on without the decider if enough of them have ended. Some may have ended unnoticed.
                doubtful = [one for one in epoch.members if one != self.me]
            for one in doubtful:
                self._known.ask_after(one)

    def _tick(self, now: float) -> None:
        if not self._epochs.epoch.number:
            self._epochs.seek(self._known.others(), now)
        self._epochs.tick(now)
        self._flush()

    def receive(self, sender: Member, messages: Sequence[Message]) -> None:
        with self._lock:
            now = time.monotonic()
            for message in messages:
                self._epochs.receive(sender, message, now)
            self._tick(now)

    def end(self, name: str, life: int) -> None:
        """Note that a worker has certainly ended."""
        with self._lock:
            epoch = self._epochs.epoch
            for one in epoch.members:
                if one.name == name and one.life == life:
                    self._epochs.die(one, time.monotonic())
            self._flush()

    def introduce(self) -> None:
        """Have the others make this group."""
        with self._lock:
            epoch, me = self._epochs.epoch, self._life.info.name
            if len(epoch.members) <= _ACQUAINTED or epoch.decider.name == me:
                for info in self._known.workers():
                    if info.name != me:
                        self._call(info, [])

    def _flush(self) -> None:
        by_member: dict[Member, list[Message]] = {}
        for to, message in self._epochs.take_outgoing():
            by_member.setdefault(to, []).append(message)
        for to, messages in by_member.items():
            self._call(WorkerInfo(to.name, to.rank), messages)
        epoch = self._epochs.epoch
        if epoch.number and epoch is not self._told:
            is_first = self._told is None
            self._told = epoch
            self._changed.notify_all()
            for one in epoch.members:
                for name, life in list(self._known.ended):
                    if (one.name, one.life) == (name, life):
                        self._epochs.die(one, time.monotonic())
            for token in self._callbacks:
                self._known.tell(self, token, epoch)
            if is_first:
                self.introduce()

    def _call(self, info: WorkerInfo, messages: list[Message]) -> None:
        """Send messages; they may be lost. The caller holds the lock, which guards the calls without an answer."""
        open_ = self._unanswered.get(info.name, 0)
        if open_ >= _UNANSWERED:
            return
        addresses = self._known.addresses_of(self.me, messages)
        try:
            call = rpc.rpc_async(
                info, _receive, args=(self.name, self.limit, self.me, addresses, messages), timeout=max(1.0, self.limit)
            )
        except RuntimeError as error:
            _logger.debug("group %r: nothing can be sent to %s: %s", self.name, info.name, error)
            return
        self._unanswered[info.name] = open_ + 1

        def end(done: Future[None]) -> None:
            with self._lock:
                self._unanswered[info.name] -= 1
                try:
                    done.value()
                except RuntimeError as error:
                    _logger.debug("group %r: %s has not heard: %s", self.name, info.name, error)
                    # TensorPipe's agent does not report the end of a worker. So ask now: an end counts only if this
                    # worker sees it soon.
                    for one in self._epochs.epoch.members:
                        if one.name == info.name:
                            self._known.ask_after(one)

        call.add_done_callback(end)

    def callback_of(self, token: object) -> Callable[[Epoch], None] | None:
        return self._callbacks.get(token)

    def why_not_current(self) -> str:
        """Say why `is_current` is False, as a sentence for an error."""
        epoch, me = self._epochs.epoch, self._life.info.name
        if not epoch.number:
            silent = ", ".join(sorted(repr(name) for name in self._epochs.not_free()))
            return (
                f"worker {me!r} has not joined group {self.name!r} yet. It waits until a member lets it in, or "
                f"all others have said that they are not members: {silent or 'no worker'} has not said so"
            )
        if self._epochs.is_out:
            return (
                f"worker {me!r} is not a member of group {self.name!r} any more, which is in epoch {epoch.number}: it "
                f"has left, was suspected, or has not been heard for {self.limit:g} s. It may join again, as a newcomer"
            )
        if (following := self._epochs.voted_for()) is not None:
            return (
                f"worker {me!r} has voted for epoch {following.number} of group {self.name!r}, which has not begun; "
                f"it has the members {', '.join(repr(one.name) for one in following.members)}"
            )
        silent = ", ".join(sorted(repr(one.name) for one in self._epochs.quiet(time.monotonic(), self.limit / 2)))
        return (
            f"worker {me!r} is cut off from {silent or 'the other members'} of group {self.name!r}: it has not heard "
            f"enough of them for {self.limit:g} s to know whether epoch {epoch.number} is in force. It may join again"
        )


class _Groups:
    """All groups of one life of this worker, with the thread that drives them."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.groups: dict[str, Group] = {}
        self.ended: set[tuple[str, int]] = set()
        self._making = threading.Lock()
        self._lifelines = Lifelines(life.agent)
        self._asking: dict[tuple[str, int], Callable[[], None]] = {}
        self._numbers: dict[str, int] = {}
        self._addresses = {(life.info.name, self.number_of(life.info.name)): self._lifelines.own}
        # Workers that have been lost and may still be members of a group. Their ports are known, so `ask_after` may
        # find out that they have ended.
        self._doubtful: set[tuple[str, int]] = set()
        # Workers whose ranks or names others have taken. If one was lost before, nothing else reports its end.
        self._replaced: set[tuple[str, int]] = getattr(getattr(life.agent, "group", None), "replaced", set())
        # Not a SimpleQueue: its get() does not wait in ``threading``, see `_threads`.
        self._calls: queue.Queue[tuple[Group, object, Epoch] | None] = queue.Queue()
        life.watch(self._on_gone)
        if life.tells_ends and not life.is_static:
            life.before_leaving(self._leave)
        Thread(self._drive, name="torch_ucx_rpc-members").start()
        Thread(self._tell, name="torch_ucx_rpc-epochs").start()

    def get(self, name: str, limit: float) -> Group:
        if (known := self.groups.get(name)) is not None:
            return known
        with self._making:
            if (known := self.groups.get(name)) is not None:
                return known
            made = Group(self, name, limit)
            self.groups[name] = made
        for worker, life in list(self.ended):
            made.end(worker, life)
        made.tick()
        made.introduce()
        return made

    def workers(self) -> list[WorkerInfo]:
        """Return all workers of the job, in a group of fixed size even ended ones."""
        infos: list[WorkerInfo] = self.life.agent.get_worker_infos()
        return infos

    def others(self) -> tuple[Member, ...]:
        """Return all other workers that may be members of a group; some of them may have ended."""
        self._doubtful -= self.ended
        lost = [Member(0, name, life) for name, life in list(self._doubtful)]
        for one in lost:
            self.ask_after(one)
        there = [Member(one.id, one.name, self.number_of(one.name)) for one in self.workers()]
        if self.life.is_static:
            # The list keeps the dead.
            there = [one for one in there if (one.name, one.life) not in self.ended]
        return tuple(one for one in (*there, *lost) if one.name != self.life.info.name)

    def number_of(self, worker: str) -> int:
        """Return the number of a worker's life. In a group of fixed size it is the same on all workers.

        In other groups it may be the number of an earlier worker of this name; there `Epochs.seek` compares only names.
        """
        if worker == self.life.info.name and not self.life.is_static:
            return self.life.number
        if not self.life.tells_ends:
            # In a group of fixed size a worker has one life.
            return 0
        if worker not in self._numbers:
            for peer in self.life.agent._statistics()["peers"]:
                self._numbers.setdefault(peer["name"], peer["session"])
        return self._numbers.get(worker, self.life.number)

    def addresses_of(self, me: Member, messages: Sequence[Message]) -> dict[tuple[str, int], Address]:
        """Return the addresses of this worker and of the members of all epochs in the messages."""
        named = {me}.union(*(epoch.members for message in messages for epoch in epochs_in(message)))
        keys = [(one.name, one.life) for one in (named if len(named) <= _ACQUAINTED else (me,))]
        return {key: self._addresses[key] for key in keys if key in self._addresses}

    def meet(self, addresses: dict[tuple[str, int], Address]) -> None:
        for key, address in addresses.items():
            if key not in self._addresses:
                self._addresses[key] = address
                self._lifelines.meet(address)

    def ask_after(self, one: Member) -> None:
        """Find out whether a worker has ended, without waiting."""
        key = (one.name, one.life)
        if key not in self.ended and (address := self._addresses.get(key)) is not None:
            self._asking.setdefault(key, lambda: self.end(*key))
            self._lifelines.ask(address, self._asking[key])

    def end(self, name: str, life: int) -> None:
        """Note that a worker has certainly ended."""
        self.ended.add((name, life))
        for one in list(self.groups.values()):
            one.end(name, life)

    def tell(self, one: Group, token: object, epoch: Epoch) -> None:
        self._calls.put((one, token, epoch))

    def _on_gone(self, gone: Gone) -> None:
        life = gone.session if self.life.tells_ends else 0
        if not gone.failed or gone.has_ended:
            self.end(gone.name, life)
        else:
            if (gone.name, life) in self._addresses:
                self._doubtful.add((gone.name, life))
            self.ask_after(Member(gone.rank, gone.name, life))

    def _leave(self) -> None:
        for one in list(self.groups.values()):
            one.leave(timeout=min(1.0, one.limit))

    def _drive(self) -> None:
        # This event is never set. Unlike time.sleep(), its wait is in ``threading``, see `_threads`.
        pause = threading.Event()
        while True:
            limits = [one.limit for one in list(self.groups.values())]
            pause.wait(min(limits, default=LIMIT_S) * BEAT / 2)
            if not self.life.lasts():
                break
            self._lifelines.drain()
            for key in self._replaced - self.ended:
                self.end(*key)
            for one in list(self.groups.values()):
                try:
                    one.tick()
                except Exception:
                    _logger.debug("group %r is not driven", one.name, exc_info=True)
        self._lifelines.close()
        self._calls.put(None)

    def _tell(self) -> None:
        while (call := self._calls.get()) is not None:
            one, token, epoch = call
            callback = one.callback_of(token)
            if callback is None:
                continue
            try:
                callback(epoch)
            except Exception:
                _logger.exception("a callback for epoch %d of group %r has raised", epoch.number, one.name)


_groups = PerLife(_Groups)


def group(name: str, limit: float = LIMIT_S) -> Group:
    """Return the group of this name in this life of the worker, which becomes a member with the first call.

    Args:
        name (str): name of the group, the same on all workers.
        limit (float): the seconds of silence after which a member is left out. The call that makes the group here
            decides; it may come from another worker.

    Raises NotRunning where RPC is not running.
    """
    return _groups().get(name, limit)


# ---------------------------------------------------------------------------------------------- what others call here


def _receive(
    name: str, limit: float, sender: Member, addresses: dict[tuple[str, int], Address], messages: list[Message]
) -> None:
    known = _groups()
    known.meet(addresses)
    one = known.get(name, limit)
    if messages:
        one.receive(sender, messages)
