"""The steps of one model on one trainer: `Steps`."""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch._C._distributed_rpc import get_rpc_timeout
from torch.futures import Future

from torch_ucx_rpc._workers.lost import was_lost
from torch_ucx_rpc.channel import Channel
from torch_ucx_rpc.errors import CallTimedOut, EpochEnded
from torch_ucx_rpc.reduction._host import Values
from torch_ucx_rpc.reduction._ledger import Next, Standing
from torch_ucx_rpc.reduction._messages import NEVER, Opening, Report, channel_of
from torch_ucx_rpc.reduction._office import Office, TimedOut, give, office, values
from torch_ucx_rpc.reduction._plan import cut, plan, spread

_logger = logging.getLogger(__name__)

# Seconds for questions after a failure, or on leaving: the decider may hang.
ASKING_S = 5.0


@dataclasses.dataclass(frozen=True)
class Contributors:
    """The trainers whose gradients are in the mean of a step.

    Attributes:
        names (tuple[str, ...]): names of the workers, in the order of ranks.
        index (int or None): the place of this trainer among them; None if it came late.
        divisor (int): their number, by which the sum was divided; the same for all buckets.
    """

    names: tuple[str, ...]
    index: int | None
    divisor: int


class Copy(Protocol):
    """The state of a model, which other trainers may take."""

    def state(self) -> Any:
        """Return the present state, for `load`."""

    def load(self, state: Any) -> None:
        """Load the state of another trainer."""


class _Part(NamedTuple):
    """A part of a bucket that goes to one host, and the memory for its means."""

    shard: int
    tensors: list[Tensor]
    results: list[Tensor]


