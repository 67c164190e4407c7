"""Values by `torch_ucx_rpc.channel`: the `Box` of the driver and of each host, and the values between stages
(`Exchange`)."""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import _get_current_rpc_agent
from torch.distributed.rpc.internal import _internal_rpc_pickler

from torch_ucx_rpc._workers.lost import timed_out, was_lost
from torch_ucx_rpc.channel._channel import slots
from torch_ucx_rpc.errors import EpochEnded
from torch_ucx_rpc.pipeline._values import flatten, to_device

__all__ = ["AbortedError", "Box", "Exchange", "LostPeerError", "Slot", "decode", "encode", "open_to_send", "put"]

_CPU = torch.device("cpu")

# Seconds that a sender without room waits before it checks whether the driver has called off its order.
_SLICE_S = 0.25

# A slot: kind, target stage, micro-batch, source stage, and number of the tie. The kinds are "F", "B", "T" for tied
# gradients, and "V" for tied values.
Slot = tuple[str, int, int, int, int]


class AbortedError(Exception):
    """The driver has ended the epoch in which this order runs."""


class LostPeerError(Exception):
    """A worker that a stage exchanges values with cannot be reached."""


def encode(value: Any) -> tuple[list[torch.Tensor], bool]:
    """Return the tensors that a channel carries for ``value``. Raises pickle's errors."""
    if isinstance(value, torch.Tensor):
        return [value], True
    data, tensors = _internal_rpc_pickler.serialize(value)
    return [torch.frombuffer(bytearray(data), dtype=torch.uint8), *tensors], False


def decode(value: Any) -> Any:
    """Reverse `encode`. Raises pickle's errors."""
    if isinstance(value, torch.Tensor):
        return value
    found = _internal_rpc_pickler.deserialize(value[0].numpy().tobytes(), value[1:])
    # torch returns the error if this process lacks a class.
    if isinstance(found, AttributeError) and found.__cause__ is not None:
        raise found
    return found


def put(box: str, epoch: int, to: str, tag: str, encoded: tuple[list[torch.Tensor], bool], timeout: float) -> None:
    """Put a value into a box of the worker ``to``. For the errors see `torch_ucx_rpc.channel.Channel.put`."""
    tensors, is_single = encoded
    slots().put(box, epoch, to, tag, tensors, is_single, timeout)


def open_to_send(box: str) -> None:
    """Open a box's channel in this process, so that the process can put into the box. The channel stays open, which
    costs only the memory of its name."""
    with contextlib.suppress(ValueError):  # the box is here, in a later epoch
        slots().advance(box, 0)


class Box:
    """The channel at which values for one host, or for the driver, arrive. Only its owner advances it to the next
    epoch."""

    def __init__(self, name: str, epoch: int) -> None:
        self.name = name
        self._slots = slots()
        self._is_closed = False
        self.advance(epoch)

    def post(self, epoch: int, source: str, tag: str) -> Any:
        return self._slots.post(self.name, epoch, source, tag, None, False)

    def take(self, epoch: int, source: str, tag: str, timeout: float = 0) -> Any:
        return self.post(epoch, source, tag).wait(timeout)

    def advance(self, epoch: int) -> None:
        if not self._is_closed:
            self._slots.advance(self.name, epoch)

    def close(self) -> None:
        """End all waits at this box."""
        self._is_closed = True
        self._slots.close(self.name)


