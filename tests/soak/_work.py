"""The kinds of calls, each with the answer that it must have: `Caller` makes the calls, and the functions here answer.

A callee first notes that it runs. So the journals always show a call that was answered without running, or that ran
twice.
"""

from __future__ import annotations

import collections
import functools
import random
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer

from tests.support.swaps import SWAPS
from tests.support.workers import agent
from torch_ucx_rpc import services
from torch_ucx_rpc._workers import members
from torch_ucx_rpc.errors import CallTimedOut

from ._journal import Journal, Step
from ._libraries import Pushes, lives_seen, offer
from ._payload import Payload, any_payload

_TIMEOUT_S = 0.2
_LONGER_THAN_TIMEOUT_S = 0.6
_LONGEST_PAUSE_S = 0.06
_MOST_IN_A_BURST = 24
_MOST_KEPT = 32
_PUSHES = 8
# Names that one worker has at a time: fewer than there are callers.
_SEATS = 6

_journal: Journal | None = None
# References to others' objects that this worker holds for a while.
_kept: collections.deque[Any] = collections.deque(maxlen=_MOST_KEPT)


def write_to(journal: Journal) -> None:
    global _journal
    _journal = journal


def offer_names(journal: Journal, life: str) -> None:
    with Call(journal, "name", []) as call:
        offer(life)
        call.answered()


def let_go() -> None:
    _kept.clear()


class WrongAnswer(Exception):
    """A value that arrived, here or at the callee, is wrong."""


def check(is_right: bool, what: str) -> None:
    if not is_right:
        raise WrongAnswer(what)


# ---- What callees do -------------------------------------------------------------------------------------------------


def run(call: int, kind: str) -> None:
    assert _journal is not None
    _journal.enter(call, Step.EXECUTED, kind)


def exchange(call: int, kind: str, sent: Payload, tensor: torch.Tensor, wanted: Payload) -> tuple[int, torch.Tensor]:
    run(call, kind)
    check(not (difference := sent.differs_from(tensor)), f"{sent} has arrived as {difference}")
    return call, wanted.make()


def raise_key_error(call: int) -> None:
    run(call, "exception")
    raise KeyError(f"by design, in call {call}")


