"""torch's own barrier in a graceful shutdown. Alone it waits until its timeout for a worker that is lost meanwhile."""

# mypy: allow-untyped-calls

from __future__ import annotations

import threading

from torch.distributed.rpc import api

from torch_ucx_rpc._observe.lost import Gone, ended, subscribe

_PERIOD_S = 0.01
# How long the news of a loss may take after a call has failed by it, here or at a worker that has proceeded.
_NEWS_S = 1.0


def wait(timeout: float) -> None:
    """Do what torch's ``_wait_all_workers`` does, and return early if a worker is lost meanwhile.

    The loss is no error here: the agent's own barrier, which follows in ``join``, names the lost workers. Hence torch's
    function itself, which would log the error, is not called.
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
        api._all_gather(None, timeout=timeout)
    except (RuntimeError, AssertionError):
        # The failed call may be known here before the loss.
        if not is_lost.wait(_NEWS_S):
            raise
    finally:
        is_over.set()
        unsubscribe()