class Exchange:
    """The values between the stages of a host and other stages. It belongs to the host's thread, except ``is_waiting``.

    ``is_called_off`` tells whether the driver has called off the running order.
    """

    def __init__(
        self, box: Box, device: str, routes: list[tuple[str, str]], epoch: int, is_called_off: Callable[[], bool]
    ) -> None:
        self._box = box
        self._device = torch.device(device)
        self._is_called_off = is_called_off
        # Number of the message that is being carried out, or of the next one, and its epoch.
        self.number, self.epoch = 0, epoch
        self.is_waiting = False
        # Values for stages of this host, from stages of this host.
        self._here: dict[Slot, Any] = {}
        self._posted: dict[Slot, Any] = {}
        self._expected: Iterable[Slot] = ()
        self.set_routes(routes)

    def set_routes(self, routes: list[tuple[str, str]]) -> None:
        # Worker and host of each stage; None for the stages of this host.
        self._routes = [None if host == self._box.name else (worker, host) for worker, host in routes]
        self._takes_device = {}
        for worker, box in filter(None, self._routes):
            open_to_send(box)
            self._takes_device[worker] = self._device.type == "cpu" or _has_device_map(worker)

    @property
    def last_stage(self) -> int:
        return len(self._routes) - 1

    def clear(self) -> None:
        self._here.clear()
        self._posted.clear()
        self._expected = ()

    def expect(self, expected: Iterable[Slot]) -> None:
        """Announce the values that the host will take. The first `take` of a value from another host posts all of them
        before it waits, so that no sender waits for room for ever."""
        self._expected = expected

    def take(self, slot: Slot) -> Any:
        """Wait for the value of a slot. Raises AbortedError and LostPeerError."""
        kind, source = slot[0], slot[3]
        route = self._routes[source]
        if route is None:
            return self._here.pop(slot)
        self.is_waiting = True
        try:
            for one in self._expected:
                if (other := self._routes[one[3]]) is not None:
                    self._posted[one] = self._box.post(self.epoch, other[0], self._tag(one))
            self._expected = ()
            posted = self._posted.pop(slot, None) or self._box.post(self.epoch, route[0], self._tag(slot))
            value = posted.wait(0)
        except RuntimeError as error:
            raise _failure_of(route[0], error) from None
        finally:
            self.is_waiting = False
        if isinstance(value, torch.Tensor):
            return (value, None) if kind == "F" else [value] if kind == "B" else value
        return decode(value)

    def send(self, slot: Slot, value: Any) -> None:
        """Send to the stage that the slot is for. Raises AbortedError and LostPeerError, pickle's errors, and TypeError
        for a value whose gradient could not come back."""
        kind, stage = slot[:2]
        route = self._routes[stage]
        if route is None:
            self._here[slot] = value
            return
        worker, box = route
        if not self._takes_device[worker]:
            value = to_device(value, _CPU)
        # The usual values: one tensor that wants a gradient, and its gradient.
        if (kind == "F" and value[1] is None) or (kind == "B" and len(value) == 1 and value[0] is not None):
            value = value[0]
        encoded = encode(value)
        if kind == "F":
            _check_gradients(value, encoded[0])
        while not self._is_called_off():
            try:
                put(box, self.epoch, worker, self._tag(slot), encoded, _SLICE_S)
                return
            except RuntimeError as error:
                if not timed_out(error):
                    raise _failure_of(worker, error) from None
        raise AbortedError

    def _tag(self, slot: Slot) -> str:
        return f"{self.number}{slot}"


def _check_gradients(packet: Any, tensors: list[torch.Tensor]) -> None:
    """Raise TypeError if a tensor that wants a gradient is in an object that hides it: its gradient would be lost."""
    if any(one.requires_grad for one in tensors):
        leaves, _ = flatten(packet)
        hiding = {type(one).__name__ for one in leaves if not isinstance(one, torch.Tensor) and _hides(one)}
        raise TypeError(
            f"the stage returns a tensor that wants a gradient inside a {' or '.join(sorted(hiding))}, from which no "
            f"gradient can come back: return tensors alone, or in tuples, lists, dicts or dataclasses, or detach() it"
        )


def _hides(value: Any) -> bool:
    return any(one.requires_grad for one in encode((value,))[0])


def _failure_of(worker: str, error: RuntimeError) -> Exception:
    """Return the error of an exchange. If a value cannot be sent to any worker, the stage that made it must fail."""
    if isinstance(error, EpochEnded):
        return AbortedError()
    return LostPeerError(f"{worker}: {error}") if was_lost(error) else error


def _has_device_map(worker: str) -> bool:
    """Tell whether this worker may send tensors on devices to that worker. If not, it sends copies on the CPU."""
    return bool(_get_current_rpc_agent()._get_device_map(rpc.get_worker_info(worker)))
