"""The decider of an epoch: `Decider`, with the ledgers of all models. The lock of the office guards it."""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from torch_ucx_rpc._workers.members import Epoch
from torch_ucx_rpc.reduction._ledger import Ledger
from torch_ucx_rpc.reduction._messages import NEVER, Kept, Knowledge, Opening, Report, Spec, hosts_of, server_of

# DistributedDataParallel makes its buckets in a collective of the second step. So no trainer may be late in the first
# two steps.
_WHOLE = 2


class Decider:
    """The members of one epoch, and their models.

    It answers no request before all members have sent their knowledge. ``name`` is the worker that sends a request.
    """

    def __init__(
        self,
        epoch: Epoch,
        workers: Callable[[], set[str]] | None,
        elsewhere: Callable[[str], bool] | None = None,
    ) -> None:
        """``workers`` and ``elsewhere`` are as in `Ledger`, but ``elsewhere`` takes the key of a model."""
        self.epoch = epoch
        self._workers, self._elsewhere = workers, elsewhere
        self.ranks = {one.name: one.rank for one in epoch.members}
        self._known: dict[str, Knowledge] = {}
        self._ledgers: dict[str, Ledger] = {}
        # Workers that have got openings of a model, until the model is over.
        self._informed: dict[str, dict[str, None]] = {}
        # The last attempt of each dropped model, so that no generation occurs twice.
        self._attempts: dict[str, int] = {}
        # The last report that has no answer yet, by model and trainer.
        self._waiting: dict[tuple[str, str], Future[Any]] = {}
        self._answers: list[tuple[Future[Any], Any]] = []
        self._told: list[tuple[str, Opening]] = []

    @property
    def is_open(self) -> bool:
        return len(self._known) == len(self.ranks)

    def learn(self, name: str, known: Knowledge) -> None:
        """Take the knowledge of a member."""
        self._known[name] = known
        if not self.is_open:
            return
        by_key: dict[str, dict[str, Report]] = {}
        for one, its in self._known.items():
            for key, report in its.reports.items():
                by_key.setdefault(key, {})[one] = report
        for key, reports in by_key.items():
            # The quorum of the most advanced trainer counts.
            first = max(reports.values(), key=lambda one: one.step)
            self._ledger(key, first).resume(reports, self._kept(key).values())

    def _kept(self, key: str) -> dict[str, Kept]:
        """Return the steps of a model's parameters, by the hosts that keep them."""
        return {name: its.kept[key] for name, its in self._known.items() if key in its.kept}

    def _hosts(self, key: str, spec: Spec, step: int) -> tuple[str, ...]:
        """Return the hosts for a step. In a job of fixed size, a silent host may keep parameters that no file has."""
        silent = set() if self._workers is None else self._workers() - self.ranks.keys()
        may_keep = step > 0 and spec.checkpoint is None and not silent.isdisjoint(spec.hosts)
        return hosts_of(spec, self.ranks, self._kept(key), may_keep)

    def _server(self, name: str) -> Spec | None:
        return next((its.servers[name] for its in self._known.values() if name in its.servers), None)

    def _ledger(self, key: str, first: Report) -> Ledger:
        if key not in self._ledgers:
            server = server_of(key)
            spec = self._server(server)
            assert spec is not None
            self._ledgers[key] = Ledger(
                key,
                self.epoch.number,
                self.ranks,
                spec,
                functools.partial(self._hosts, key, spec),
                first,
                left={name for name, its in self._known.items() if server in its.left},
                workers=self._workers,
                elsewhere=None if self._elsewhere is None else functools.partial(self._elsewhere, key),
                whole=_WHOLE if re.search(r"/ddp\d+$", key) else 0,
                attempt=self._attempts.get(key, 0),
            )
        return self._ledgers[key]

    # -- requests

    def serve(self, name: str, spec: Spec, may_make: bool, future: Future[Any]) -> None:
        """Register a server. The answer is the numbers of the models in training, or a refusal."""
        mine = {key: ledger for key, ledger in self._ledgers.items() if server_of(key) == spec.name}
        known = self._server(spec.name)
        if known is None and not may_make:
            self._answers.append((future, ""))
            return
        has_begun = any(ledger.has_begun for ledger in mine.values())
        if known is not None and (refusal := difference(spec, known, has_begun)) is not None:
            self._answers.append((future, refusal))
            return
        its = self._known[name]
        self._known[name] = its._replace(servers={**its.servers, spec.name: known or spec}, left=its.left - {spec.name})
        for ledger in mine.values():
            ledger.left.discard(name)
        numbers = {int(found[1]) for key in mine if mine[key].trainers and (found := re.search(r"/[a-z]+(\d+)$", key))}
        self._answers.append((future, tuple(sorted(numbers))))

    def leave(self, name: str, server: str, future: Future[Any]) -> None:
        """Take note that a trainer has left a server."""
        its = self._known[name]
        servers = {key: spec for key, spec in its.servers.items() if key != server}
        self._known[name] = its._replace(servers=servers, left=its.left | {server})
        is_over = self._server(server) is None
        for key in [key for key in self._ledgers if server_of(key) == server]:
            ledger = self._ledgers[key]
            ledger.left.add(name)
            ledger.leave(name)
            if is_over:
                # The server may be made again, with other arguments.
                self._tell(key, self._ledgers.pop(key))
                self._attempts[key] = ledger.attempt
        if is_over:
            self._known = {one: its._replace(left=its.left - {server}) for one, its in self._known.items()}
        self._answers.append((future, True))

    def update(self, name: str, key: str, report: Report, future: Future[Any]) -> None:
        """Take a trainer's report. A trainer that waits gets the next opening, or a refusal, as the answer."""
        if (waiting := self._waiting.pop((key, name), None)) is not None:
            self._answers.append((waiting, None))
        if self._server(server_of(key)) is None:
            self._answers.append((future, None))
            return
        ledger = self._ledger(key, report)
        if not ledger.trainers:
            ledger.quorum = report.quorum
        if report.quorum != ledger.quorum and not report.has_left:
            reason = (
                f"trainer {name!r} gives quorum={report.quorum} for {key!r}, and others quorum={ledger.quorum}: all "
                f"trainers must give the same"
            )
            self._answers.append((future, reason))
            return
        # An overtaken report gets no opening: the trainer may have left since.
        is_newest = ledger.update(name, report)
        if is_newest and (report.is_ready or (report.step == NEVER and not report.has_left)):
            self._waiting[key, name] = future
        else:
            self._answers.append((future, None))

    def refuse(self, _: str, key: str, generation: int, name: str, reason: str, future: Future[Any]) -> None:
        """Take note that a host cannot make a step."""
        self._answers.append((future, True))
        if key in self._ledgers:
            self._ledgers[key].refuse(generation, name, reason)

    def missing(self, _: str, key: str, future: Future[Any]) -> None:
        """Answer with the trainers that a step waits for."""
        self._answers.append((future, self._ledgers[key].missing() if key in self._ledgers else ()))

    def look_again(self) -> bool:
        """Take note of changes outside the epoch. Returns False if no step waits for any."""
        waiting = [ledger for ledger in self._ledgers.values() if ledger.look_again()]
        return bool(waiting)

    # -- answers

    def close(self, is_in_force: Callable[[], bool]) -> bool:
        """Commit the complete steps. Returns True if there are complete steps, but the epoch is not in force."""
        for ledger in self._ledgers.values():
            while ledger.is_complete:
                if not is_in_force():
                    return True
                ledger.close()
        return False

    def take_mail(self) -> tuple[list[tuple[Future[Any], Any]], list[tuple[str, Opening]]]:
        """Take the answers, and the openings by worker."""
        for key, ledger in self._ledgers.items():
            self._tell(key, ledger)
        answers, self._answers = self._answers, []
        told, self._told = self._told, []
        return answers, told

    def _tell(self, key: str, ledger: Ledger) -> None:
        # The last opening is enough: it replaces the earlier ones.
        for opening in ledger.openings[-1:]:
            names = dict.fromkeys((*ledger.trainers, *opening.hosts))
            if opening.is_over:
                # A trainer may have got the opening before this one after it left.
                names |= self._informed.pop(key, {})
            else:
                self._informed.setdefault(key, {}).update(names)
            for name in names:
                if (waiting := self._waiting.pop((key, name), None)) is not None:
                    self._answers.append((waiting, opening))
                else:
                    self._told.append((name, opening))
        ledger.openings = []

    def end(self) -> None:
        """Answer all requests: another epoch has begun."""
        for future in (*self._waiting.values(), *(future for future, _ in self._answers)):
            future.set_result(None)


def difference(spec: Spec, known: Spec, has_begun: bool) -> str | None:
    """Return the reason why these arguments do not fit a known server, or None."""
    for what in ("hosts", "optimizer", "checkpoint", "checkpoint_every", "expected"):
        ours, theirs = getattr(spec, what), getattr(known, what)
        if what == "expected":
            what = "trainers"
            if has_begun or (isinstance(ours, tuple) and isinstance(theirs, tuple) and {*ours} == {*theirs}):
                continue
            if isinstance(ours, int) and isinstance(theirs, tuple) and ours == len(theirs):
                continue
        if ours != theirs:
            values = ("another one", "one") if what == "optimizer" else (repr(theirs), repr(ours))
            return (
                f"the server {spec.name!r} was made with {what}={values[0]}, and this trainer calls serve with "
                f"{what}={values[1]}: all trainers must call serve alike"
            )
    return None
