"""Trainers that wait for another one's model: `Asking`."""

# mypy: allow-untyped-calls

from __future__ import annotations

import math
import threading
import time
from typing import Any, NamedTuple

from torch._C._distributed_rpc import get_rpc_timeout
from torch.futures import Future

from torch_ucx_rpc.reduction._messages import Trainer


class Request(NamedTuple):
    """A trainer's, and the state for it, or None if it has to ask another one. It gives up at some time."""

    trainer: Trainer
    state: Future[dict[str, Any] | None]
    gives_up_at: float


class Asking:
    """The trainers that have asked for a model, until it is given at the beginning of a step, or there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Request] = []
        self._is_refused = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, trainer: Trainer, state: Future[dict[str, Any] | None]) -> None:
        with self._lock:
            if not self._is_refused:
                self._waiting.append(Request(trainer, state, time.monotonic() + (get_rpc_timeout() or math.inf)))
                return
        state.set_result(None)

    def take(self) -> list[Request]:
        """Those that have not given up: all others would wait in vain for a trainer that has."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        now = time.monotonic()
        for request in waiting:
            if now >= request.gives_up_at:
                request.state.set_result(None)
        return [request for request in waiting if now < request.gives_up_at]

    def turn_away(self) -> None:
        """Send all of them to another trainer."""
        for request in self.take():
            request.state.set_result(None)

    def refuse(self) -> None:
        """Send all of them to another trainer, and all that come later."""
        with self._lock:
            self._is_refused = True
        self.turn_away()
