"""Trainers that wait for another one's model: `Asking`."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from torch.futures import Future

from torch_ucx_rpc.reduction._messages import Trainer


class Request(NamedTuple):
    """A trainer's, and the state for it, or None if it has to ask another one."""

    trainer: Trainer
    # Of the trainer's requests.
    number: int
    state: Future[dict[str, Any] | None]


class Asking:
    """The trainers that have asked for a model, until it is given at the beginning of a step, or there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Request] = []
        self._is_refused = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        with self._lock:
            if not self._is_refused:
                self._waiting.append(request)
                return
        request.state.set_result(None)

    def take(self) -> list[Request]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting

    def turn_away(self) -> None:
        """Send all of them to another trainer."""
        for request in self.take():
            request.state.set_result(None)

    def refuse(self) -> None:
        """Send all of them to another trainer, and all that come later."""
        with self._lock:
            self._is_refused = True
        self.turn_away()
