"""One worker's part in keeping the names of the job: `Directory`.

**Who decides.** A worker that wants to offer a name asks the decider, the living worker with the lowest rank. The
decider grants it if nobody else's offer stands against it, and knows it from then on. Then the worker announces it to
all others, by one message each. The decider's grant is volatile; the truth about an offer is kept by its owner.

**When the decider dies.** The next one, before its first decision, gathers what every living worker offers and knows.
A grant that reached its owner is among that. One that did not is asked for again: a claim is repeated with the next
decider when the asked one is lost. A worker that has been gathered from by a decider takes no grant of an earlier one
any more, be it that the answer was still under way; it asks again. It applies a grant under the lock under which it is
gathered from, so a grant is among what is gathered, or void. So a name has never two owners that exclude each other, as
long as workers agree on who is alive. Across a cut of the network each side decides for itself, and a worker that sees
both sides refuses to choose between two such owners.

**Joining.** A worker that joins with a rank below the decider's gathers likewise, and the former decider refuses
further claims from the moment it has answered. Any other worker asks the decider for all that there is when it first
uses this library. The decider hears of a change before it is announced, so this copy lacks nothing that was announced
before the worker was a member; what is announced later reaches it directly. Changes carry numbers, and may come in any
order (`_table`).

**Leaving.** When the agent sees the end of a worker, each worker drops its names by itself. A session, drawn anew for
each life of a worker, tells a late message of the dead from its successor of the same name. Other backends tell nothing
of an end: there a worker drops the names of one to which a call has failed.

A lookup is that of a dict. The decider is asked, once, for a name that is not in it, and for one that two workers seem
to have which only one may have: an announcement may still be under way.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import WorkerInfo, get_rpc_timeout

from torch_ucx_rpc._workers.life import Life, PerLife
from torch_ucx_rpc._workers.lost import Gone, was_lost
from torch_ucx_rpc.services._announcing import Announcer
from torch_ucx_rpc.services._deciding import Decider, Verdict
from torch_ucx_rpc.services._errors import NameTaken, contested
from torch_ucx_rpc.services._table import Change, Offer, Owner, Table

_logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

# Until another worker has noticed what this one has: who is alive, and so who decides.
_PAUSE_S = 0.005
# Where calls have no timeout.
_PATIENCE_S = 60.0

# States of peers that are not at their end.
_THERE = ("present", "leaving")


class Directory:
    """Of one life of this worker: what it offers, and the table of all."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.info = info = life.info
        self.lock = threading.RLock()
        self.table = Table()
        self.table.apply(Change(info.name, info.id, life.number, None, 0, role_of(info.name), (), (), ()))
        self._is_synced = False
        self._sync_lock = threading.Lock()
        self._change_lock = threading.Lock()
        # Called with the names whose offers have changed.
        self.on_change: Callable[[set[str]], None] = lambda _: None
        self._announcer = Announcer(life, _hear, self._everything)
        self.decider = Decider(life, self.lock, self.table, _gather, self._learn, self._apply)
        life.watch(self._on_gone)

    # -- what this worker knows

    @property
    def own(self) -> Owner:
        return self.table.owners[self.info.name]

    def sync(self) -> None:
        """Take over the table from the decider, once."""
        if self._is_synced:
            return
        with self._sync_lock:
            if self._is_synced:
                return

            def ask(decider: WorkerInfo) -> list[Change] | None:
                return _ask(decider, _tell_all)

            self._learn(self._from_decider(ask, "to learn the names of the job"))
            self._is_synced = True

    def look_up(self, name: str) -> dict[str, Offer]:
        """The workers that offer a name, by their names.

        Asks the decider before it says that there are none, and where two offer what only one may: then this worker has
        not heard yet that one of them offers it no more. NameContested if the decider knows no better.
        """
        self.sync()
        with self.lock:
            offers = self.table.offers_of(name)
        if offers and not _is_contested(offers):
            return offers

        def ask(decider: WorkerInfo) -> list[Change] | None:
            return _ask(decider, _tell_owners, name, tuple(offers))

        self._learn(self._from_decider(ask, f"for {name!r}"))
        with self.lock:
            offers = self.table.offers_of(name)
            if _is_contested(offers):
                raise contested(name, [str(self.table.owners[worker]) for worker in sorted(offers)])
        return offers

    def is_in_group(self, worker: str, group: str) -> bool:
        """Whether a worker belongs to a group; asks the decider before it says no."""
        with self.lock:
            if worker in self.table.owners and group in self.table.owners[worker].groups:
                return True

        def ask(decider: WorkerInfo) -> list[Change] | None:
            return _ask(decider, _tell_owner, worker)

        self._learn(self._from_decider(ask, f"for the members of {group!r}"))
        with self.lock:
            return worker in self.table.owners and group in self.table.owners[worker].groups

    def take_in(self, changes: Iterable[Change]) -> None:
        """What others have announced or told."""
        with self.lock:
            # Nobody knows better what this worker offers, nor of which life.
            self._apply(*(change for change in changes if change.worker != self.info.name))

    def _learn(self, changes: Iterable[Change]) -> None:
        """What others know of third workers. Of those that this worker's agent never met, it would not see the end."""
        if self.life.tells_ends:
            there = {peer["session"] for peer in self.life.agent._statistics()["peers"] if peer["state"] in _THERE}
            changes = [change for change in changes if change.life in there]
        self.take_in(changes)

    def drop(self, worker: str, life: int) -> None:
        """Forget a worker to which a call has failed."""
        self.life.lose(worker)
        with self.lock:
            if concerned := self.table.end(life):
                self.on_change(concerned)

    def _on_gone(self, gone: Gone) -> None:
        self.drop(gone.name, gone.session)

    # -- what this worker offers

    def change(
        self,
        added: tuple[tuple[Offer, tuple[str, ...]], ...] = (),
        removed: tuple[str, ...] = (),
        role: str | None = None,
        groups: Callable[[set[str]], Iterable[str]] = lambda groups: groups,
    ) -> None:
        """Offer other names than before, if the decider agrees, and announce it. NameTaken if it does not."""
        self.sync()
        change: Change | None = None
        try:
            with self._change_lock:
                with self.lock:
                    own = self.own
                    change = own.full()._replace(
                        base=own.version,
                        version=own.version + 1,
                        role=role or own.role,
                        groups=tuple(sorted(groups(set(own.groups)))),
                        added=added,
                        removed=removed,
                    )
                told = self._claim(change)
            self._announcer.announce(change, told)
        except BaseException:
            # Ctrl-C too. A claim that was refused, and nothing else, has left no trace.
            if change is not None and self.own.version != change.base:
                self._announcer.announce_all()
            raise

    def _everything(self) -> Change:
        with self.lock:
            return self.own.full()

    def _claim(self, change: Change) -> str:
        """Have the decider grant a change, and apply it; the name of that worker."""
        asked_with = change
        is_void_somewhere = False

        def ask(decider: WorkerInfo) -> str | None:
            nonlocal asked_with, is_void_somewhere
            verdict = _ask(decider, _judge, asked_with)
            with self.lock:
                if verdict.needs_all:
                    asked_with = self.own.full_with(change)
                    return None
                if verdict.leader is None:
                    return None
                if not self.decider.binds(verdict.leader):
                    is_void_somewhere = True
                    return None
                if verdict.refusal is not None:
                    raise NameTaken(verdict.refusal)
                self._apply(change)
                return decider.name

        try:
            return self._from_decider(ask, "to decide on a name")
        except BaseException as error:
            if is_void_somewhere or not isinstance(error, NameTaken):
                # A decider may have granted it. A number above the claim's makes what this worker tells newer than it.
                with self.lock:
                    self.own.version = change.version + 1
            raise

    def _apply(self, *changes: Change) -> None:
        """The caller holds the lock."""
        concerned: set[str] = set()
        for change in changes:
            concerned |= self.table.apply(change)
        if concerned:
            self.on_change(concerned)

    def _from_decider(self, ask: Callable[[WorkerInfo], _Answer | None], what: str) -> _Answer:
        """What the living worker with the lowest rank answers, whichever that is by then."""
        patience = get_rpc_timeout() or _PATIENCE_S
        deadline = time.monotonic() + patience
        while True:
            decider = self.life.living()[0]
            try:
                answer = ask(decider)
            except RuntimeError as error:
                if not was_lost(error):
                    raise
                _logger.debug("%s was lost while it was asked %s: %s", decider.name, what, error)
                if not self.life.tells_ends:
                    # Nobody else will say so.
                    with self.lock:
                        life = self.table.owners[decider.name].life if decider.name in self.table.owners else 0
                    self.drop(decider.name, life)
                answer = None
            if answer is not None:
                return answer
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"worker {self.info.name!r} has asked worker {decider.name!r} (rank {decider.id}) {what} for "
                    f"{patience:g} s, and the two take different workers for the one that decides: workers have lost "
                    f"each other, in a cut of the network or since one was stopped for long. Start those anew that are "
                    f"to be found again"
                )
            time.sleep(_PAUSE_S)


