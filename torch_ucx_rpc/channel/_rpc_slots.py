"""Values of channels that travel in calls, for backends other than UCX. The interface is that of the agent's own
slots."""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import NamedTuple

import torch
from torch._C._distributed_rpc import get_rpc_timeout
from torch.distributed import rpc

from torch_ucx_rpc._workers.life import PerLife
from torch_ucx_rpc.errors import CallTimedOut, EpochEnded

Key = tuple[int, str, str]  # epoch, source, tag


class _Value(NamedTuple):
    tensors: list[torch.Tensor]
    is_single: bool
    # None once the value has been taken; otherwise the reason why it was dropped.
    taken: torch.futures.Future[str | None]


class RpcSlots:
    """The values of one life of this worker, by group. Thread-safe.

    A value's sender has a call open until the value is taken. That call carries the errors, and bounds the waiting
    values here. It ends after ``rpc_timeout``: the value may never be taken, and torch's shutdown waits for the call.
    """

    # Bytes that a sender may have under way to one worker before `put` blocks.
    LENT_BYTES = 256 * 1024 * 1024
    # `put` copies a value up to this size, so that the sender may change it at once.
    COPIED_BYTES = 32 * 1024

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        # The condition guards these:
        self._epochs: dict[str, int] = {}
        # Earliest epochs, by prefix of the groups' names.
        self._floors: dict[str, int] = {}
        # Last epochs of closed groups. This worker refuses values of these epochs. Otherwise their senders' calls would
        # stay open until they time out.
        self._closed: dict[str, int] = {}
        self._values: dict[str, dict[Key, deque[_Value]]] = {}
        self._lent: dict[str, int] = {}
        self._refused: dict[tuple[str, int, str], str] = {}

    def advance(self, group: str, epoch: int) -> None:
        with self._changed:
            if (now := self._epochs.get(group, 0)) > epoch:
                raise ValueError(f"channel {group!r} is in epoch {now} on this worker; it cannot go back to {epoch}")
            self._epochs[group] = epoch
            self._closed.pop(group, None)
            dropped = self._take_before(group, epoch)
            self._changed.notify_all()
        for value in dropped:
            value.taken.set_result(_where(group, epoch, self._name))

    def advance_all(self, prefix: str, epoch: int) -> None:
        with self._changed:
            self._floors[prefix] = epoch
            for group in self._epochs:
                if group.startswith(prefix):
                    self._epochs[group] = max(self._epochs[group], epoch)
            groups = [group for group in self._values if group.startswith(prefix)]
            dropped = [(group, value) for group in groups for value in self._take_before(group, epoch)]
            self._changed.notify_all()
        for group, value in dropped:
            value.taken.set_result(_where(group, epoch, self._name))

    def close(self, group: str) -> None:
        with self._changed:
            if (epoch := self._epochs.pop(group, None)) is not None:
                self._closed[group] = epoch
            dropped = list(self._values.pop(group, {}).values())
            # If all workers open the group again, it may begin with an earlier epoch.
            self._refused = {key: why for key, why in self._refused.items() if key[0] != group}
            self._changed.notify_all()
        for value in (value for queue in dropped for value in queue):
            value.taken.set_result(_closed(group, self._name))

    def put(
        self,
        group: str,
        epoch: int,
        to: str,
        tag: str,
        tensors: list[torch.Tensor],
        is_single: bool,
        timeout: float | None,
    ) -> _Sent:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        timeout, deadline = _limit(timeout)
        if is_copied := size <= self.COPIED_BYTES:
            tensors = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
        with self._changed:
            self._check(group, epoch)
            if (refused := self._refused.get((group, epoch, to))) is not None:
                raise EpochEnded(refused, name=to, group=group)
            while (lent := self._lent.get(to, 0)) and lent + size > self.LENT_BYTES:
                if not self._wait(deadline):
                    raise CallTimedOut(
                        f"tag {tag!r} of channel {group!r} could not be put: worker {to!r} has not taken {lent} bytes",
                        name=to,
                        timeout=timeout,
                    )
        sent = rpc.rpc_async(to, _arrive, (group, epoch, tag, self._name, tensors, is_single))
        with self._changed:
            self._lent[to] = self._lent.get(to, 0) + size
        sent.add_done_callback(lambda done: self._end(done, group, epoch, to, size))
        return _Sent(sent, is_copied)

    def post(
        self,
        group: str,
        epoch: int,
        source: str,
        tag: str,
        into: list[torch.Tensor] | None,
        is_single: bool,
    ) -> _Posted:
        return _Posted(self, group, (epoch, source, tag), into, is_single)

    def arrive(self, group: str, key: Key, value: _Value) -> None:
        with self._changed:
            floors = [floor for prefix, floor in self._floors.items() if group.startswith(prefix)]
            now, closed = max(self._epochs.get(group, 0), *floors, 0), self._closed.get(group, -1)
            if key[0] >= now and key[0] > closed:
                self._values.setdefault(group, {}).setdefault(key, deque()).append(value)
                self._changed.notify_all()
                return
        value.taken.set_result(_where(group, now, self._name) if key[0] < now else _closed(group, self._name))

    def take(self, group: str, key: Key, timeout: float | None) -> _Value:
        timeout, deadline = _limit(timeout)
        epoch, source, tag = key
        with self._changed:
            while not (queue := self._values.get(group, {}).get(key)):
                self._check(group, epoch)
                if not self._wait(deadline):
                    raise CallTimedOut(
                        f"no value has come from worker {source!r} under tag {tag!r} of channel {group!r}",
                        name=source,
                        timeout=timeout,
                    )
            value = queue.popleft()
            if not queue:
                del self._values[group][key]
        value.taken.set_result(None)
        return value

    def _check(self, group: str, epoch: int) -> None:
        """Raise EpochEnded if the group is closed here, or in a later epoch. The caller holds the condition."""
        if group not in self._epochs:
            raise EpochEnded(f"channel {group!r} has been closed on this worker", group=group)
        if (now := self._epochs[group]) > epoch:
            raise EpochEnded(_where(group, now, self._name), group=group, epoch=now)

    def _take_before(self, group: str, epoch: int) -> list[_Value]:
        """Take out the values of earlier epochs. The caller holds the condition."""
        values = self._values.get(group, {})
        return [value for key in list(values) if key[0] < epoch for value in values.pop(key)]

    def _wait(self, deadline: float | None) -> bool:
        # Condition.wait without a limit does not see Ctrl-C on every platform.
        left = 0.1 if deadline is None else min(0.1, deadline - time.monotonic())
        if left <= 0:
            return False
        self._changed.wait(left)
        return True

    def _end(self, sent: torch.futures.Future[str | None], group: str, epoch: int, to: str, size: int) -> None:
        why = None
        with contextlib.suppress(RuntimeError):
            why = sent.value()
        with self._changed:
            self._lent[to] -= size
            if why is not None:
                self._refused[group, epoch, to] = why
            self._changed.notify_all()


