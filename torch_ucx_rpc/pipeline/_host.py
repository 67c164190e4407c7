"""A worker of a pipeline: a box for the driver's orders, and the thread that carries them out (`Host`).

A message of the driver holds one or more orders, and ends in one outcome: ``("ok", result)`` of the last order,
``("error", failure)``, ``("lost", worker)`` or ``("aborted",)``. The thread takes messages by their number, and all
computation of the stages runs on it. ``cut``, on a thread of RPC, ends the epoch: see `_crew`.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from typing import Any, NamedTuple

import torch
import torch.distributed.rpc as rpc

from torch_ucx_rpc._workers.life import PerLife
from torch_ucx_rpc._workers.lost import Gone, ended
from torch_ucx_rpc.errors import EpochEnded
from torch_ucx_rpc.pipeline._exchange import (
    AbortedError,
    Box,
    Exchange,
    LostPeerError,
    close_to_send,
    decode,
    encode,
    open_to_send,
    put,
)
from torch_ucx_rpc.pipeline._messages import Failure, HostConfig
from torch_ucx_rpc.pipeline._run import failure_of
from torch_ucx_rpc.pipeline._stages import Stages

__all__ = ["Cut", "Host", "close", "create", "cut", "find", "hosts_here", "prepare", "progress"]

Outcome = tuple[Any, ...]


class Cut(NamedTuple):
    """The end of an epoch: neither messages from number ``at`` on nor kept orders are carried out in it."""

    epoch: int
    """The next epoch."""
    at: int
    spoils: bool


class Host:
    """The stages of one pipeline on this worker. Stages and exchange belong to the host's thread."""

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._box = Box(config.host, config.epoch)
        open_to_send(config.driver_box)
        self.exchange = Exchange(self._box, torch.device(config.device), config.routes, self._is_called_off)
        self.stages: Stages
        self._lock = threading.Lock()
        # Guarded by the lock: the epoch, the number of the present or next message, and the end of the epoch once it is
        # known.
        self._epoch = config.epoch
        self._number = 0
        self._cut: Cut | None = None
        # The message that has failed in this epoch: the epoch, its number, its outcome.
        self._failure: tuple[int, int, Outcome] | None = None
        self._is_idle = True
        self._is_closed = False
        self._made: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"pipeline {config.host}", daemon=True)

    def start(self) -> None:
        """Start the thread. Raises the error with which making the stages fails."""
        self._thread.start()
        if (error := self._made.get()) is not None:
            raise error
        _watch()
        if any(self.is_driven_by(gone) for gone in ended()):
            close(self._config.host)

    # ------------------------------------------------------------------------------------------- for other threads

    def cut(self, cut: Cut) -> None:
        """End this epoch at a message. A later call may lower the number."""
        with self._lock:
            if cut.epoch <= self._epoch:
                return
            if self._cut is None or cut.at < self._cut.at:
                self._cut = cut
            self._end_if_reached()

    def close(self) -> None:
        """Free the stages as soon as the thread is between two actions."""
        self._is_closed = True
        self._box.close()

    def progress(self) -> str:
        """State of the thread: "idle", "waiting" for another stage, or "busy"."""
        self.tell()
        return "idle" if self._is_idle else "waiting" if self.exchange.is_waiting else "busy"

    def tell(self) -> None:
        """Tell the driver of the message that has failed here, if one has."""
        if (failure := self._failure) is not None:
            epoch, number, outcome = failure
            arguments = (self._config.driver_box, epoch, number, self._config.host, outcome)
            rpc.rpc_async(self._config.driver, self._config.tell, arguments, timeout=0)

    def is_driven_by(self, gone: Gone) -> bool:
        return gone.session == self._config.driver_session

    # -------------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        # A new thread adopts the number of torch.set_num_threads when it asks for it.
        torch.get_num_threads()
        try:
            self.stages = Stages(self._config, self.exchange)
        except Exception as error:
            self._stop_sending()
            self._made.put(error)
            return
        self._made.put(None)
        try:
            while not self._is_closed:
                try:
                    self._carry_out_next()
                except (EpochEnded, AbortedError):
                    self._begin_epoch()
        except RuntimeError:
            # The driver is gone, or RPC has been shut down.
            close(self._config.host)
        finally:
            self._stop_sending()
            self.stages.clear()

    def _stop_sending(self) -> None:
        with contextlib.suppress(RuntimeError):  # RPC has been shut down
            self.exchange.close()
            close_to_send(self._config.driver_box)

    def _carry_out_next(self) -> None:
        epoch, number = self._epoch, self._number
        message = self._box.take(epoch, self._config.driver, str(number))
        self._is_idle = False
        self.exchange.begin(number, epoch)
        is_answered, outcome = self._carry_out(message)
        self._is_idle = True
        # Drop the message before its outcome leaves: this thread may then be idle for long.
        del message
        if is_answered:
            outcome = self._answer(epoch, str(number), outcome)
        if outcome[0] != "ok":
            # The driver may wait for another worker, which waits for this one.
            self._failure = epoch, number, outcome
            self.tell()
        with self._lock:
            self._number += 1
            self._end_if_reached()
        if outcome[0] != "ok":
            # The driver ends the epoch at this message.
            raise AbortedError

    def _carry_out(self, message: Any) -> tuple[bool, Outcome]:
        """Return whether the driver waits for the outcome, and the outcome."""
        try:
            is_answered, orders = decode(message)
        except Exception as error:
            text = (
                "it could not take the order. What goes to a worker must be of modules that can be imported there: "
                f"{type(error).__name__}: {error}"
            )
            return True, ("error", Failure(text, ""))
        result: Any = None
        try:
            while orders:
                name, payload = orders.pop(0)
                result = getattr(self.stages, f"order_{name}")(payload)
        except AbortedError:
            raise
        except LostPeerError as lost:
            return is_answered, ("lost", str(lost))
        except BaseException as error:
            return is_answered, ("error", failure_of(error))
        return is_answered, ("ok", result)

    def _answer(self, epoch: int, tag: str, outcome: Outcome) -> Outcome:
        """Send an outcome, or the error with which pickling it fails. Returns the sent outcome."""
        try:
            encoded = encode(outcome)
        except Exception as error:
            outcome = "error", Failure(f"its answer cannot be pickled: {type(error).__name__}: {error}", "")
            encoded = encode(outcome)
        with contextlib.suppress(EpochEnded):
            put(self._config.driver_box, epoch, self._config.driver, f"{self._config.host} {tag}", encoded, 0)
        return outcome

    def _is_called_off(self) -> bool:
        return self._is_closed or (self._cut is not None and self._number >= self._cut.at)

    def _end_if_reached(self) -> None:
        """Advance the box if this epoch is over, which ends the thread's waits there. The caller holds the lock."""
        if self._cut is not None and self._number >= self._cut.at:
            self._box.advance(self._cut.epoch)

    def _begin_epoch(self) -> None:
        self._is_idle = True
        with contextlib.suppress(EpochEnded):
            # This host, or another one, may know of the end before its cut has come.
            self._box.take(self._epoch, self._config.driver, "end")
        with self._lock:
            ended, self._cut = self._cut, None
            if ended is None or self._is_closed:
                return
            epoch, number = self._epoch, self._number
            self._epoch, self._number = ended.epoch, 0
            self._box.advance(ended.epoch)
        self._failure = None
        self.exchange.clear()
        self.stages.end_epoch(ended.at, ended.spoils)
        self._answer(epoch, str(number), ("aborted",))
        self._answer(ended.epoch, "begins", ("ok", None))


