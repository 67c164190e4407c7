"""Parts of a graceful shutdown in which torch waits for every worker. They end early if a worker is lost."""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.rpc import api

from torch_ucx_rpc._threads import Thread
from torch_ucx_rpc._workers.lost import Gone, ended, subscribe

_PERIOD_S = 0.01
# After a loss has made a call fail, here or on another worker, this worker hears of the loss within this time.
_NEWS_S = 1.0
# All living workers delete their references now. After this time, only dead workers still hold references.
_DELETING_S = 1.0


def wait_all_workers(timeout: float) -> None:
    """Work like torch's ``_wait_all_workers``, but return early if a worker is lost.

    The loss raises nothing here: the agent's own barrier, which follows in ``join``, names the lost workers. So this
    does not call torch's function itself, which would log the error.
    """

    def proceed() -> None:
        for states in list(api._all_gather_sequence_id_to_states.values()):
            states.proceed_signal.set()

    # Call `proceed` again and again, since torch may be about to make the signal that it will wait for.
    with _repeated_after_a_loss(proceed, 0) as is_lost:
        try:
            api._all_gather(None, timeout=timeout)
        except (RuntimeError, AssertionError):
            # This worker may learn of the failed call before the loss.
            if not is_lost.wait(_NEWS_S):
                raise


def delete_rrefs(agent: Any, torchs: Callable[[], None]) -> None:
    """Call ``torchs``, torch's function that deletes this worker's references and waits until its own RRefs are free.

    torch waits 100 s for the references to this worker's RRefs that only a dead worker could delete.
    """
    with _repeated_after_a_loss(agent._release_references, _DELETING_S):
        torchs()


@contextlib.contextmanager
def _repeated_after_a_loss(act: Callable[[], None], delay: float) -> Iterator[threading.Event]:
    """Call ``act`` on a thread again and again, beginning ``delay`` seconds after a loss.

    Yields an event that says whether a worker is lost.
    """
    is_lost, is_over = threading.Event(), threading.Event()

    def repeat() -> None:
        if not is_over.wait(delay):
            act()
            while not is_over.wait(_PERIOD_S):
                act()

    def on_gone(gone: Gone) -> None:
        if gone.failed and not is_lost.is_set():
            is_lost.set()
            Thread(repeat, name="torch_ucx_rpc-shutdown").start()

    unsubscribe = subscribe(on_gone)
    try:
        for gone in ended():
            on_gone(gone)
        yield is_lost
    finally:
        is_over.set()
        unsubscribe()
