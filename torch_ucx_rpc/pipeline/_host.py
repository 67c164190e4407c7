"""A worker of a pipeline: a box for the driver's orders, and the thread that carries them out (`Host`).

A message of the driver holds one or more orders. The thread takes messages by their number, and all computation of the
stages runs on it. The result of the last order goes into the driver's box, if the driver waits for it. A failure goes
to the driver by RPC, and again with the answer to each question, since the driver may wait for another host. The host
then waits until `cut`, on a thread of RPC, ends the epoch: see `_crew`.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import threading
import traceback
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed.rpc as rpc

from torch_ucx_rpc._threads import Thread
from torch_ucx_rpc._workers.life import PerLife
from torch_ucx_rpc._workers.lost import Gone, ended
from torch_ucx_rpc.errors import EpochEnded
from torch_ucx_rpc.pipeline._exchange import (
    AbortedError,
    Box,
    Exchange,
    decode,
    encode,
    open_to_send,
    put,
)
from torch_ucx_rpc.pipeline._run import Failure, failure_of
from torch_ucx_rpc.pipeline._stages import HostConfig, Stages
from torch_ucx_rpc.pipeline._state import part_of

__all__ = ["Cut", "Host", "apply", "close", "collect", "create", "cut", "prepare", "progress", "room"]


class Cut(NamedTuple):
    """The end of an epoch: in this epoch, hosts carry out only messages with numbers below ``at``."""

    epoch: int
    """The next epoch."""
    at: int


class Host:
    """The stages of one pipeline on this worker. Stages and exchange belong to the host's thread."""

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._box = Box(config.host, config.epoch)
        open_to_send(config.driver_box)
        # The exchange also has the epoch, and the number of the present or next message. The lock guards changes of
        # both.
        self.exchange = Exchange(self._box, config.device, config.routes, config.epoch, self._is_called_off)
        self.stages: Stages
        self._lock = threading.Lock()
        # The end of the epoch once it is known, and the message that has failed in the epoch. The lock guards changes.
        self._cut: Cut | None = None
        self._failure: Failure | None = None
        self._is_idle = True
        self._is_closed = False
        self._made: Future[None] = Future()

    def start(self) -> None:
        """Start the thread. Raises the stages' error if they cannot be made."""
        Thread(self._work, name=f"pipeline {self._config.host}").start()
        self._made.result()

    # ------------------------------------------------------------------------------------------- for other threads

    def cut(self, cut: Cut) -> None:
        """End this epoch at a numbered message. A later call may lower the number."""
        with self._lock:
            if cut.epoch > self.exchange.epoch and (self._cut is None or cut.at < self._cut.at):
                self._cut = cut
                self._end_if_reached()

    def close(self) -> None:
        """Free the stages as soon as the thread is between two actions."""
        self._is_closed = True
        self._box.close()

    def progress(self) -> str:
        """Return the state of the thread: "idle", "waiting" for another stage, or "busy". Report a failure again."""
        self._tell()
        return "idle" if self._is_idle else "waiting" if self.exchange.is_waiting else "busy"

    def _tell(self) -> None:
        """Report the message that has failed here to the driver, if there is one."""
        if (failure := self._failure) is not None:
            config = self._config
            rpc.rpc_async(config.driver, config.tell, (config.driver_box, config.host, failure), timeout=0)

    def is_driven_by(self, gone: Gone) -> bool:
        return gone.session == self._config.driver_session

    # -------------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        # A new thread adopts the number of torch.set_num_threads only when it asks for the number.
        torch.get_num_threads()
        try:
            # Making the stages computes too, so this thread does it: another one would have an OpenMP team of its own.
            self.stages = Stages(self._config, self.exchange)
        except BaseException as error:
            # A builder may raise SystemExit, which torch does not carry.
            what = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
            self._made.set_exception(what)
            return
        self._made.set_result(None)
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
            self.exchange.clear()
            self.stages.clear()

    def _carry_out_next(self) -> None:
        message = self._box.take(self.exchange.epoch, self._config.driver, str(self.exchange.number))
        self._is_idle = False
        try:
            answer = self._carry_out(message)
        except AbortedError:
            raise
        except BaseException as error:
            with self._lock:
                self._failure = failure_of(error)._replace(epoch=self.exchange.epoch, number=self.exchange.number)
                self._end_if_reached()
            self._tell()
            raise AbortedError from None
        self._is_idle = True
        # Drop the message before its answer leaves: this thread may then be idle for long.
        del message
        if answer is not None:
            self._answer(str(self.exchange.number), answer)
        with self._lock:
            self.exchange.number += 1
            self._end_if_reached()

    def _carry_out(self, message: Any) -> Any:
        """Return the answer for the driver, if it waits for one."""
        self.exchange.clear()
        try:
            is_answered, orders = decode(message)
        except Exception as error:
            raise RuntimeError(
                "it could not unpickle the order. Objects for a worker must come from modules that it can import: "
                f"{type(error).__name__}: {error}"
            ) from None
        result: Any = None
        while orders:
            name, arguments = orders.pop(0)
            result = getattr(self.stages, f"order_{name}")(*arguments)
        try:
            return encode(result) if is_answered else None
        except Exception as error:
            raise RuntimeError(f"its answer cannot be pickled: {type(error).__name__}: {error}") from None

    def _answer(self, tag: str, answer: Any) -> None:
        config = self._config
        with contextlib.suppress(EpochEnded):
            put(config.driver_box, self.exchange.epoch, config.driver, f"{config.host} {tag}", answer, 0)

    def _is_called_off(self) -> bool:
        if self._is_closed:
            return True
        return self._cut is not None and (self._failure is not None or self.exchange.number >= self._cut.at)

    def _end_if_reached(self) -> None:
        """Advance the box if this epoch is over, which ends the thread's waits there. The caller holds the lock."""
        if self._cut is not None and self._is_called_off():
            self._box.advance(self._cut.epoch)

    def _begin_epoch(self) -> None:
        self._is_idle = True
        with contextlib.suppress(EpochEnded):
            # This host, or another one, may know of the end before its cut has come.
            self._box.take(self.exchange.epoch, self._config.driver, "end")
        with self._lock:
            ended, self._cut = self._cut, None
            if ended is None or self._is_closed:
                return
            self.exchange.epoch, self.exchange.number = ended.epoch, 0
            self._failure = None
            self._box.advance(ended.epoch)
        self.exchange.clear()
        self.stages.undo(ended.at)
        self._answer("begins", encode(None))


