"""How a worker tells all others of what it has changed: `Announcer`."""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import WorkerInfo
from torch.futures import Future

from torch_ucx_rpc._workers.life import Life
from torch_ucx_rpc._workers.lost import was_lost
from torch_ucx_rpc.services._table import Change

_logger = logging.getLogger(__name__)

# For the others to hear of a change. One that does not is told again, and is not waited for: it asks when it misses
# the name.
_HEARING_S = 2.0
_PAUSE_S = 0.005


class Announcer:
    """Tells others of the changes of one life of this worker. Any thread may use it.

    Args:
        hear: what is called there with a change.
        everything: all that this worker offers, for those that may have missed a change.
    """

    def __init__(self, life: Life, hear: Callable[[Change], None], everything: Callable[[], Change]) -> None:
        self._life = life
        self._hear = hear
        self._everything = everything

    def announce(self, change: Change, told: str) -> None:
        """Tell all others but the decider, and wait until they have heard: but for those who hang."""
        known = (self._life.info.name, told)
        calls = [self._tell(info, change) for info in self._life.living() if info.name not in known]
        for call in calls:
            # What becomes of one that has failed, its callback sees to.
            with contextlib.suppress(RuntimeError):
                if call is not None:
                    call.wait()

    def announce_all(self) -> None:
        """Tell all others all that this worker offers, and wait for nobody."""
        if not self._life.is_over():
            for info in self._life.living():
                if info.name != self._life.info.name:
                    self._tell(info, self._everything())

    def _tell(self, info: WorkerInfo, change: Change) -> Future[None] | None:
        """Have another worker hear of a change. One that is too busy is told again, all of it, until it has heard."""
        try:
            call: Future[None] = rpc.rpc_async(info, self._hear, args=(change,), timeout=_HEARING_S)
        except RuntimeError as error:
            _logger.debug("%s was not told of a change, since it or this worker ends: %s", info.name, error)
            return None
        call.add_done_callback(lambda done: self._tell_again(info, done))
        return call

    def _tell_again(self, info: WorkerInfo, told: Future[None]) -> None:
        try:
            told.value()
            return
        except RuntimeError as error:
            _logger.debug("%s has not heard of a change: %s", info.name, error)
            if was_lost(error):
                return

        def tell() -> None:
            if not self._life.is_over() and info.name in {other.name for other in self._life.living()}:
                self._tell(info, self._everything())

        timer = threading.Timer(_PAUSE_S, tell)
        timer.daemon = True
        timer.start()