def _is_contested(offers: dict[str, Offer]) -> bool:
    return len(offers) > 1 and any(offer.is_value or offer.unique for offer in offers.values())


def role_of(worker: str) -> str:
    """The role of a worker that names none: its name without the number at the end."""
    return worker.rstrip("0123456789").rstrip("-_:/.") or worker


# ------------------------------------------------------------------------------------------- this worker's directory

# Told of a new directory, before anything is asked of it.
made: list[Callable[[Directory], None]] = []


def _make(life: Life) -> Directory:
    known = Directory(life)
    for tell in made:
        tell(known)
    return known


directory = PerLife(_make)


# ---------------------------------------------------------------------------------------------- what others call here


def _ask(worker: WorkerInfo, function: Callable[..., _Answer], *arguments: Any) -> _Answer:
    """Call a function of those below, on another worker or here."""
    if worker.name == directory().info.name:
        return function(*arguments)
    answer: _Answer = rpc.rpc_sync(worker, function, args=arguments)
    return answer


def _tell_all() -> list[Change] | None:
    return directory().decider.tell(None)


def _tell_owners(name: str, workers: tuple[str, ...]) -> list[Change] | None:
    """All that is known of those that offer a name, and of other workers."""
    known = directory()
    with known.lock:
        owners = {*known.table.offers_of(name), *workers}
    return known.decider.tell(owners)


def _tell_owner(worker: str) -> list[Change] | None:
    return directory().decider.tell([worker])


def _judge(change: Change) -> Verdict:
    return directory().decider.judge(change)


def _hear(change: Change) -> None:
    known = directory()
    known.take_in([change])


def _gather(leader: int) -> list[Change]:
    return directory().decider.follow(leader)
