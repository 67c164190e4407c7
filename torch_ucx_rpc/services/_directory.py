"""One worker's part in the table of names: `Directory`. docs/development/membership.md has the invariants."""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import WorkerInfo, _is_current_rpc_agent_set, get_rpc_timeout
from torch.futures import Future

from torch_ucx_rpc._threads import Thread, later
from torch_ucx_rpc._workers import members
from torch_ucx_rpc._workers.life import Life, PerLife
from torch_ucx_rpc._workers.lost import Gone, timed_out, was_lost, was_raised_there
from torch_ucx_rpc._workers.members import Epoch, Member
from torch_ucx_rpc.errors import NotRunning
from torch_ucx_rpc.services._errors import NameTaken
from torch_ucx_rpc.services._table import Offer, Owner, conflicts, owners_of

_logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

# Seconds of silence after which a worker is left out. A question to another worker lasts no longer.
LIMIT_S = 3.0
_PAUSE_S = 0.01
# Seconds after which an update that a member has refused, or not answered, is sent again.
_AGAIN_S = 0.1
# Seconds to wait if calls have no timeout.
_PATIENCE_S = 60.0

# The epoch in which a decider began, and the number of changes that it has granted since.
Position = tuple[int, int]


class Update(NamedTuple):
    """Owners that have changed between two positions; without ``base``, the whole table."""

    base: Position | None
    at: Position
    owners: tuple[Owner, ...]


class Grant(NamedTuple):
    """A decider's permission for a worker's offers."""

    epoch: int
    owner: Owner


class Told(NamedTuple):
    """A member's report to a new decider: its own offers, and its copy of the offers of workers outside the epoch."""

    own: Owner
    is_settled: bool
    at: Position
    absent: tuple[Owner, ...]


