"""torch's own barrier in a graceful shutdown. Alone it waits until its timeout for a worker that is lost meanwhile."""

# mypy: allow-untyped-calls

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.distributed.rpc import api

from torch_ucx_rpc._observe.lost import Gone, ended, subscribe

_PERIOD_S = 0.01
# A worker that proceeds refuses what comes later from others, perhaps before these have seen the loss themselves.
_NEWS_S = 1.0


def wait(agent: Any, torchs: Callable[[float], None], timeout: float) -> None:
    """Call ``torchs``, torch's ``_wait_all_workers``.

    Raises BarrierFailed, which names the lost worker, at once if one is lost meanwhile.
    """
    is_lost, is_over = threading.Event(), threading.Event()

    def proceed() -> None:
        # Again and again, since torch may be about to make the signal that it will wait for.
        while not is_over.wait(_PERIOD_S):
            for states in list(api._all_gather_sequence_id_to_states.values()):
                states.proceed_signal.set()

    def on_gone(gone: Gone) -> None:
        if gone.failed and not is_lost.is_set():
            is_lost.set()
            threading.Thread(target=proceed, name="torch_ucx_rpc_proceed", daemon=True).start()

    unsubscribe = subscribe(on_gone)
    try:
        for gone in ended():
            on_gone(gone)
        torchs(timeout)
    except (RuntimeError, AssertionError) as error:
        if not is_lost.wait(_NEWS_S if isinstance(error, AssertionError) else 0):
            raise
    finally:
        is_over.set()
        unsubscribe()
    if is_lost.is_set():
        agent._barrier(timeout)