class Steps:
    """One model of this trainer: its gradients go to the hosts, and their means come back when a step is closed.

    One thread at a time uses it, except for `give`, `report` and `leave`.
    """

    def __init__(
        self,
        server: str,
        name: str,
        *,
        expected: int | tuple[str, ...],
        quorum: int | None = None,
        copy: Copy | None = None,
        keeps: bool = False,
        is_cut: bool = True,
        sizes: Sequence[tuple[int, int]] = (),
    ) -> None:
        """``copy`` gives a late trainer the state of another trainer. With ``keeps`` the hosts have the parameters.

        With ``is_cut`` each bucket is one flat tensor, of which each host gets a part. Otherwise each tensor of a
        bucket goes whole to one host. ``sizes`` describes the buckets of each step, if known: numbers of elements, and
        bytes of one element.
        """
        self.key = f"{server}/{name}"
        self.name = name
        self.standing = Standing()
        # Contributors of the last step, and its time.
        self.contributors_at: tuple[float, Contributors] | None = None
        # The reason why the decider does not take this trainer.
        self.refusal: str | None = None
        self._office: Office = office()
        self._expected, self.quorum = expected, quorum
        self._copy, self._keeps, self._is_cut, self._sizes = copy, keeps, is_cut, list(sizes)
        self._is_finishing = self._are_equal = self._has_ended = False
        self._buckets: list[list[Tensor]] = []
        # Memory for the means of each bucket, which the next step uses again.
        self._results: list[list[Tensor]] = []
        # The generation in which buckets are put, and the number of parts so far for each shard.
        self._generation = NEVER
        self._counts: list[int] = []
        # In this step: number of buckets put, their bytes for each shard, and the posted means.
        self._sent = 0
        self._loads: list[int] = []
        self._posted: list[Any] = []
        self._prepared_by = Contributors((), None, 0)
        # An opening that has failed: another one will come.
        self._tried: Opening | None = None
        # Until the step is closed, parameters are as they were at its beginning, so other trainers may get them.
        self._is_begun = False
        self._requests: list[Future[Any]] = []
        # State of the very first trainer, until its first step is closed: a forward changes buffers.
        self._first_state: Any = None

    # -- taking part

    def report(self, *, has_left: bool = False) -> Report:
        """Report this trainer's step. The caller holds the lock of the office."""
        at = self.standing
        return Report(
            next(self._office.numbers),
            at.step,
            at.committed,
            at.prepared,
            at.void,
            self._is_finishing,
            at.former,
            at.is_late,
            has_left,
            self.quorum,
            self._expected,
        )

    def _say(self) -> None:
        with self._office.changed:
            report = self.report()
        self._office.update(self.key, report)

    @property
    def is_busy(self) -> bool:
        """Whether a step has been put, but is not closed."""
        return bool(self._buckets)

    @property
    def is_late(self) -> bool:
        """Whether the last step's means leave out this trainer's gradients."""
        return self.contributors_at is not None and self.contributors_at[1].index is None

    def begin(self, are_equal: bool = False) -> None:
        """Join, either with the first trainers or with the state of another trainer.

        ``are_equal`` means that the first trainers have equal parameters. A later trainer then needs a copy, to take
        the state of another trainer.
        """
        self._are_equal = are_equal
        try:
            try:
                self._go_on(rpc_deadline(), until_closed=False)
            except TimedOut:
                raise RuntimeError(
                    f"trainer {self._office.name!r} cannot begin {self.key!r} within rpc_timeout: {self._missing()}. "
                    f"serve(..., trainers=N) says how many there are at the start"
                ) from None
        except BaseException:
            self.leave()
            raise
        finally:
            self._are_equal = False

    def leave(self, is_told: bool = True) -> None:
        """Leave. If the report does not reach the others, they notice the end of this trainer."""
        with self._office.changed:
            is_in = self._office.steps.get(self.key) is self
            self.standing = Standing()
            requests, self._requests = self._requests, []
            report = self.report(has_left=True)
        for future in requests:
            future.set_result(None)
        if is_in:
            self._office.forget(self.key)
            if is_told:
                self._office.update(self.key, report)

    def end(self) -> None:
        """Leave for good: the trainer leaves the server."""
        with self._office.changed:
            self._has_ended = True
        self.leave(is_told=False)

    # -- a step

    def begin_step(self) -> None:
        """Record that the parameters are those at the beginning of a step."""
        with self._office.changed:
            self._is_begun = True
            self._give_to_all()

    def put(self, tensors: list[Tensor]) -> None:
        """Send a bucket. The tensors must stay as they are until `finish` has returned."""
        self._buckets.append(tensors)
        if self.quorum is not None:
            return
        with self._office.changed:
            opening = self._office.opening(self.key)
        if opening is None or opening is self._tried:
            return
        if self.standing.judge(opening, self._office.name) is Next.PUT:
            try:
                self._send(opening)
            except (RuntimeError, ValueError) as error:
                self._fail(opening)
                if not isinstance(error, EpochEnded) and not was_lost(error):
                    self.drop()
                    raise
                # `finish` finds out how to continue.
                _logger.debug("%s: a bucket of %s was not put: %s", self._office.name, self.key, error)

    def finish(self) -> list[list[Tensor]]:
        """Wait until the step is closed, and return the means of each bucket. The next step begins.

        Raises ValueError if the gradients do not fit the others'. Raises RuntimeError if the step was not closed within
        ``rpc_timeout``, or if this trainer is cut off. The trainer may then put the step again.
        """
        self._is_finishing = True
        try:
            self._go_on(rpc_deadline(), until_closed=True)
            results = self._results
            if not self._is_cut:
                # The caller owns these results now.
                self._results = []
            return results
        except BaseException as error:
            is_late = isinstance(error, (TimedOut, CallTimedOut))
            why = f"step {max(0, self.standing.step)} of {self.key!r} was not completed within rpc_timeout: " + (
                self._missing() if is_late else ""
            )
            self._is_finishing = False
            self._give_up()
            if is_late:
                raise RuntimeError(why) from error
            raise
        finally:
            self._is_finishing = False
            self._forget_step()

    def drop(self) -> None:
        """Give up a step that was put only in part. The next `put` begins it again."""
        if self._buckets:
            self._give_up()
            self._forget_step()

    def _forget_step(self) -> None:
        self._buckets, self._sent, self._posted, self._loads = [], 0, [], []

    def _give_up(self) -> None:
        if self.standing.step == NEVER:
            self.leave()
            return
        with self._office.changed:
            opening = self._office.opening(self.key)
            self.standing.void = self._generation if opening is None else opening.generation
        self._drop_results()
        self._say()

    def _go_on(self, deadline: float | None, *, until_closed: bool) -> None:
        """Follow openings until this trainer has the state of the model, or its step is closed."""
        with self._office.changed:
            if self._has_ended:
                raise RuntimeError(f"this trainer has left the server of {self.key!r}")
            is_new = self._office.steps.get(self.key) is not self
            if is_new:
                self._office.steps[self.key] = self
        if is_new or self.quorum is not None:
            self._say()
        while until_closed or self.standing.step == NEVER:
            opening, what = self._next(deadline)
            if what is Next.CLOSE:
                self._close()
                if until_closed:
                    return
            elif what is Next.TAKE:
                self._take_state(opening, deadline)
            elif what is Next.FALL_BEHIND:
                if self._fall_behind(opening):
                    return
            elif what is Next.REFUSED and opening.refusal is not None:
                name, reason = opening.refusal
                raise ValueError(reason) if name else RuntimeError(reason)
            elif what is Next.PUT:
                self._put_all(opening, deadline)

    def _next(self, deadline: float | None) -> tuple[Opening, Next]:
        """Wait for an opening that asks this trainer to act. Return it with the action."""
        with self._office.changed:
            while True:
                self._office.keep_in()
                if self.refusal is not None:
                    reason, self.refusal = self.refusal, None
                    raise ValueError(reason)
                opening = self._office.opening(self.key)
                what = Next.WAIT
                if opening is not None and opening is not self._tried:
                    what = self.standing.judge(opening, self._office.name)
                if opening is not None and what is Next.NO_HOST:
                    if self._office.are_lost(opening.spec):
                        raise RuntimeError(_lost(opening))
                    self._office.call_back(opening.spec)
                elif opening is not None and what is not Next.WAIT:
                    return opening, what
                try:
                    self._office.sleep(deadline)
                except TimedOut:
                    if opening is not None and what is Next.NO_HOST:
                        raise RuntimeError(_silent(opening)) from None
                    raise

    def _put_all(self, opening: Opening, deadline: float | None) -> None:
        """Put the remaining buckets, and wait for the means."""
        try:
            self._send(opening)
            for posted in self._posted:
                posted.wait(_left(deadline))
        except EpochEnded:
            self._fail(opening)
            return
        except RuntimeError as error:
            self._fail(opening)
            if not was_lost(error):
                raise
            if (name := getattr(error, "name", None)) is not None:
                self._office.group.suspect(name)
            return
        with self._office.changed:
            self.standing.prepared = opening.generation
            names, me = opening.contributors, self._office.name
            self._prepared_by = Contributors(names, names.index(me) if me in names else None, len(names))
        if len({*opening.hosts}) < len(opening.spec.hosts):
            self._office.call_back(opening.spec)
        self._say()

    def _fail(self, opening: Opening) -> None:
        self._tried = opening
        self._drop_results()

    def _drop_results(self) -> None:
        # Late means may still be written into the old memory. A prepared step has all its means, and can still close.
        if self.standing.prepared == NEVER:
            self._results = []

    def _close(self) -> None:
        with self._office.changed:
            self.contributors_at = (time.monotonic(), self._prepared_by)
            self.standing.close()
            self._is_begun = False
            self._first_state = None

    # -- the state of the model

    def _fall_behind(self, opening: Opening) -> bool:
        """Give up the state for the others' later state. Returns True if that state has the gradients of this step."""
        step, prepared = self.standing.step, self.standing.prepared
        if self._copy is None and not self._keeps:
            self.leave()
            raise RuntimeError(self._behind(step))
        _logger.info("%s is behind in step %d of %s", self._office.name, step, self.key)
        # With parameters on the hosts, a quorum means asynchronous training: gradients of older steps count, once.
        is_asynchronous = self._keeps and self.quorum is not None
        have_counted = False
        if is_asynchronous and prepared != NEVER:
            counted = self.values_of({0}, opening.step)[0].counted
            have_counted = counted.get(self._office.name) == prepared
        with self._office.changed:
            if have_counted:
                self.contributors_at = (time.monotonic(), self._prepared_by)
                self._is_finishing = False
                self.standing.begin(opening.step, opening.committed)
            else:
                self.standing.lose(is_late=not is_asynchronous)
            self._is_begun = False
        self._say()
        return have_counted

    def _behind(self, step: int) -> str:
        return (
            f"trainer {self._office.name!r} is behind: the others have closed step {step} of {self.key!r} without "
            f"it, so its copy of the parameters is not theirs. reduction.DataParallel and "
            f"reduction.state(..., model=model) take the state of another trainer. With push_pull, take that state "
            f"by hand, and push again"
        )

    def _take_state(self, opening: Opening, deadline: float | None) -> None:
        """Load the state of a donor. A model that is equal everywhere needs no donor."""
        is_first = self._office.name in opening.donors
        step, committed = opening.step, opening.committed
        has_state = is_first or (self._are_equal and step == 0)
        if self._copy is None and self._are_equal and not has_state:
            raise RuntimeError(self._behind(step - 1))
        if self._copy is not None and not has_state:
            found = None
            for donor in opening.donors:
                if (found := self._ask_for_state(donor, opening, deadline)) is not None:
                    break
            if found is None:
                # These donors have left or died, or have no copy to give.
                self._tried = opening
                return
            state, step, committed = found
            self._copy.load(state)
        if is_first and not self._keeps and self.standing.former[1] != NEVER:
            _logger.warning(
                "%s: all trainers with a later state of %s have ended; it goes on from step %d",
                self._office.name,
                self.key,
                step,
            )
        with self._office.changed:
            self.standing.begin(step, committed)
            self._is_begun = is_first or self.standing.is_late
            if is_first and self._copy is not None and len(opening.recipients) > 1:
                self._first_state = self._copy.state()
            self._give_to_all()
        self._say()

    def _ask_for_state(self, donor: str, opening: Opening, deadline: float | None) -> Any:
        try:
            call = rpc.rpc_async(donor, give, args=(self.key,), timeout=0)
            call.add_done_callback(lambda _: self._office.notify())
            with self._office.changed:
                while not call.done() and self._office.is_last(opening):
                    self._office.sleep(deadline)
            return call.value() if call.done() else None
        except RuntimeError as error:
            if not was_lost(error):
                raise
            return None

    def give(self) -> Future[Any]:
        """Return the state of the model at the beginning of a step, with its step and commit."""
        future: Future[Any] = Future()
        with self._office.changed:
            if self._office.steps.get(self.key) is not self:
                future.set_result(None)
            else:
                self._requests.append(future)
                self._give_to_all()
        return future

    def _give_to_all(self) -> None:
        if not self._is_begun or self.standing.step == NEVER or not self._requests:
            return
        requests, self._requests = self._requests, []
        state = self._first_state
        if state is None and self._copy is not None:
            state = self._copy.state()
        given = None if state is None else (state, self.standing.step, self.standing.committed)
        for future in requests:
            future.set_result(given)

    # -- transfers

    def _send(self, opening: Opening) -> None:
        """Put the buckets that this opening does not have yet, and post their means."""
        if self._generation != opening.generation:
            with self._office.changed:
                if not self._office.is_last(opening):
                    raise EpochEnded(f"generation {opening.generation} of {self.key!r} is over")
                # Other means are written into the memory from now on. So an earlier generation cannot be closed here.
                self.standing.prepared = NEVER
            self._generation, self._counts = opening.generation, [0] * len(opening.hosts)
            self._sent, self._posted = 0, []
        if not self._sent:
            self._loads = [0] * len(opening.hosts)
        try:
            channel = Channel(channel_of(self.key), epoch=opening.generation)
        except ValueError as error:
            raise EpochEnded(str(error)) from None
        contributes = self._office.name in opening.contributors
        for index in range(self._sent, len(self._buckets)):
            for part in self._cut(index, opening):
                host, tag = opening.hosts[part.shard], f"{part.shard}/{self._counts[part.shard]}"
                self._counts[part.shard] += 1
                self._posted.append(channel.post(host, f"mean {tag}", None if self._keeps else part.results))
                if contributes:
                    channel.put(host, tag, part.tensors, timeout=0)
        self._sent = len(self._buckets)

    def _cut(self, index: int, opening: Opening) -> list[_Part]:
        tensors, shards = self._buckets[index], len(opening.hosts)
        if index >= len(self._results) or not _fits(self._results[index], tensors):
            made = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
            self._results[index:] = [made]
        results = self._results[index]
        if not self._is_cut:
            of = spread([tensor.numel() for tensor in tensors], shards)
            mine = {shard: [place for place, its in enumerate(of) if its == shard] for shard in sorted(set(of))}
            return [_Part(shard, [tensors[i] for i in its], [results[i] for i in its]) for shard, its in mine.items()]
        [flat], [result] = tensors, results
        if index < len(self._sizes):
            parts = plan(self._sizes, shards)[index]
        else:
            parts = cut(flat.numel(), flat.element_size(), self._loads)
        return [_Part(part.shard, [flat[part.start : part.stop]], [result[part.start : part.stop]]) for part in parts]

    # -- failures

    def _missing(self) -> str:
        if not self._office.group.is_current():
            return "this worker is cut off from the others, or they from it"
        with contextlib.suppress(RuntimeError, TimedOut):
            found = self._office.ask(time.monotonic() + ASKING_S, "missing", self.key)
            names = [name for name in found if name != self._office.name]
            if names:
                return (
                    f"it waited for {', '.join(names)}. If some need not come, serve(..., trainers=N) says how "
                    f"many do, and quorum=N lets a step go on without slow trainers"
                )
            return "no trainer is missing: a host hangs, or the network is cut or slow"
        return "the decider of its epoch does not answer"

    def values_of(self, shards: set[int], step: int) -> dict[int, Values]:
        """Return the parameters of these shards at the beginning of a step, or later, from hosts with an optimizer."""
        deadline = rpc_deadline()
        found: dict[int, Values] = {}
        tried: Opening | None = None
        while shards - found.keys():
            with self._office.changed:
                while (opening := self._office.opening(self.key)) is None or opening is tried or not opening.hosts:
                    try:
                        self._office.sleep(deadline)
                    except TimedOut:
                        raise RuntimeError(
                            f"the parameters of {self.key!r} have not come within rpc_timeout: {self._missing()}"
                        ) from None
            tried = opening
            try:
                calls = {
                    shard: rpc.rpc_async(opening.hosts[shard], values, args=(self.key, shard, opening.spec, step))
                    for shard in shards - found.keys()
                }
                for shard, call in calls.items():
                    found[shard] = call.wait()
            except RuntimeError as error:
                if not was_lost(error):
                    raise
        return found