class Directory:
    """The offers of one life of this worker, and its copy of the table. Any thread may use it."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.info: WorkerInfo = life.info
        self.lock = threading.RLock()
        # Notified when the table has changed, and with each epoch.
        self.changed = threading.Condition(self.lock)
        # Owners by name of the worker. An owner that has ended may remain, without offers. Never changed in place.
        self.owners: dict[str, Owner] = {}
        self.own = Owner(life.info.name, life.info.id, life.number, 0, {})
        # For callers, routes by name and replicas by life; for the callee, the served things by name.
        self.routes: dict[str, Any] = {}
        self.replicas: dict[int, Any] = {}
        self.served: dict[str, Any] = {}
        self._at: Position = (0, 0)
        self._ended: set[int] = set()
        self._epoch: Epoch | None = None
        self._lives: dict[str, int] = {}
        # Lock and number of this worker's claims.
        self._changing = threading.Lock()
        self._version = 0
        # False while the decider may not know this worker's offers.
        self._is_settled = True
        self._is_settling = False
        # On the decider: whether it has the table of this epoch, and until then the members' reports.
        self._has_table = False
        self._told: dict[Member, Told] = {}
        self._granted_at: dict[str, int] = {}
        self._heard: dict[Member, Position] = {}
        self._sending: set[Member] = set()
        self._group = members.group("services", LIMIT_S)
        self._group.subscribe(lambda _: self._enter())
        life.watch(self._on_gone)

    # ----------------------------------------------------------------------------------------------- this worker's copy

    def sync(self, patience: float | None = None) -> None:
        """Update this copy from the decider, which may take ``patience`` seconds (default: ``rpc_timeout``)."""
        self.hear(self._from_decider(lambda to: self._on(to, _since, self._at), "for the names of the job", patience))

    def look_up(self, name: str) -> list[Owner]:
        """Return the owners of a name by rank; only members of the epoch, if there are any."""
        if not owners_of(self.owners, name):
            self.sync()
        return self.look_here(name)

    def look_here(self, name: str) -> list[Owner]:
        """Do `look_up` in this copy alone."""
        with self.lock:
            owners = owners_of(self.owners, name)
            return [one for one in owners if self._is_member(one)] or owners

    def drop(self, worker: str, life: int) -> None:
        """Forget a worker that cannot be called any more, on a backend that does not report ends."""
        self.life.lose(worker)
        self._end(worker, life)
        self._group.suspect(worker)

    def hear(self, update: Update) -> Position:
        """Apply an update of the decider. Returns the position of this copy after it."""
        base, at = update.base, update.at
        with self.lock:
            # If changes are missing, the decider sends all from the position of this copy on.
            if at > self._at and (base is None or (base[0] == self._at[0] and base <= self._at)):
                self._has_table &= at[0] == self._at[0]
                self._at = at
                if base is None:
                    self.owners = {}
                self._take(*update.owners)
            return self._at

    def _take(self, *owners: Owner) -> None:
        ended = self._ended
        changed = {one.worker: one for one in owners if one.life not in ended or not one.offers}
        self.owners = {**self.owners, **changed}
        self.routes.clear()
        self.changed.notify_all()

    def _is_member(self, one: Owner) -> bool:
        # On backends that do not report ends, each worker has one life.
        return self._lives.get(one.worker) == (one.life if self.life.tells_ends else 0)

    def _on_gone(self, gone: Gone) -> None:
        self._end(gone.name, gone.session)

    def _end(self, worker: str, life: int) -> None:
        with self.lock:
            self._ended.add(life)
            owner = self.owners.get(worker)
            if owner is not None and owner.life == life and owner.offers:
                # The decider also tells workers that have not seen the end.
                (self._grant if self._has_table else self._take)(owner._replace(offers={}))

    # ---------------------------------------------------------------------------------------- what this worker offers

    def change(self, added: dict[str, Offer] | None = None, removed: tuple[str, ...] = ()) -> None:
        """Change the offered names, if the decider agrees. Raises NameTaken if it does not."""
        added = added or {}
        asked = 0

        def ask(to: WorkerInfo) -> WorkerInfo | bool | None:
            nonlocal asked
            asked += 1
            # The decider drops a late question, which has an earlier version.
            self._version += 1
            own = self.own.without(removed)
            claim = own._replace(version=self._version, offers={**own.offers, **added})
            answer = self._on(to, _judge, claim, tuple(added))
            if isinstance(answer, str):
                raise NameTaken(answer)
            if not isinstance(answer, Grant):
                return answer
            with self.lock:
                if not self._group.is_current(answer.epoch):
                    return None
                self.own, self._is_settled = answer.owner, True
            for name in claim.offers.keys() - answer.owner.offers.keys():
                self.served.pop(name, None)
                _logger.warning("another worker has got the name %r while %s was left out", name, self.info.name)
            return True

        with self._changing:
            try:
                self._from_decider(ask, "to decide on a name")
            except BaseException as error:
                if asked > 1 or not isinstance(error, NameTaken):
                    # An unanswered question may still be granted.
                    self._settle()
                raise

    def _settle(self) -> None:
        """Have another thread report this worker's offers to the decider again."""
        with self.lock:
            self._is_settled = False
            if not self._is_settling:
                self._is_settling = True
                Thread(self._keep_telling, name="torch_ucx_rpc-services").start()

    def _keep_telling(self) -> None:
        while True:
            with self.lock:
                if self._is_settled or not self.life.lasts():
                    self._is_settling = False
                    return
            try:
                self.change()
            except RuntimeError as error:
                _logger.debug("the decider does not know yet what %s offers: %s", self.info.name, error)
                time.sleep(_PAUSE_S)

    # ------------------------------------------------------------------------------------------------- as the decider

    def judge(self, claim: Owner, new: tuple[str, ...]) -> Grant | str | WorkerInfo | None:
        """Grant a member's claims, or return the reason against a new name, or the worker that decides."""
        with self.lock:
            if not self._decides() or self._epoch is None or not self._is_member(claim):
                return self._decider()
            known = self.owners.get(claim.worker)
            if known is not None and known.life == claim.life and known.version >= claim.version:
                return None
            taken = conflicts(self.owners, claim)
            for name in new:
                if name in taken:
                    return taken[name]
            owner = claim.without(taken)
            self._grant(owner)
            return Grant(self._epoch.number, owner)

    def since(self, at: Position) -> Update | WorkerInfo | None:
        """Return the changes since a position, or the worker that decides."""
        with self.lock:
            return self._update_since(at) if self._decides() else self._decider()

    def tell(self, names: tuple[str, ...]) -> Told:
        """Report to a new decider, whose epoch has these members."""
        with self.lock:
            absent = tuple(one for one in self.owners.values() if one.worker not in names)
            return Told(self.own, self._is_settled, self._at, absent)

    def _decides(self) -> bool:
        self._enter()
        return self._has_table and self._epoch is not None and self._group.is_current(self._epoch.number)

    def _decider(self) -> WorkerInfo | None:
        epoch = self._group.epoch
        return None if epoch is None else _info(epoch.decider)

    def _grant(self, owner: Owner) -> None:
        self._at = (self._at[0], self._at[1] + 1)
        self._granted_at[owner.worker] = self._at[1]
        self._take(owner)
        self._send_all()

    def _update_since(self, at: Position) -> Update:
        base = at if at[0] == self._at[0] else None
        after = -1 if base is None else base[1]
        return Update(
            base, self._at, tuple(one for name, one in self.owners.items() if self._granted_at.get(name, 0) > after)
        )

    def _send_all(self) -> None:
        # At position 0 no change has been granted yet.
        if self._has_table and self._at[1]:
            for one in self._members():
                self._send(one)

    def _send(self, one: Member) -> None:
        """Send a member the changes that it lacks. Later changes wait for its answer, and then go in one message."""
        heard = self._heard.get(one, (0, 0))
        if one.name == self.info.name or one in self._sending or heard >= self._at:
            return
        try:
            call = rpc.rpc_async(_info(one), _hear, args=(self._update_since(heard),), timeout=LIMIT_S)
        except RuntimeError as error:
            self._on_unsent(one, error)
            return
        self._sending.add(one)
        call.add_done_callback(functools.partial(self._on_heard, one))

    def _on_unsent(self, one: Member, error: RuntimeError) -> None:
        _logger.debug("an update did not reach %s: %s", one.name, error)
        if was_lost(error) or not self.life.lasts():
            return

        later(_AGAIN_S, functools.partial(self._send_again, one), name="torch_ucx_rpc-update")

    def _send_again(self, one: Member) -> None:
        with self.lock:
            if self._has_table and one in self._members():
                self._send(one)

    def _on_heard(self, one: Member, done: Future[Position]) -> None:
        with self.lock:
            self._sending.discard(one)
            try:
                self._heard[one] = done.value()
            except RuntimeError as error:
                self._on_unsent(one, error)
                return
            self._send_again(one)

    # -------------------------------------------------------------------------------------------- from epoch to epoch

    def _members(self) -> tuple[Member, ...]:
        return () if self._epoch is None else self._epoch.members

    def _enter(self) -> None:
        """Take note of the latest epoch."""
        with self.lock:
            epoch, before, me = self._group.epoch, self._epoch, self._group.me
            if epoch is None or (before is not None and epoch.number <= before.number):
                return
            if before is not None and me not in before.members:
                # A newcomer claims its names again, also if the group was founded again.
                self._is_settled = not self.own.offers
            self._epoch, self._lives = epoch, {one.name: one.life for one in epoch.members}
            self._take()
            if epoch.decider != me:
                self._has_table = False
            elif not self._has_table or before is None or epoch.number != before.number + 1:
                self._take_over(epoch)
            for owner in list(self.owners.values()):
                life = owner.life if self.life.tells_ends else 0
                if owner.worker not in self._lives and self._group.has_ended(owner.worker, life):
                    self.life.lose(owner.worker)
                    self._end(owner.worker, owner.life)
            self._send_all()
            if self._group.is_left_out:
                self._group.rejoin()
            elif not self._is_settled and me in epoch.members:
                self._settle()

    def _take_over(self, epoch: Epoch) -> None:
        self._has_table, self._told = False, {}
        # Before the first epoch of a group no change has been granted.
        others = [one for one in epoch.members if one.name != self.info.name] if epoch.number > 1 else []
        for one in others:
            try:
                call = rpc.rpc_async(_info(one), _tell, args=(tuple(self._lives),), timeout=LIMIT_S)
            except RuntimeError as error:
                _logger.debug("%s is gone: %s", one.name, error)
                self._group.suspect(one.name)
            else:
                call.add_done_callback(functools.partial(self._on_told, epoch, one, len(others)))
        if not others:
            self._complete(epoch)

    def _on_told(self, epoch: Epoch, one: Member, others: int, done: Future[Told]) -> None:
        with self.lock:
            if self._epoch is not epoch:
                return
            try:
                self._told[one] = done.value()
            except RuntimeError as error:
                # The decider needs this member's report. Leave the member out, which begins another epoch.
                _logger.debug("%s does not say what it offers: %s", one.name, error)
                self._group.suspect(one.name)
                return
            if len(self._told) == others:
                self._complete(epoch)

    def _complete(self, epoch: Epoch) -> None:
        """Build the table from the members' reports."""
        told = [self.tell(tuple(self._lives)), *self._told.values()]
        # Settled members have no names in conflict. The others will learn which of their names are taken.
        owners = [one.own for one in sorted(told, key=lambda one: (not one.is_settled, one.own.rank))]
        owners += max(told, key=lambda one: one.at).absent
        table: dict[str, Owner] = {}
        for owner in owners:
            table[owner.worker] = owner.without(conflicts(table, owner))
        self.owners, self._granted_at, self._heard = {}, {}, {}
        self._at = (epoch.number, min(1, len(self._told)))
        self._has_table = True
        self._take(*table.values())
        self._send_all()

    # ---------------------------------------------------------------------------------------------- asking the decider

    def _on(self, worker: WorkerInfo, function: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """Call one of the functions below, on another worker or here."""
        if worker.name == self.info.name:
            return function(*arguments)
        answer: _Answer = rpc.rpc_sync(worker, function, args=arguments, timeout=LIMIT_S)
        return answer

    def _from_decider(
        self, ask: Callable[[WorkerInfo], _Answer | WorkerInfo | None], what: str, patience: float | None = None
    ) -> _Answer:
        """Return the decider's answer, even if the decider changes during the question."""
        if patience is None:
            patience = get_rpc_timeout() or _PATIENCE_S
        deadline = time.monotonic() + patience
        known, turn, failed = None, 0, None
        while True:
            self._enter()
            living = self.life.living()
            # A newcomer does not know a decider yet, but others may.
            to = known or self._decider() or living[turn % len(living)]
            known, turn = None, turn + 1
            try:
                answer = ask(to)
            except RuntimeError as error:
                is_wait = was_lost(error) or timed_out(error) or was_raised_there(error, NotRunning)
                if not is_wait or not _is_current_rpc_agent_set():
                    raise
                failed = error
            else:
                if isinstance(answer, WorkerInfo):
                    known = answer
                elif answer is not None:
                    return answer
            if time.monotonic() > deadline:
                is_current = self._group.is_current()
                why = f"{to.name!r} was asked last" if is_current else self._group.why_not_current()
                raise RuntimeError(
                    f"worker {self.info.name!r} has asked {what} for {patience:g} s, and no worker decides: {why}"
                ) from failed
            time.sleep(_PAUSE_S)


directory = PerLife(Directory)


def _info(one: Member) -> WorkerInfo:
    return WorkerInfo(one.name, one.rank)


# ---------------------------------------------------------------------------------------------- what others call here


def _judge(claim: Owner, new: tuple[str, ...]) -> Grant | str | WorkerInfo | None:
    return directory().judge(claim, new)


def _since(at: Position) -> Update | WorkerInfo | None:
    return directory().since(at)


def _hear(update: Update) -> Position:
    return directory().hear(update)


def _tell(names: tuple[str, ...]) -> Told:
    return directory().tell(names)
