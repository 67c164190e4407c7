"""Parts of a graceful shutdown in which torch waits for every worker. They end early for workers that are gone."""

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
# All living workers delete their references now. After this time, only gone workers still hold references.
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
    with _repeated_after_an_end(proceed, 0, of_lost_workers_only=True) as is_lost:
        try:
            api._all_gather(None, timeout=timeout)
        except (RuntimeError, AssertionError):
            # This worker may learn of the failed call before the loss.
            if not is_lost.wait(_NEWS_S):
                raise


def delete_rrefs(agent: Any, torchs: Callable[[], None]) -> None:
    """Call ``torchs``, torch's function that deletes this worker's references and waits until its own RRefs are free.

    torch waits 100 s for the references to this worker's RRefs that only a gone worker could delete, and for news of
    this worker's references that only a gone worker could send.
    """
    with _repeated_after_an_end(agent._release_references, _DELETING_S, of_lost_workers_only=False):
        torchs()


@contextlib.contextmanager
def _repeated_after_an_end(
    act: Callable[[], None], delay: float, *, of_lost_workers_only: bool
) -> Iterator[threading.Event]:
    """Call ``act`` on a thread again and again, beginning ``delay`` seconds after a worker was lost, or perhaps left.

    Yields an event that says whether there was such an end.
    """
    has_ended, is_over = threading.Event(), threading.Event()

    def repeat() -> None:
        if not is_over.wait(delay):
            act()
            while not is_over.wait(_PERIOD_S):
                act()

    def on_gone(gone: Gone) -> None:
        if (gone.failed or not of_lost_workers_only) and not has_ended.is_set():
            has_ended.set()
            Thread(repeat, name="torch_ucx_rpc-shutdown").start()

    unsubscribe = subscribe(on_gone)
    try:
        for gone in ended():
            on_gone(gone)
        yield has_ended
    finally:
        is_over.set()
        unsubscribe()
