"""One piece of a server's shard: its rounds, and what late trainers have missed (`Piece`).

**A round** is complete when all trainers that are there have pushed, or as many as the quorum says. One thread works at
its sum at a time and no other waits for it: the next tensors lie there until it is done. Rounds know nothing of those
of other pieces, nor of steps.

**Late.** A trainer that was not there when a round was completed (`quorum`) has missed its result. All that it misses
is added up, and is the answer to its next push, whose gradients are dropped; then it is one of the others again. With
plain SGD that makes its parameters the same as theirs, but for rounding.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed.rpc as rpc
from torch import Tensor
from torch._C._distributed_rpc import WorkerInfo
from torch.futures import Future

from torch_ucx_rpc._workers.life import Life
from torch_ucx_rpc.reduction._messages import ASKING_S, Answer, Push, Trainer
from torch_ucx_rpc.reduction._results import result_of
from torch_ucx_rpc.reduction._roster import Roster
from torch_ucx_rpc.reduction._round import Coming, Round, why_not

_logger = logging.getLogger(__name__)

# So many trainers' tensors are added at a time, in one pass through memory. Until then they lie there.
_BATCH = 4

# Until tensors are added, for one that needs them.
_ADDING_S = 0.001

# In the place of a trainer's life: those that are expected and have not been seen.
_NOT_SEEN = -1


class _Sum(NamedTuple):
    """Of results from the round ``start`` on. ``is_owned``: it is memory of its own, which may be added to."""

    start: int
    tensors: list[Tensor]
    is_owned: bool


class _Missed:
    """By life of a trainer, the sum of the results that it has missed. Guarded by the lock of the roster."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sum] = {}

    def add(self, life: int, number: int, result: list[Tensor]) -> None:
        missed = self._sums.get(life)
        if missed is None or [tensor.shape for tensor in missed.tensors] != [tensor.shape for tensor in result]:
            self._sums[life] = _Sum(number, result, False)
        elif missed.is_owned:
            for total, tensor in zip(missed.tensors, result, strict=True):
                total.add_(tensor)
        else:
            total_of_both = [a + b for a, b in zip(missed.tensors, result, strict=True)]
            self._sums[life] = _Sum(missed.start, total_of_both, True)

    def take(self, life: int, at: int, is_first: bool) -> list[Tensor] | None:
        """The sum of a trainer from the round ``at`` on, who is told of it now; None if nobody knows it.

        One that pushes for the first time gets the sum of the unseen.
        """
        missed = self._sums.pop(life, None)
        if missed is not None:
            # A host that has taken over may know of fewer rounds, or of more, which another one has answered.
            return missed.tensors if missed.start == at else None
        of_unseen = self._sums.get(_NOT_SEEN)
        if is_first and of_unseen is not None and of_unseen.start == at:
            # The next one that comes for the first time gets it too.
            return [tensor.clone() for tensor in of_unseen.tensors]
        return None

    def share(self, donor: int, life: int) -> None:
        """Of a trainer that goes on from another one's state: it has missed what that one has, and nothing else."""
        missed = self._sums.get(donor)
        if missed is None:
            self._sums.pop(life, None)
        else:
            self._sums[donor] = self._sums[life] = missed._replace(is_owned=False)

    def has(self, life: int) -> bool:
        return life in self._sums

    def forget(self, life: int) -> None:
        self._sums.pop(life, None)


