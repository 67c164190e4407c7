"""`Channel`, and the values that it sends and expects."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from torch_ucx_rpc._arguments import check_int, check_timeout, check_type, wrong_type, wrong_value
from torch_ucx_rpc._native import _C
from torch_ucx_rpc._workers.life import PerLife
from torch_ucx_rpc.channel._rpc_slots import rpc_slots

Value = torch.Tensor | list[torch.Tensor]


class Sent(Protocol):
    """A value on its way, as `Channel.put` returns it."""

    def wait(self) -> None:
        """Return when the tensors may be changed: they have been copied, or the receiver has them.

        Raises WorkerLost, WorkerLeft or ShutDown if a large value cannot reach the receiver, and MessageNotSent or
        OutOfResources if it cannot be sent. If the receiver is in a later epoch, a later `Channel.put` raises
        EpochEnded; on other backends than UCX so may this.
        """


class Posted:
    """A value that this worker expects, as `Channel.post` returns it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self, timeout: float | None = None) -> Value:
        """Return the value as it was put: a tensor, or a list of tensors.

        If tensors were posted, they receive the value, and this returns them. Call it once, or again after
        CallTimedOut. Once the value has been taken, this raises RuntimeError.

        Args:
            timeout (float | None): limit in seconds (default: None, the agent's ``rpc_timeout``). 0 means no limit.

        Raises the errors of `Channel.take`. Raises ValueError if the value has other shapes or dtypes than the posted
        tensors.
        """
        _check_timeout(timeout)
        value: Value = self._value.wait(timeout)
        return value


