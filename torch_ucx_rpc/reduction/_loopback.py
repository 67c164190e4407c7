"""A push to this worker's own host, by a call whose tensors stay where they are: `lend` and `push_lent`.

It is a call all the same: it has a call's timeout, ends with the shutdown, and runs on a thread of calls. A call to
oneself with tensors copies them, there and back.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import itertools
import threading

import torch.distributed.rpc as rpc
from torch.futures import Future

from torch_ucx_rpc._workers.life import Life, PerLife
from torch_ucx_rpc.reduction._hosts import keep_copy, take_push
from torch_ucx_rpc.reduction._messages import Answer, Push


class Lent:
    """A push whose tensors the host reads, until there is an answer."""

    def __init__(self, number: int, push: Push) -> None:
        self.number = number
        self._push = push
        self._lock = threading.Lock()
        self._is_over = False
        self._pushed: Future[Answer] | None = None

    def push(self) -> Future[Answer] | None:
        """The push, here. None after a timeout: then nobody waits for it."""
        with self._lock:
            if not self._is_over:
                self._pushed = take_push(self._push, is_owned=False)
            return self._pushed

    def end(self, done: Future[None]) -> Answer:
        """The answer of a call that is done; RuntimeError if it has failed."""
        _lent().pop(self.number, None)
        done.value()
        assert self._pushed is not None
        return self._pushed.value()._replace(is_shared=True)

    def take_back(self) -> None:
        """The call has timed out: the tensors may be written to when this returns."""
        with self._lock:
            self._is_over = True
        keep_copy(self._push)


class _AllLent(dict[int, Lent]):
    """By number. Any thread may use it."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        self.numbers = itertools.count()


_lent = PerLife(_AllLent)


def lend(push: Push) -> Lent:
    """What `push_lent` finds by its number."""
    known = _lent()
    lent = Lent(next(known.numbers), push)
    known[lent.number] = lent
    return lent


@rpc.functions.async_execution
def push_lent(number: int) -> Future[None]:
    """The call. It is done when the push is, whose answer the trainer takes by `Lent.end`."""
    done: Future[None] = Future()
    lent = _lent().get(number)
    pushed = None if lent is None else lent.push()
    if pushed is None:
        done.set_result(None)
    else:
        pushed.add_done_callback(lambda _: done.set_result(None))
    return done