class _Sent:
    def __init__(self, sent: torch.futures.Future[str | None], is_copied: bool) -> None:
        self._sent = sent
        self._is_copied = is_copied

    def wait(self) -> None:
        if self._is_copied and not self._sent.done():
            return
        if (why := self._sent.wait()) is not None:
            raise EpochEnded(why)


class _Posted:
    def __init__(self, slots: RpcSlots, group: str, key: Key, into: list[torch.Tensor] | None, is_single: bool) -> None:
        self._slots = slots
        self._group = group
        self._key = key
        self._into = into
        self._is_single = is_single
        self._is_taken = False

    def wait(self, timeout: float | None = None) -> torch.Tensor | list[torch.Tensor]:
        if self._is_taken:
            _, source, tag = self._key
            raise RuntimeError(
                f"the value under tag {tag!r} from worker {source!r} has been taken: wait() returns it once"
            )
        value = self._slots.take(self._group, self._key, timeout)
        self._is_taken = True
        tensors, is_single = value.tensors, value.is_single
        if self._into is not None:
            _check_fit(tensors, self._into, self._key)
            with torch.no_grad():
                for target, tensor in zip(self._into, tensors, strict=True):
                    target.copy_(tensor)
            tensors, is_single = self._into, self._is_single
        return tensors[0] if is_single else tensors


def _check_fit(value: list[torch.Tensor], into: list[torch.Tensor], key: Key) -> None:
    def describe(tensors: list[torch.Tensor]) -> str:
        return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors) or "no tensors"

    if [(tensor.shape, tensor.dtype) for tensor in value] != [(tensor.shape, tensor.dtype) for tensor in into]:
        _, source, tag = key
        raise ValueError(
            f"the value under tag {tag!r} from worker {source!r} does not fit the tensors that were posted for it: "
            f"got {describe(value)}; expected {describe(into)}"
        )


def _where(group: str, epoch: int, name: str) -> str:
    return f"worker {name!r} is in epoch {epoch} of channel {group!r}"


def _closed(group: str, name: str) -> str:
    return f"worker {name!r} has closed channel {group!r}"


def _limit(timeout: float | None) -> tuple[float, float | None]:
    """The timeout in seconds, and the time at which it ends."""
    seconds: float = get_rpc_timeout() if timeout is None else timeout
    return seconds, None if seconds == 0 else time.monotonic() + seconds


# The values of this process.
rpc_slots = PerLife(lambda life: RpcSlots(life.info.name))


@rpc.functions.async_execution
def _arrive(
    group: str, epoch: int, tag: str, source: str, tensors: list[torch.Tensor], is_single: bool
) -> torch.futures.Future[str | None]:
    taken: torch.futures.Future[str | None] = torch.futures.Future()
    rpc_slots().arrive(group, (epoch, source, tag), _Value(tensors, is_single, taken))
    return taken
