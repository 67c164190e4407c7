"""A worker of a pipeline: a mailbox in front of its stages, and the threads that work through it (`Host`).

Everything that arrives, orders of the driver and values of other stages alike, is put into the mailbox by RPC's
threads. The thread that brings a mail goes on with the work as far as it goes, unless another is at it: one at a time
holds the baton. Orders are numbered and carried out in that order, each on all workers of the pipeline. An order that
waits is a suspended generator, which goes on with whatever arrives: a value, or the word that the call is off.

An order never raises towards the driver: it ends in an outcome, ``("ok", result)``, ``("error", failure)``, ``("lost",
worker)`` or ``("aborted",)``. A call that raises all the same has not reached its worker.
"""

from __future__ import annotations

import inspect
import queue
import threading
import traceback
from collections.abc import Generator
from typing import Any, NamedTuple

import torch
import torch.distributed.rpc as rpc
from torch.futures import Future

from torch_ucx_rpc.pipeline.exchange import Exchange, Lost, LostPeerError, Value, Waiting, receivers
from torch_ucx_rpc.pipeline.messages import HostConfig
from torch_ucx_rpc.pipeline.run import AbortedError, failure_of
from torch_ucx_rpc.pipeline.stages import Stages

__all__ = ["Host", "abort", "close", "create", "find", "hosts_here", "order", "prepare", "put_order"]

Outcome = tuple[Any, ...]


class _Order(NamedTuple):
    """Something to do for the driver, and the future of what comes of it."""

    number: int
    name: str
    payload: Any
    future: Future[Outcome]


class _Abort(NamedTuple):
    """The order with this number is called off."""

    number: int


class _Close(NamedTuple):
    """The pipeline is over."""


class _Look(NamedTuple):
    """See what there is to do. Where nothing has come for a while: perhaps since something did not arrive elsewhere."""


Mail = Value | Lost | _Order | _Abort | _Close | _Look

# Seconds until a host that waits looks whether the values that it has sent did arrive.
_LOOK_AFTER_S = 1.0