# ------------------------------------------------------------------------------------------ what other workers call

_changing = threading.Lock()
_hosts: dict[str, Host] = {}


def _close_of(gone: Gone) -> None:
    for name, host in list(_hosts.items()):
        if host.is_driven_by(gone):
            close(name)


# Set once in each life of this worker: the end of a driver closes its stages.
_watch = PerLife(lambda life: life.watch(_close_of))


def hosts_here() -> list[Host]:
    """All hosts on this worker."""
    return list(_hosts.values())


def find(host: str) -> Stages:
    """The stages of a host on this worker; for checkpoints."""
    return _hosts[host].stages


def prepare() -> None:
    """Import the modules that stages and checkpoints need, so that a spare can start quickly."""
    import torch.distributed.checkpoint  # noqa: F401

    import torch_ucx_rpc.checkpoint  # noqa: F401


def create(config: HostConfig) -> Outcome:
    """Make the stages of a pipeline on this worker. Returns a description of them for the driver, or the failure."""
    host = Host(config)
    with _changing:
        _hosts[config.host] = host
    try:
        host.start()
    except Exception as error:
        close(config.host)
        return "error", f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    return "ok", {
        index: [(name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in stage.named_parameters()]
        for index, stage in host.stages.by_index.items()
    }


def cut(host: str, cut: Cut) -> None:
    """End the epoch of a host. See `Host.cut`."""
    if (found := _hosts.get(host)) is not None:
        found.cut(cut)


def progress(host: str, cut: Cut | None) -> str:
    """Return the state of a host; "closed" if there is none. It gets the ``cut``, if there is one."""
    if (found := _hosts.get(host)) is None:
        return "closed"
    if cut is not None:
        found.cut(cut)
    return found.progress()


def close(host: str) -> None:
    """Free a pipeline's stages."""
    with _changing:
        found = _hosts.pop(host, None)
    if found is not None:
        with contextlib.suppress(RuntimeError):  # RPC has been shut down
            found.close()
