"""Trainers that wait for another one's model: `Asking`."""

# mypy: allow-untyped-calls

from __future__ import annotations

import threading
from typing import Any

from torch.futures import Future

from torch_ucx_rpc.reduction._messages import Trainer


class Asking:
    """The trainers that have asked for a model, until it is given at the beginning of a step, or there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Trainer, Future[dict[str, Any] | None]]] = []
        self._is_refused = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, trainer: Trainer, future: Future[dict[str, Any] | None]) -> None:
        with self._lock:
            if not self._is_refused:
                self._waiting.append((trainer, future))
                return
        future.set_result(None)

    def take(self) -> list[tuple[Trainer, Future[dict[str, Any] | None]]]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting

    def turn_away(self) -> None:
        """Send all of them to another trainer."""
        for _, future in self.take():
            future.set_result(None)

    def refuse(self) -> None:
        """Send all of them to another trainer, and all that come later."""
        with self._lock:
            self._is_refused = True
        self.turn_away()