class Host:
    """The stages of one pipeline on this worker.

    `put` may be called by any thread. All the rest, exchange and stages included, belongs to the thread that holds the
    baton.
    """

    def __init__(self, config: HostConfig) -> None:
        device = torch.device(config.device)
        self.exchange = Exchange(config.pipeline, device, config.routes)
        self.stages = Stages(config, self.exchange)
        self._mailbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._baton = threading.Lock()
        # Orders that have come, by number, and the number of the next one.
        self._orders: dict[int, _Order] = {}
        self._next = config.first_order
        # The order that is being carried out, what is left of it, and what it waits for.
        self._current: _Order | None = None
        self._rest: Generator[Waiting, None, Outcome] | None = None
        self._waiting: Waiting = None
        # Numbers of orders that have been called off, and are not over yet.
        self._called_off: set[int] = set()
        # A worker that a value has not reached.
        self._lost: LostPeerError | None = None
        # The outcome of an order that nobody has waited for.
        self._failure: Outcome | None = None
        self._closed = False
        # Whoever brings a mail goes on with the work, unless someone is at it: that spares a wake-up for each value.
        # Not in the driver's own thread, which has orders to give to others, and not on a device, where each thread
        # has its stream.
        self._by_itself = device.type != "cpu"
        self._kicks: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._attend_kicks, name=f"pipeline {config.pipeline}", daemon=True).start()

    # ------------------------------------------------------------------------------------------------- the mailbox

    def put(self, mail: Mail, *, here: bool = False) -> None:
        """Into the mailbox; with ``here``, from a thread that has other things to do."""
        self._mailbox.put(mail)
        if here or self._by_itself:
            self._kicks.put(None)
        elif isinstance(mail, _Order):
            self._attend(mail.future)
        else:
            self._attend(mail.answer if isinstance(mail, Value) else None)

    def _attend_kicks(self) -> None:
        while not self._closed:
            try:
                self._kicks.get(timeout=_LOOK_AFTER_S)
            except queue.Empty:
                if self._current is not None:
                    self._mailbox.put(_Look())
            self._attend()

    def _attend(self, answer: Future[Any] | None = None) -> None:
        """Go on with the work until nothing can be done before another mail. Returns at once where another thread is
        at it.

        ``answer`` is that of the request by which RPC called this thread. It leaves when the thread has returned, so
        from when it is known on another thread goes on.
        """
        # torch.set_num_threads counts for the threads that have asked for it since: others compute with a thread for
        # each core, which costs more than what a small layer takes.
        torch.get_num_threads()
        # Mail that comes while the baton is held is seen by its holder, who looks again after letting go of it.
        while not self._mailbox.empty() and self._baton.acquire(blocking=False):
            try:
                is_idle = self._advance(answer)
            finally:
                self._baton.release()
            if not is_idle:
                self.put(_Look(), here=True)
                return

    def _drain(self) -> None:
        while not self._mailbox.empty():
            self._take(self._mailbox.get())

    def _take(self, mail: Mail) -> None:
        match mail:
            case Value(call=call):
                # A message for a call that is over, or called off, is of no use any more.
                if call >= self._next or call == self.exchange.running:
                    self.exchange.lay(mail)
                elif mail.answer is not None:
                    mail.answer.set_result(None)
            case Lost(call=call, reason=reason):
                if call == self.exchange.running:
                    self._lost = LostPeerError(reason)
            case _Order(number=number, future=future):
                if number < self._next:
                    future.set_result(("aborted",))
                else:
                    self._orders[number] = mail
            case _Abort(number=number):
                # Those before it go on: a step that fails calls off no optimizer that is still at work.
                if number >= self._next or number == self.exchange.running:
                    self._called_off.add(number)
            case _Close():
                self._closed = True
            case _Look():
                try:
                    self.exchange.look_after()
                except LostPeerError as lost:
                    self._lost = lost

    # ------------------------------------------------------------------------------------------------- orders in turn

    def _advance(self, answer: Future[Any] | None) -> bool:
        """Whether nothing can be done before another mail; False: ``answer`` is known, and there is more to do."""
        while not self._closed:
            self._drain()
            if self._current is None and not self._begin():
                return True
            if not self.exchange.has(self._waiting) and not self._is_called_off() and self._lost is None:
                return True
            if answer is not None and answer.done():
                return False
            self._go_on()
        self._drain()
        self._end()
        return True

    def _begin(self) -> bool:
        if self._next not in self._orders:
            return False
        self._current = self._orders.pop(self._next)
        self.exchange.running = self._next
        self._next += 1
        self._rest = self._carry_out(self._current.number, self._current.name, self._current.payload)
        return True

    def _carry_out(self, number: int, name: str, payload: Any) -> Generator[Waiting, None, Outcome]:
        if number in self._called_off and name == "run":
            self.stages.order_skip(payload)
            return ("aborted",)
        if name == "reset":
            self._failure = None
        if self._failure is not None and name in {"run", "optimizer_step"}:
            # An order that nobody waited for has failed: the next one that counts on it tells.
            if name == "run":
                self.stages.order_skip(payload)
            return self._failure
        result = getattr(self.stages, f"order_{name}")(payload)
        if inspect.isgenerator(result):
            result = yield from result
            yield from self.exchange.settle()
        return ("ok", result)

    def _go_on(self) -> None:
        assert self._current is not None
        assert self._rest is not None
        self._waiting = None
        lost, self._lost = self._lost, None
        try:
            stop = AbortedError() if self._is_called_off() else lost
            if stop is not None and inspect.getgeneratorstate(self._rest) == inspect.GEN_SUSPENDED:
                self._waiting = self._rest.throw(stop)
            else:
                self._waiting = next(self._rest)
            return
        except StopIteration as end:
            outcome: Outcome = end.value
        except AbortedError:
            outcome = ("aborted",)
        except LostPeerError as lost:
            outcome = ("lost", str(lost))
        except BaseException as error:
            outcome = ("error", failure_of(error))
            if self._current.name not in {"run", "reset"}:
                self._failure = outcome
        self._finish(outcome)

    def _finish(self, outcome: Outcome) -> None:
        assert self._current is not None
        number, name, payload, future = self._current
        self._current = self._rest = self.exchange.running = None
        self._called_off.discard(number)
        self.exchange.drop(number)
        if name == "run" and outcome[0] != "ok":
            self.stages.forget(payload.call)
        # What the order held is gone before its answer leaves: that may be the last thing this does for long.
        del payload
        future.set_result(outcome)

    def _is_called_off(self) -> bool:
        return self._current is not None and self._current.number in self._called_off

    def _end(self) -> None:
        self.exchange.clear()
        self.stages.clear()
        self._rest = None
        open_orders = list(self._orders.values())
        if self._current is not None:
            open_orders.append(self._current)
        self._orders.clear()
        self._current = None
        for order in open_orders:
            order.future.set_result(("aborted",))


# ------------------------------------------------------------------------------------------ what other workers call

_changing = threading.Lock()


def hosts_here() -> list[Host]:
    """All hosts on this worker."""
    return [one for one in receivers.values() if isinstance(one, Host)]


def find(host: str) -> Stages:
    """The stages of a host on this worker; for checkpoints."""
    found = receivers[host]
    assert isinstance(found, Host)
    return found.stages


def prepare() -> None:
    """Import what stages and checkpoints need, so that a spare need not when it is wanted in a hurry."""
    import torch.distributed.checkpoint  # noqa: F401

    import torch_ucx_rpc.checkpoint  # noqa: F401


def create(config: HostConfig) -> Outcome:
    """Make the stages of a pipeline on this worker. Its outcome is what the driver wants to know of them, or the
    failure."""
    try:
        host = Host(config)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    with _changing:
        before = receivers.get(config.pipeline)
        receivers[config.pipeline] = host
    if before is not None:
        before.put(_Close(), here=True)
    known = {
        index: [(name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in stage.named_parameters()]
        for index, stage in host.stages.by_index.items()
    }
    return "ok", known


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def order(host: str, number: int, name: str, payload: Any) -> Future[Outcome]:
    """Have an order carried out when all with lower numbers have been; the future is its outcome."""
    future: Future[Outcome] = Future()
    put_order(host, number, name, payload, future)
    return future


def put_order(host: str, number: int, name: str, payload: Any, future: Future[Outcome], *, here: bool = False) -> None:
    found = receivers.get(host)
    if found is None:
        future.set_result(("aborted",))
    else:
        found.put(_Order(number, name, payload, future), here=here)


def abort(host: str, number: int) -> None:
    """Call off the order with this number."""
    found = receivers.get(host)
    if found is not None:
        found.put(_Abort(number))


def close(host: str) -> None:
    """Let go of a pipeline's stages."""
    with _changing:
        found = receivers.pop(host, None)
    if found is not None:
        found.put(_Close(), here=True)