def _fits(results: list[Tensor], tensors: list[Tensor]) -> bool:
    return [(one.shape, one.dtype, one.device) for one in results] == [
        (one.shape, one.dtype, one.device) for one in tensors
    ]


def rpc_deadline() -> float | None:
    """Return the time at which ``rpc_timeout`` ends; None without one."""
    timeout = get_rpc_timeout()
    return time.monotonic() + timeout if timeout else None


def _left(deadline: float | None) -> float:
    # For channels, 0 means no limit.
    return 0 if deadline is None else max(0.001, deadline - time.monotonic())


_MORE_HOSTS = "More hosts, as in reduction.serve('ps0', 'ps1'), take over from each other"


def _lost(opening: Opening) -> str:
    spec = opening.spec
    return f"all hosts of the server {spec.name!r} are lost: {', '.join(spec.hosts)}. {_MORE_HOSTS}"


def _silent(opening: Opening) -> str:
    spec = opening.spec
    cure = _MORE_HOSTS
    if spec.optimizer is not None and spec.checkpoint is None:
        cure = "Its parameters are there: reduction.serve(..., checkpoint='a folder that all hosts see') keeps a copy"
    return (
        f"hosts of the server {spec.name!r} have been silent for rpc_timeout, or are lost: it has "
        f"{', '.join(spec.hosts)}. {cure}"
    )