class Channel:
    """The values of one group of workers, in one epoch at a time. Thread-safe.

    Channels of the same group in one process share their values. The end of RPC closes them all.

    Args:
        group (str): a name for all workers that exchange these values.
        epoch (int): a number that counts up, from 0 to 2**63 - 1 (default: 0). Workers exchange values only in the same
            epoch. If this process has the group in an earlier epoch, the group goes to this one, as with `advance`.

    Raises ValueError if this process has the group in a later epoch, and NotRunning before ``init_rpc``.
    """

    def __init__(self, group: str, *, epoch: int = 0) -> None:
        check_type("group", str, "a str", group)
        _check_epoch(epoch)
        self._group = group
        self._slots = slots()
        self._epoch = epoch
        self._slots.advance(group, epoch)

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._group

    @property
    def epoch(self) -> int:
        """The epoch in which this channel puts and takes values."""
        return self._epoch

    def put(
        self, to: str, tag: str, value: torch.Tensor | Sequence[torch.Tensor], *, timeout: float | None = None
    ) -> Sent:
        """Send a value to the worker ``to``, where it waits under ``tag``.

        Two values under one tag may overtake each other, so give each value its own tag. Do not change a large tensor
        until ``wait`` of the result has returned, or the receiver has confirmed that it has the value. `put` copies a
        CPU tensor up to 32 KiB at once.

        The call blocks while the receiver has not taken 8 MiB of this worker's small tensors, or not fetched 256 MiB of
        its large ones.

        Args:
            to (str): name of the receiver; it may be this worker.
            tag (str): where the value waits. You may use a tag again when the receiver has taken its value.
            value (Tensor or list): a tensor, or a list of tensors.
            timeout (float | None): limit of the blocking in seconds (default: None, the agent's ``rpc_timeout``). 0
                means no limit.

        Raises:
            EpochEnded: the receiver has refused an earlier value, since it is in a later epoch of the group. Or this
                process has advanced the group, or closed it.
            CallTimedOut: the receiver has not made room in time.
            WorkerLost, WorkerLeft, UnknownWorker: there is no such receiver (any more).
            ShutDown: RPC has been shut down on this worker.
            RuntimeError: a tensor cannot be sent, such as one on a device without a device map.

        On other backends than UCX, ``wait`` of the result may raise these errors instead.
        """
        _check_worker("to", to)
        check_type("tag", str, "a str", tag)
        is_single = isinstance(value, torch.Tensor)
        tensors = _tensors(value, "value")
        _check_timeout(timeout)
        return self._slots.put(self._group, self._epoch, to, tag, tensors, is_single, timeout)

    def take(self, source: str, tag: str, *, timeout: float | None = None) -> Value:
        """Wait for the value under ``tag`` from the worker ``source``, and return it as it was put.

        Args:
            source (str): name of the sender.
            tag (str): the tag that it was put under.
            timeout (float | None): limit in seconds (default: None, the agent's ``rpc_timeout``). 0 means no limit.

        Raises:
            CallTimedOut: no value has come in time. The message names the tag and the sender.
            EpochEnded: this process has advanced the group, or closed it.
            WorkerLost, WorkerLeft, UnknownWorker: the sender has gone before the value came, or there is no such
                worker. Raised only with UCX.
            ShutDown: RPC has been shut down on this worker. Raised only with UCX.
        """
        _check_timeout(timeout)
        value: Value = self._post(source, tag, None).wait(timeout)
        return value

    def take_into(
        self,
        source: str,
        tag: str,
        into: torch.Tensor | Sequence[torch.Tensor],
        *,
        timeout: float | None = None,
    ) -> None:
        """Wait for a value, and receive it in these tensors.

        ``source``, ``tag`` and ``timeout`` are as in `take`, and ``into`` as in `post`. Raises the errors of
        `Posted.wait`.
        """
        _check_timeout(timeout)
        self._post(source, tag, _tensors(into, "into")).wait(timeout)

    def post(self, source: str, tag: str, into: torch.Tensor | Sequence[torch.Tensor] | None = None) -> Posted:
        """Announce that this worker expects a value, before it comes. The value then travels while this worker does
        other work.

        Args:
            source (str): name of the sender.
            tag (str): the tag that it is put under.
            into (Tensor, list or None): tensors that receive the value, of its shapes and dtypes (default: None, new
                memory). A large value goes into them without a copy if they are contiguous and on the CPU.

        After EpochEnded the tensors do not change any more; after CallTimedOut or WorkerLost they may still change.

        Returns a `Posted`, whose ``wait`` returns the value. One value serves one `post`. With UCX this raises
        EpochEnded and UnknownWorker, like `take`; ``wait`` raises the other errors.
        """
        return Posted(self._post(source, tag, into))

    def _post(self, source: str, tag: str, into: torch.Tensor | Sequence[torch.Tensor] | None) -> Any:
        _check_worker("source", source)
        check_type("tag", str, "a str", tag)
        is_single = isinstance(into, torch.Tensor)
        tensors = None if into is None else _tensors(into, "into")
        return self._slots.post(self._group, self._epoch, source, tag, tensors, is_single)

    def advance(self, epoch: int) -> None:
        """Go to a later epoch: drop the values of earlier ones, and end waits for them with EpochEnded.

        Other channels of the group in this process keep their epoch, and raise EpochEnded as after `close`. Raises
        ValueError if this process has the group in a later epoch.
        """
        _check_epoch(epoch)
        self._slots.advance(self._group, epoch)
        self._epoch = epoch

    def close(self) -> None:
        """Drop all values of the group, and end waits for them with EpochEnded.

        A new `Channel`, or `advance`, opens the group again. Until then `put` and `take` raise EpochEnded.

        Values that come later wait for that, and count toward the bounds of `put`. So close a group when its last value
        has been taken. On other backends than UCX such values are refused, if their epoch is not later than the last
        one here. So open the group again in a later epoch.
        """
        self._slots.close(self._group)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._group!r}, epoch={self._epoch})"


# The values of this process. On UCX the agent holds them, and on another backend calls carry them.
slots = PerLife(lambda life: _C.channel_of(life.agent) if life.tells_ends else rpc_slots())


def advance_all(prefix: str, epoch: int) -> None:
    """Drop the values of earlier epochs of all groups whose names begin with ``prefix``, and end waits for them.

    The process also drops such values if they arrive later, even for a group that is not open here yet.
    """
    slots().advance_all(prefix, epoch)


def _check_worker(argument: str, value: object) -> None:
    check_type(argument, str, "the name of a worker (str)", value)


def _check_timeout(timeout: object) -> None:
    if timeout is not None:
        check_timeout(timeout)


def _check_epoch(epoch: int) -> None:
    if not 0 <= check_int("epoch", "an int", epoch) < 2**63:
        raise wrong_value("epoch", "from 0 to 2**63 - 1", epoch)


def _tensors(value: object, name: str) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, torch.Tensor) for item in value):
        raise wrong_type(name, "a tensor or a list of tensors", value)
    return list(value)
