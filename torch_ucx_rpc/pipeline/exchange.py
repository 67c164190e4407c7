"""The values that stages on different workers send each other: how they leave, and where they lie (`Exchange`).

A value is sent by one request, which puts it into a slot of the receiver. Where another value will come back for it, as
the gradients of an activation do, that is the answer. Otherwise the answer says at once that the value lies there. A
value that is not wanted yet waits in its slot, so a slot may be filled before the order that reads it has come.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Generator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import _get_current_rpc_agent
from torch.distributed.rpc.api import _to_worker_info
from torch.futures import Future

from torch_ucx_rpc._workers.lost import was_lost
from torch_ucx_rpc.errors import RpcError
from torch_ucx_rpc.pipeline.values import to_device

__all__ = [
    "Exchange",
    "Lost",
    "LostPeerError",
    "Receiver",
    "Slot",
    "Value",
    "Waiting",
    "deliver",
    "deliver_for_gradients",
    "receivers",
    "worker_info",
]

# How many values may be on their way to another worker without an answer, beside those with another value as answer.
_CREDITS = 64
_CPU = torch.device("cpu")

# A slot: kind ("F", "B", "T" for tied gradients, "V" for tied values, "A" for the answer that a value has arrived), the
# stage it is for, micro-batch, the stage it is of.
Slot = tuple[str, int, int, int]
# What an order that is not done yet waits for: the slot of an order; None: nothing, it lets others have their say.
Waiting = tuple[int, Slot] | None


class LostPeerError(Exception):
    """A worker that a value was sent to does not answer."""


class Value(NamedTuple):
    """The mail that brings a value of another stage."""

    call: int
    """Number of the order that it belongs to."""
    slot: Slot
    value: Any
    answer: Future[Any] | None = None
    """The way of what comes back. None as the answer: nothing will come back, or not by this way."""


class Lost(NamedTuple):
    """The mail that says that a value has not arrived, or the one that was to come back for it."""

    call: int
    reason: str


class Receiver(Protocol):
    """A host, as the senders of values see it."""

    def put(self, mail: Any, *, here: bool = False) -> None:
        """Take in what has come; with ``here``, from a thread that has other things to do."""


# The hosts on this worker, by name.
receivers: dict[str, Receiver] = {}


def deliver(host: str, call: int, slot: Slot, value: Any) -> bool:
    """For other workers: a value for one of the hosts here. It is dropped if there is no such host any more. True: it
    has arrived."""
    receiver = receivers.get(host)
    if receiver is not None:
        receiver.put(Value(call, slot, value))
    return True


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def deliver_for_gradients(host: str, call: int, slot: Slot, value: Any) -> Future[Any]:
    """The same; the answer are the gradients of the value."""
    answer: Future[Any] = Future()
    receiver = receivers.get(host)
    if receiver is None:
        answer.set_result(None)
    else:
        receiver.put(Value(call, slot, value, answer))
    return answer


def _take_answer(host: str, worker: str, call: int, slot: Slot, answer: Future[Any]) -> None:
    """Runs when the answer to a value is there: puts it into a slot of the sender."""
    receiver = receivers.get(host)
    if receiver is None:
        return
    try:
        value = answer.value()
    except Exception as error:
        receiver.put(Lost(call, f"{worker}: {error}"))
    else:
        if value is not None:
            receiver.put(Value(call, slot, value))


def _slot_of_gradients(slot: Slot) -> Slot:
    """Of those of the value in a slot: on the worker that it is of."""
    _, stage, micro_batch, source = slot
    return "B", source, micro_batch, stage


def worker_info(name: str) -> Any:
    """The WorkerInfo of a worker; what torch raises where there is none of that name."""
    return _to_worker_info(name)  # type: ignore[no-untyped-call]


class Exchange:
    """The slots of a host, and its ways to the others. It belongs to the thread that works for the host."""

    def __init__(self, host: str, device: torch.device, routes: list[tuple[str, str]]) -> None:
        self._host = host
        self._device = device
        # Number of the order that is being carried out: its values are sent and waited for.
        self.running: int | None = None
        self._slots: dict[tuple[int, Slot], Any] = {}
        # The ways of gradients that other workers wait for, by their slots there.
        self._answers: dict[tuple[int, Slot], Future[Any]] = {}
        self._unanswered: dict[str, collections.deque[Future[Any]]] = collections.defaultdict(collections.deque)
        self.set_routes(routes)

    def __len__(self) -> int:
        """How many values lie here, or are waited for elsewhere."""
        return len(self._slots) + len(self._answers)

    def set_routes(self, routes: list[tuple[str, str]]) -> None:
        """Worker and host of each stage."""
        # WorkerInfo and host; None for the stages that are here.
        self._routes = [None if host == self._host else (worker_info(worker), host) for worker, host in routes]

    @property
    def last_stage(self) -> int:
        return len(self._routes) - 1

    # -- values that arrive

    def lay(self, mail: Value) -> None:
        """Put a value into its slot."""
        self._slots[mail.call, mail.slot] = mail.value
        if mail.answer is not None:
            self._answers[mail.call, _slot_of_gradients(mail.slot)] = mail.answer

    def has(self, waiting: Waiting) -> bool:
        """Whether an order that waits for this may go on."""
        return waiting is None or waiting in self._slots

    def wait(self, slot: Slot) -> Generator[Waiting, None, Any]:
        """The value of a slot of the running order, by ``yield from``."""
        assert self.running is not None
        key = (self.running, slot)
        while key not in self._slots:
            yield key
        return self._slots.pop(key)

    def drop(self, call: int) -> None:
        """Let go of the values for this order, and for those before it."""
        for key in [key for key in self._slots if key[0] <= call]:
            del self._slots[key]
        for key in [key for key in self._answers if key[0] <= call]:
            self._answers.pop(key).set_result(None)

    def clear(self) -> None:
        self._slots.clear()
        while self._answers:
            self._answers.popitem()[1].set_result(None)

    # -- values that leave

    def send(self, stage: int, slot: Slot, value: Any, *, for_gradients: bool = False) -> None:
        """To the worker of a stage; ``for_gradients``, if these come back in the running order. LostPeerError if it
        does not answer."""
        assert self.running is not None
        route = self._routes[stage]
        if route is None:
            self._slots[self.running, slot] = value
            return
        answer = self._answers.pop((self.running, slot), None)
        if answer is not None:
            # A future of tensors on devices would have to know these beforehand.
            answer.set_result(to_device(value, _CPU) if self._device.type != "cpu" else value)
            return
        worker, its_host = route
        if self._device.type != "cpu" and not _has_device_map(worker):
            value = to_device(value, _CPU)
        try:
            # To a device tensors come by a request, straight from another one.
            if for_gradients and self._device.type == "cpu":
                call = rpc.rpc_async(worker, deliver_for_gradients, (its_host, self.running, slot, value), timeout=0)
                self._await_answer(call, worker.name, _slot_of_gradients(slot))
                return
            waiting = self._unanswered[worker.name]
            self._wait_for_credit(worker.name, waiting)
            waiting.append(rpc.rpc_async(worker, deliver, (its_host, self.running, slot, value), timeout=0))
        except RuntimeError as error:
            if not isinstance(error, RpcError) and not was_lost(error):
                # Such a value cannot be sent to anybody: the stage that made it has to know.
                raise
            self._unanswered.pop(worker.name, None)
            raise LostPeerError(f"{worker.name}: {error}") from None

    def _wait_for_credit(self, name: str, waiting: collections.deque[Future[Any]]) -> None:
        """Return when another value may leave."""
        if len(waiting) >= _CREDITS:
            self._take_answers(name, waiting)
        try:
            while len(waiting) >= _CREDITS:
                # Not for the oldest: its answer may wait until the peer, who is at work for it, has to wait for us.
                waiting[1].wait()
                del waiting[1]
        except RuntimeError as error:
            waiting.clear()
            raise LostPeerError(f"{name}: {error}") from None

    def _await_answer(self, call: Future[Any], worker: str, slot: Slot) -> None:
        """Have the answer of a worker put into a slot here."""
        assert self.running is not None
        call.add_done_callback(functools.partial(_take_answer, self._host, worker, self.running, slot))

    def look_after(self) -> None:
        """Raise LostPeerError if a value that has left did not arrive."""
        for name, waiting in self._unanswered.items():
            self._take_answers(name, waiting)

    def settle(self) -> Generator[Waiting, None, None]:
        """Return when all values that have left in the running order have arrived, by ``yield from``."""
        left = [(name, call) for name, waiting in self._unanswered.items() for call in waiting]
        self._unanswered.clear()
        for number, (name, call) in enumerate(left):
            self._await_answer(call, name, ("A", number, 0, 0))
        for number in range(len(left)):
            yield from self.wait(("A", number, 0, 0))

    def _take_answers(self, name: str, waiting: collections.deque[Future[Any]]) -> None:
        """Those that have come, up to the first that has not."""
        try:
            while waiting and waiting[0].done():
                waiting.popleft().wait()
        except RuntimeError as error:
            waiting.clear()
            raise LostPeerError(f"{name}: {error}") from None

    def forget_unanswered(self) -> None:
        """After a failure: nobody counts on the values that are on their way."""
        self._unanswered.clear()


def _has_device_map(worker: Any) -> bool:
    """Whether tensors may go to that worker from devices; without, they go by the CPU."""
    return bool(_get_current_rpc_agent()._get_device_map(worker))