def sleep(call: int, seconds: float, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    run(call, "timeout")
    time.sleep(seconds)
    return call, tensor


@rpc.functions.async_execution
def exchange_by_way_of(
    call: int, name: str, inner: int, sent: Payload, tensor: torch.Tensor, wanted: Payload
) -> torch.futures.Future:
    run(call, "async_execution")
    return rpc.rpc_async(name, exchange, args=(inner, "async_execution", sent, tensor, wanted))


def chain(calls: list[int], names: list[str], sent: Payload, tensor: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Make a call through all of these workers and back."""
    run(calls[0], "nested")
    check(not (difference := sent.differs_from(tensor)), f"{sent} has arrived as {difference}")
    if not names:
        return calls, tensor
    deeper, tensor = rpc.rpc_sync(names[0], chain, args=(calls[1:], names[1:], sent, tensor))
    return [calls[0], *deeper], tensor


class Tally:
    def __init__(self, call: int, start: int) -> None:
        run(call, "rref")
        self._count = start

    def add(self, call: int, n: int) -> int:
        run(call, "rref")
        self._count += n
        return self._count

    def count(self, call: int) -> int:
        run(call, "rref")
        return self._count


def add_by_way_of(call: int, inner: int, tally: rpc.RRef, n: int) -> int:
    """Keep a copy of the reference until newer ones have come."""
    run(call, "rref")
    _kept.append(tally)
    return tally.rpc_sync().add(inner, n)


class Layer(torch.nn.Module):
    def __init__(self, call: int, width: int, seed: int) -> None:
        super().__init__()
        run(call, "autograd")
        self.weight = torch.nn.Parameter(torch.randn(width, width, generator=torch.Generator().manual_seed(seed)))

    def forward(self, call: int, x: torch.Tensor) -> torch.Tensor:
        run(call, "autograd")
        return activation(x, self.weight)


def activation(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


def weight_of(call: int, layer: rpc.RRef) -> torch.nn.Parameter:
    run(call, "autograd")
    return layer.local_value().weight


@torch.jit.script
def weighted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * 3 + b


# ---- What callers do -------------------------------------------------------------------------------------------------


class Call:
    """A call of this worker, from its beginning to its end in the journal.

    Use it in a ``with``, once or more often. The ``with`` suppresses an exception, and notes the call as failed.
    `answered` notes it as answered. A call with neither hangs.

    Args:
        among: the names of the other workers that take part.
        executions: the number of functions that run for it and count.
        since: the time from which on misfortunes may make it fail. (default: now)
    """

    def __init__(
        self,
        journal: Journal,
        kind: str,
        among: list[str],
        executions: int = 1,
        size: int = 0,
        since: float | None = None,
    ) -> None:
        self._journal = journal
        self._kind = kind
        self._among = among
        self._began = time.monotonic() if since is None else since
        self._size = size
        self.numbers = [journal.new_call() for _ in range(max(executions, 1))]
        self.is_over = False
        for number in self.numbers:
            journal.enter(number, Step.BEGUN, kind, size)

    @property
    def number(self) -> int:
        return self.numbers[0]

    def answered(self) -> None:
        self._end(Step.ANSWERED)

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._end(Step.FAILED)
        self._journal.note(
            "wrong" if "WrongAnswer" in f"{kind} {error}" else "failed",
            call=self.number,
            kind=self._kind,
            among=self._among,
            began=self._began,
            error=f"{type(error).__name__}: {error}",
        )
        return True

    def _end(self, step: Step) -> None:
        if not self.is_over:
            self.is_over = True
            for number in self.numbers:
                self._journal.enter(number, step, self._kind, self._size if number == self.number else 0)


class Caller:
    """A thread that makes calls of all kinds until it is stopped, and then waits for its calls."""

    def __init__(self, journal: Journal, life: str, seed: str) -> None:
        self._journal = journal
        self._life = life
        self._seat: str | None = None
        self._choice = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"caller {seed}")
        self._kinds: list[tuple[Callable[[], None], int]] = [
            (self.rpc_sync, 20),
            (self.rpc_async, 8),
            (self.remote, 10),
            (self.async_execution, 6),
            (self.builtin, 12),
            (self.script, 12),
            (self.nested, 6),
            (self.rref, 8),
            (self.autograd, 4),
            (self.exception, 8),
            (self.timeout, 4),
            (self.callback, 3),
            (self.swapped, 4),
            (self.service, 6),
            (self.take_name, 6),
            (self.push, 2),
        ]

    @property
    def name(self) -> str:
        return self._thread.name

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def join(self, timeout: float) -> bool:
        """Wait for the thread; return whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        functions, weights = zip(*self._kinds, strict=True)
        while not self._stop.is_set():
            [function] = self._choice.choices(functions, weights)
            function()
            self._stop.wait(self._choice.uniform(0, _LONGEST_PAUSE_S))

    def _begin(
        self, kind: str, among: list[str], executions: int = 1, size: int = 0, since: float | None = None
    ) -> Call:
        return Call(self._journal, kind, among, executions, size, since)

    def _workers(self, count: int) -> list[str]:
        """Pick any living worker, at times this one, or the same twice in a row."""
        names = [info.name for info in agent().get_worker_infos()]
        return self._choice.choices(names, k=count)

    def _others(self, count: int) -> list[str]:
        own = rpc.get_worker_info().name
        names = [info.name for info in agent().get_worker_infos() if info.name != own]
        return self._choice.sample(names, count) if len(names) >= count else []

    def _payloads(self, at_most: int = 2**40) -> tuple[Payload, Payload]:
        return any_payload(self._choice, at_most), any_payload(self._choice, at_most)

    # -- One method for each kind of call

    def rpc_sync(self) -> None:
        [to] = self._workers(1)
        sent, wanted = self._payloads()
        with self._begin("rpc_sync", [to], size=sent.nbytes + wanted.nbytes) as call:
            answer = rpc.rpc_sync(to, exchange, args=(call.number, "rpc_sync", sent, sent.make(), wanted))
            self._check_exchange(call.number, wanted, answer)
            call.answered()

    def rpc_async(self) -> None:
        begun = []
        for _ in range(self._choice.randint(1, _MOST_IN_A_BURST)):
            [to] = self._workers(1)
            sent, wanted = self._payloads(at_most=4 << 20)
            with self._begin("rpc_async", [to], size=sent.nbytes + wanted.nbytes) as call:
                arguments = (call.number, "rpc_async", sent, sent.make(), wanted)
                begun.append((call, wanted, rpc.rpc_async(to, exchange, args=arguments)))
        for call, wanted, future in begun:
            with call:
                self._check_exchange(call.number, wanted, future.wait())
                call.answered()

    def remote(self) -> None:
        [to] = self._workers(1)
        sent, wanted = self._payloads()
        with self._begin("remote", [to], size=sent.nbytes + wanted.nbytes) as call:
            rref = rpc.remote(to, exchange, args=(call.number, "remote", sent, sent.make(), wanted))
            self._check_exchange(call.number, wanted, rref.to_here())
            call.answered()

    def async_execution(self) -> None:
        first, second = self._workers(2)
        sent, wanted = self._payloads(at_most=4 << 20)
        with self._begin("async_execution", [first, second], 2, size=2 * (sent.nbytes + wanted.nbytes)) as call:
            outer, inner = call.numbers
            answer = rpc.rpc_sync(first, exchange_by_way_of, args=(outer, second, inner, sent, sent.make(), wanted))
            self._check_exchange(inner, wanted, answer)
            call.answered()

    def builtin(self) -> None:
        [to] = self._workers(1)
        tensor = self._integers()
        with self._begin("builtin", [to], size=2 * tensor.nbytes) as call:
            answer = self._by_any_way(to, torch.add, (tensor, 7))
            check(torch.equal(answer, tensor + 7), f"torch.add of {len(tensor)} elements")
            call.answered()

    def script(self) -> None:
        [to] = self._workers(1)
        a, b = self._integers(), torch.tensor([self._choice.randrange(1000)])
        with self._begin("script", [to], size=2 * a.nbytes) as call:
            answer = self._by_any_way(to, weighted, (a, b))
            check(torch.equal(answer, a * 3 + b), f"a scripted function of {len(a)} elements")
            call.answered()

    def nested(self) -> None:
        names = self._workers(self._choice.randint(2, 6))
        sent, _ = self._payloads(at_most=1 << 20)
        with self._begin("nested", names, len(names), size=2 * len(names) * sent.nbytes) as call:
            arguments = (call.numbers, names[1:], sent, sent.make())
            numbers, tensor = rpc.rpc_sync(names[0], chain, args=arguments)
            check(numbers == call.numbers, f"other calls than {call.numbers} have run: {numbers}")
            check(not (difference := sent.differs_from(tensor)), f"{sent} came back as {difference}")
            call.answered()

    def rref(self) -> None:
        names = self._others(2)
        if not names:
            return
        owner, third = names
        with self._begin("rref", names, 5) as call:
            created, added, by_way_of, inner, counted = call.numbers
            start, one, two = (self._choice.randrange(1000) for _ in range(3))
            rref = rpc.remote(owner, Tally, args=(created, start))
            check(rref.rpc_sync().add(added, one) == start + one, "the first sum")
            total = rpc.rpc_sync(third, add_by_way_of, args=(by_way_of, inner, rref, two))
            check(total == start + one + two, "the sum through a third worker")
            check(rref.remote().count(counted).to_here() == total, "the count")
            call.answered()
            if self._choice.random() < 0.5:
                _kept.append(rref)

    def autograd(self) -> None:
        names = self._others(2)
        if not names:
            return
        width, seed = self._choice.choice((4, 32, 160)), self._choice.randrange(1000)
        with self._begin("autograd", names, 3 * len(names), size=16 * len(names) * width**2) as call:
            numbers = iter(call.numbers)
            x = torch.randn(8, width, generator=torch.Generator().manual_seed(seed))
            weights = [torch.randn(width, width, generator=torch.Generator().manual_seed(seed + i)) for i in (0, 1)]

            layers = [rpc.remote(name, Layer, args=(next(numbers), width, seed + i)) for i, name in enumerate(names)]
            parameters = [
                rpc.remote(name, weight_of, args=(next(numbers), layer))
                for name, layer in zip(names, layers, strict=True)
            ]
            optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
            with dist_autograd.context() as context:
                output = x
                for layer in layers:
                    output = layer.rpc_sync().forward(next(numbers), output)
                dist_autograd.backward(context, [output.square().mean()])
                optimizer.step(context)

            for weight in weights:
                weight.requires_grad_()
            activation(activation(x, weights[0]), weights[1]).square().mean().backward()
            for weight, parameter in zip(weights, parameters, strict=True):
                expected = weight.detach() - 0.1 * weight.grad
                close = torch.allclose(parameter.to_here().detach(), expected, rtol=1e-4, atol=1e-5)
                check(close, "a parameter after the step of an optimizer")
            call.answered()

    def exception(self) -> None:
        [to] = self._workers(1)
        with self._begin("exception", [to]) as call:
            try:
                rpc.rpc_sync(to, raise_key_error, args=(call.number,))
            except KeyError as error:
                check(f"by design, in call {call.number}" in str(error), f"another error: {error}")
                call.answered()
            else:
                check(False, "no exception where one is raised")

    def timeout(self) -> None:
        [to] = self._workers(1)
        sent, _ = self._payloads(at_most=4 << 20)
        with self._begin("timeout", [to], size=sent.nbytes) as call:
            arguments = (call.number, _LONGER_THAN_TIMEOUT_S, sent.make())
            try:
                # An answer is correct too: caller and callee may have been delayed.
                number, tensor = rpc.rpc_sync(to, sleep, args=arguments, timeout=_TIMEOUT_S)
                check(number == call.number, f"the answer of call {number}")
                check(not (difference := sent.differs_from(tensor)), f"{sent} came back as {difference}")
            except CallTimedOut as error:
                check((error.name, error.timeout) == (to, _TIMEOUT_S), f"the timeout of another call: {error}")
            call.answered()

    def callback(self) -> None:
        """Callbacks that each wait for another call. There may be more callbacks than threads."""
        begun = []
        for _ in range(self._choice.randint(1, _MOST_IN_A_BURST)):
            first, second = self._workers(2)
            sent, wanted = self._payloads(at_most=1 << 20)
            with self._begin("callback", [first, second], 2, size=2 * (sent.nbytes + wanted.nbytes)) as call:
                one, two = ((number, "callback", sent, sent.make(), wanted) for number in call.numbers)
                ask_again = functools.partial(self._ask_again, second, two)
                begun.append((call, wanted, rpc.rpc_async(first, exchange, args=one).then(ask_again)))
        for call, wanted, future in begun:
            with call:
                first_answer, second_answer = future.wait()
                self._check_exchange(call.numbers[0], wanted, first_answer)
                self._check_exchange(call.numbers[1], wanted, second_answer)
                call.answered()

    @staticmethod
    def _ask_again(to: str, arguments: tuple[Any, ...], done: torch.futures.Future) -> tuple[Any, Any]:
        return done.wait(), rpc.rpc_sync(to, exchange, args=arguments)

    def swapped(self) -> None:
        """Send a tensor that gets other memory while it travels. The callee must get the old contents."""
        # A worker does not send tensors to itself.
        names = self._others(1)
        if not names:
            return
        sent, wanted = self._payloads()
        sent = sent._replace(kind="bytes")
        with self._begin("swapped", names, size=sent.nbytes + wanted.nbytes) as call:
            tensor = sent.make().clone()
            future = rpc.rpc_async(names[0], exchange, args=(call.number, "swapped", sent, tensor, wanted))
            self._choice.choice(SWAPS)(tensor)
            self._check_exchange(call.number, wanted, future.wait())
            call.answered()

    def service(self) -> None:
        """All workers are replicas of this service: if a replica dies in a call, another one gets the call."""
        tensor = self._integers()
        with self._begin("service", [], size=2 * tensor.nbytes) as call:
            answer = services.call_async("negative", tensor) if self._choice.random() < 0.5 else None
            answer = services.call("negative", tensor) if answer is None else answer.wait()
            check(torch.equal(answer, -tensor), f"-x of {len(tensor)} elements")
            call.answered()

    def take_name(self) -> None:
        """Take an exclusive name, or give it back. Note the names that this worker knows."""
        with self._begin("name", []) as call:
            began = time.monotonic()
            self._journal.note("names", began=began, lives=lives_seen())
            if self._seat is None:
                seat = f"seat {self._choice.randrange(_SEATS)}"
                try:
                    services.pair(seat, self._life)
                except services.NameTaken as error:
                    self._journal.note("taken", began=began, error=str(error))
                else:
                    self._seat = seat
                    self._note_seat("seated", seat)
            else:
                seat, self._seat = self._seat, None
                self._note_seat("rises", seat)
                check((life := services.get(seat).to_here()) == self._life, f"{seat!r} is of {life}")
                services.unregister(seat)
            call.answered()

    def _note_seat(self, what: str, seat: str) -> None:
        epoch = members.group("services").epoch
        self._journal.note(what, seat=seat, epoch=epoch and epoch.number, decider=epoch and epoch.decider.name)

    def push(self) -> None:
        """Push to this worker's server, whose hosts are two other workers."""
        names = self._others(2)
        if not names:
            return
        pushes = Pushes(f"pushes {self._journal.new_call():x}", names)
        for number in range(_PUSHES):
            # While no epoch is in force, each push fails after the timeout.
            if self._stop.is_set():
                break
            with self._begin("push", names, since=pushes.began) as call:
                check(not (wrong := pushes.push(number)), wrong)
                call.answered()
        pushes.leave()

    def _check_exchange(self, number: int, wanted: Payload, answer: tuple[int, torch.Tensor]) -> None:
        answered, tensor = answer
        check(answered == number, f"the answer of call {answered}")
        check(not (difference := wanted.differs_from(tensor)), f"{wanted} came back as {difference}")

    def _integers(self) -> torch.Tensor:
        count = self._choice.choice((0, 1, 10, 1000, 100_000, 2_000_000))
        return torch.arange(self._choice.randrange(100), 100 + count)[:count]

    def _by_any_way(self, to: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        way = self._choice.randrange(3)
        if way == 0:
            return rpc.rpc_sync(to, function, args=arguments)
        if way == 1:
            return rpc.rpc_async(to, function, args=arguments).wait()
        return rpc.remote(to, function, args=arguments).to_here()