class Piece:
    """A bucket of gradients, or a part of one, of which all trainers get the mean.

    The lock of the roster guards it; it is not held while tensors are added or answers are given.
    """

    def __init__(self, name: str, roster: Roster, life: Life) -> None:
        self.name = name
        # Of which it is a part, where it is one's.
        self.model = name.partition("/")[0]
        self._roster = roster
        self._life = life
        self._rounds: dict[int, Round] = {}
        # The last round that was completed.
        self._done = -1
        self._missed = _Missed()
        # Lives of trainers that have pushed it.
        self._seen: set[int] = set()

    # -- the trainers

    def admit(self, trainer: Trainer, donor: Trainer | None) -> None:
        """A trainer has a copy of the model, as the donor has it where it gets that now. The caller holds the lock."""
        self._seen.add(trainer.life)
        if donor is not None:
            self._missed.share(donor.life, trainer.life)

    def forget(self, life: int) -> None:
        """A trainer has ended. The caller holds the lock."""
        self._missed.forget(life)

    def forget_host(self, name: str) -> None:
        """Another host of the server has ended. The caller holds the lock."""

    def close(self) -> list[Future[Answer]]:
        """This host leaves: the pushes that are to be refused. The caller holds the lock."""
        rounds, self._rounds = list(self._rounds.values()), {}
        refused = []
        for round_ in rounds:
            # One that is being completed is answered.
            if not round_.is_closed:
                round_.is_closed = True
                refused += [coming.future for coming in round_.came.values()]
        return refused

    def absent(self) -> list[str]:
        """The trainers that are missing in the oldest open round. The caller holds the lock."""
        return self._roster.absent(self.model, set(self._rounds[min(self._rounds)].came)) if self._rounds else []

    # -- a push

    def push(self, push: Push, is_owned: bool, takes_over: bool = False) -> Future[Answer]:
        """Take a trainer's tensors. A refusal is an answer.

        ``is_owned``: they are this piece's own memory. ``takes_over``: it is here for a host that has been lost.
        """
        future: Future[Answer] = Future()
        answer = round_ = None
        is_asking = False
        with self._roster.lock:
            # A trainer without a round comes after the first step, whose pushes may not have reached this host yet.
            self._roster.count(push.trainer, is_newcomer=push.at is None)
            is_first = push.trainer.life not in self._seen
            self._seen.add(push.trainer.life)
            at = self._done + 1 if push.at is None else push.at
            if at <= self._done and push.at == 0 and is_first and self._may_skip_rounds():
                # Nobody has waited for it: it joins now.
                at = self._done + 1
            coming = Coming(push.trainer, push.tensors, is_owned, future)
            passed, over = self._pass(push.trainer.life, at)
            if at <= self._done:
                answer = self._answer_to_late(push.trainer, at, is_first)
            else:
                round_ = self._rounds.get(at)
                if round_ is None:
                    round_ = self._rounds[at] = Round(at)
                if refusal := why_not(push, round_):
                    answer = Answer(refusal)
                elif round_.is_closed:
                    round_.late.append(coming)
                else:
                    former = round_.came.get(push.trainer.life)
                    if former is not None and former.is_added:
                        # A push that has run out of time, and comes again: its tensors are in the sum.
                        coming.is_added, coming.tensors = True, []
                    round_.came[push.trainer.life] = coming
                    round_.quorum = push.quorum
                    is_first_here = self._done < at - 1 or self._done < 0
                    if (push.is_repeated or (takes_over and is_first_here)) and not round_.has_asked:
                        is_asking = round_.has_asked = self._may_ask()
                        round_.asked += int(is_asking)
        if answer is not None:
            future.set_result(answer)
        elif round_ is not None:
            if is_asking:
                others = [info for info in self._life.living() if info.name != push.trainer.name]
                self._ask_for_result(others, round_)
            self._advance(round_)
        for other in passed:
            self._ask_for_result([push.trainer.name], other)
            self._advance(other)
        for waiting, late in over:
            waiting.set_result(late)
        return future

    def _pass(self, life: int, at: int) -> tuple[list[Round], list[tuple[Future[Answer], Answer]]]:
        """A trainer is in a round, and so in none before it that is open here: another host has answered it those.

        Returns those whose result it may know, since a trainer keeps its last one; and the answers to those who wait in
        others, which nobody can complete. The caller holds the lock.
        """
        passed, over = [], []
        for number, round_ in sorted(self._rounds.items()):
            if number >= at or round_.is_closed or life in round_.came:
                continue
            round_.passed_by.add(life)
            if number == at - 1 and self._may_ask():
                round_.asked += 1
                passed.append(round_)
            else:
                round_.is_closed = True
                self._done = max(self._done, number)
                del self._rounds[number]
                over += [
                    (coming.future, self._answer_to_late(coming.trainer, number)) for coming in round_.came.values()
                ]
        return passed, over

    def keep_copy(self, trainer: Trainer) -> None:
        """Copy what a trainer has pushed and is not added yet; the tensors are not read when this returns."""
        while True:
            with self._roster.lock:
                rounds = [round_ for round_ in self._rounds.values() if trainer.life in round_.came]
                for round_ in rounds:
                    round_.came[trainer.life].keep_copy()
            if not any(round_.is_adding for round_ in rounds):
                return
            time.sleep(_ADDING_S)

    def _may_skip_rounds(self) -> bool:
        """Whether a trainer that comes for the first time may do without the results until now."""
        return not self._missed.has(_NOT_SEEN)

    def _answer_to_late(self, trainer: Trainer, at: int, is_first: bool = False) -> Answer:
        missed = self._missed.take(trainer.life, at, is_first)
        if missed is None:
            return Answer(
                f"{trainer} pushed a round that is over, and what it has missed is not known, or was lost with a host: "
                f"it has to begin anew, with reduction.serve and a new DataParallel. One that is given its optimizer "
                f"takes the state of another trainer instead",
                is_behind=True,
            )
        return Answer(None, self._done + 1, self._done + 1 - at, missed)

    # -- a round, from the first tensors to the answers

    def advance_all(self) -> None:
        """Complete what can be completed, after trainers have come or gone."""
        with self._roster.lock:
            rounds = list(self._rounds.values())
        for round_ in rounds:
            self._advance(round_)

    def _advance(self, round_: Round) -> None:
        """Add what can be added, and complete the round if it can be. One thread at a time does; others return."""
        while True:
            with self._roster.lock:
                if round_.is_busy or round_.is_closed:
                    return
                is_complete = round_.result is not None or self._is_complete(round_)
                batch = [] if round_.result is not None else self._addable(round_, is_complete)
                if not batch and not is_complete:
                    return
                round_.is_busy = True
                round_.is_adding = True
                round_.is_closed = is_complete
                for coming in batch:
                    coming.is_added = True
            try:
                if round_.result is None:
                    round_.add(batch, len(round_.came) if is_complete else None)
                round_.is_adding = False
                if is_complete:
                    self._roster.has_begun = True
                    result = round_.sum if round_.result is None else round_.result
                    assert result is not None
                    self._finish(round_, result)
                    return
            except Exception as error:
                self._give_up(round_, error)
                return
            with self._roster.lock:
                round_.is_busy = False

    def _give_up(self, round_: Round, error: Exception) -> None:
        """Tell all who have pushed that this host could not make a result. They may push again, to another round."""
        _logger.exception("%s could not complete round %d of %s", self._life.info.name, round_.number, self.name)
        with self._roster.lock:
            round_.is_closed = True
            self._rounds.pop(round_.number, None)
            futures = [coming.future for coming in (*round_.came.values(), *round_.late)]
        refusal = f"{self._life.info.name!r} could not complete the step: {type(error).__name__}: {error}"
        for future in futures:
            future.set_result(Answer(refusal))

    def _is_complete(self, round_: Round) -> bool:
        if not round_.came or round_.asked:
            return False
        if round_.quorum is not None and len(round_.came) >= round_.quorum:
            return True
        expected = self._roster.awaited(self.model).keys() - round_.passed_by
        return self._roster.are_all_there() and expected <= round_.came.keys()

    def _addable(self, round_: Round, is_complete: bool) -> list[Coming]:
        """In the order of ranks: all, or those before whom nobody is missing."""
        came = sorted(
            (coming for coming in round_.came.values() if not coming.is_added), key=lambda coming: coming.trainer
        )
        if is_complete:
            return came
        if not self._roster.are_all_there():
            return []
        awaited = self._roster.awaited(self.model)
        missing = [trainer for life, trainer in awaited.items() if life not in round_.came]
        first_missing = min(missing, default=None)
        batch = [coming for coming in came if first_missing is None or coming.trainer < first_missing]
        return batch if len(batch) >= _BATCH else []

    def _finish(self, round_: Round, mean: list[Tensor]) -> None:
        """Make the result of a round, and publish it."""
        self._publish(round_, mean)

    def _publish(self, round_: Round, result: list[Tensor]) -> None:
        """Answer all who have pushed."""
        with self._roster.lock:
            self._done = max(self._done, round_.number)
            self._rounds.pop(round_.number, None)
            self._note_missed(round_, result)
            futures = [coming.future for coming in round_.came.values()]
            late = [(coming, self._answer_to_late(coming.trainer, round_.number)) for coming in round_.late]
        answer = Answer(None, round_.number + 1, 1, result)
        for future in futures:
            future.set_result(answer)
        for coming, answer_to_late in late:
            coming.future.set_result(answer_to_late)

    def _note_missed(self, round_: Round, result: list[Tensor]) -> None:
        trainers = self._roster.awaited(self.model)
        for life in self._seen.intersection({*trainers, *self._roster.paused}).difference(round_.came):
            self._missed.add(life, round_.number, result)
        # Some that are there or expected have never pushed it: all of them have missed the same.
        is_seen_by_all = self._seen.issuperset(trainers)
        if not is_seen_by_all or len(self._seen | self._roster.ended) < self._roster.spec.expected:
            self._missed.add(_NOT_SEEN, round_.number, result)
        else:
            self._missed.forget(_NOT_SEEN)

    # -- after the end of another host

    def _may_ask(self) -> bool:
        """Whether others may have had results that this host does not know."""
        return True

    def _ask_for_result(self, workers: Sequence[str | WorkerInfo], round_: Round) -> None:
        """A trainer pushes what a lost host was pushed: if others have had its answer, then that is the result.

        The round, which has one of ``asked`` for this call, is not complete before all have said whether they have.
        """

        def take(future: Future[list[Tensor] | None]) -> None:
            result = None
            try:
                result = future.value()
            except RuntimeError as error:
                _logger.debug("%s was not told of a result: %s", self._life.info.name, error)
            with self._roster.lock:
                round_.asked -= 1
                if result is not None and not round_.is_closed:
                    round_.result = result
            self._advance(round_)

        calls = []
        with self._roster.lock:
            lost = set(self._roster.lost_hosts)
        living = tuple(info.name for info in self._life.living() if info.name not in lost)
        arguments = (self._roster.spec.name, self.name, round_.number, self._life.info.name, living)
        for worker in workers:
            try:
                calls.append(rpc.rpc_async(worker, result_of, args=arguments, timeout=ASKING_S))
            except RuntimeError as error:
                _logger.debug("%s was not asked for a result: %s", worker, error)
        with self._roster.lock:
            round_.asked += len(calls) - 1
        for call in calls:
            call.add_done_callback(take)