# ------------------------------------------------------------------------------------------ what other workers call

_hosts: dict[str, Host] = {}


def _close_of(gone: Gone) -> None:
    for name, host in list(_hosts.items()):
        if host.is_driven_by(gone):
            close(name)


# Set once in each life of this worker: the end of a driver closes its stages.
_watch = PerLife(lambda life: life.watch(_close_of))


def collect(host: str, what: tuple[Any, ...]) -> Any:
    """Return a part of a host's state. This function and the next two serve checkpoints."""
    state = part_of(_hosts[host].stages, *what).collect()
    if what == ("gradients",):
        # DCP cannot write a sparse tensor, but pickles a tuple with one. A pickle should not need a device.
        return {name: one if one.layout == torch.strided else (one.cpu(),) for name, one in state.items()}
    return state


def room(host: str, what: tuple[Any, ...], saved: Any) -> Any:
    return part_of(_hosts[host].stages, *what).room(saved)


def apply(host: str, what: tuple[Any, ...], state: dict[str, Any]) -> None:
    part_of(_hosts[host].stages, *what).apply(state)


def prepare() -> None:
    """Import the modules that stages and checkpoints need, so that a spare can start quickly."""
    import torch_ucx_rpc.checkpoint  # noqa: F401


def create(config: HostConfig) -> tuple[Any, str, str]:
    """Make the stages of a pipeline on this worker. Returns a description of them for the driver, or None and the
    failure with its traceback."""
    _watch()
    host = _hosts[config.host] = Host(config)
    try:
        host.start()
    except Exception as error:
        close(config.host)
        return None, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    if any(host.is_driven_by(gone) for gone in ended()):
        close(config.host)
    described = {
        index: [(name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in stage.named_parameters()]
        for index, stage in host.stages.by_index.items()
    }
    return described, "", ""


def cut(host: str, cut: Cut) -> None:
    """End the epoch of a host. See `Host.cut`."""
    if (found := _hosts.get(host)) is not None:
        found.cut(cut)


def progress(host: str, cut: Cut | None) -> str:
    """Return the state of a host; "closed" if the pipeline has no host here. If ``cut`` is given, the host gets it."""
    if (found := _hosts.get(host)) is None:
        return "closed"
    if cut is not None:
        found.cut(cut)
    return found.progress()


def close(host: str) -> None:
    """Free a pipeline's stages."""
    if (found := _hosts.pop(host, None)) is not None:
        with contextlib.suppress(RuntimeError):  # RPC has been shut down
            found.close()
