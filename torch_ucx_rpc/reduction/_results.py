"""The last result of each piece that was given to this worker: `results`, and `result_of`, which hosts call.

When a host is lost with a round, some trainers may have had its answer and others not. The host that takes over asks
the former, so that all get the same. An answer that was under way when the host died may arrive later than that
question, which waits for it.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import threading
from typing import NamedTuple

import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from torch_ucx_rpc._observe.life import Life, PerLife

_Result = list[Tensor] | None


class _Sent(NamedTuple):
    """A push that is not answered yet, the host that it was sent to, and who waits for what comes of it."""

    number: int | None
    host: str
    waiting: list[Future[_Result]]


class Results:
    """By server and piece, the number of a round and its result. Any thread may use it."""

    def __init__(self, life: Life) -> None:
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str], tuple[int, list[Tensor]]] = {}
        self._sent: dict[tuple[str, str], _Sent] = {}

    def keep(self, key: str, piece: str, number: int, tensors: list[Tensor]) -> None:
        self._last[key, piece] = (number, tensors)

    def get(self, key: str, piece: str, number: int) -> _Result:
        kept = self._last.get((key, piece))
        return kept[1] if kept is not None and kept[0] == number else None

    def expect(self, key: str, piece: str, number: int | None, host: str) -> None:
        """A round has been pushed to a host. `settle` follows."""
        with self._lock:
            self._sent[key, piece] = _Sent(number, host, [])

    def settle(self, key: str, piece: str) -> None:
        """The push is answered, or its host is lost."""
        with self._lock:
            sent = self._sent.pop((key, piece), None)
        if sent is not None and sent.number is not None:
            for future in sent.waiting:
                future.set_result(self.get(key, piece, sent.number))

    def get_or_wait(self, key: str, piece: str, number: int, asker: str) -> Future[_Result]:
        """The result once it is known whether this worker gets it from another host than the one that asks."""
        future: Future[_Result] = Future()
        with self._lock:
            sent = self._sent.get((key, piece))
            if sent is not None and sent.number == number and sent.host != asker:
                sent.waiting.append(future)
                return future
        future.set_result(self.get(key, piece, number))
        return future

    def drop(self, key: str, model: str) -> None:
        """Forget the pieces of a model."""
        for known in list(self._last):
            if known[0] == key and known[1].startswith(f"{model}/"):
                self._last.pop(known, None)


results = PerLife(Results)


@rpc.functions.async_execution
def result_of(key: str, piece: str, number: int, asker: str) -> Future[_Result]:
    """The result of a round, if it is the last one of that piece that this worker knows."""
    return results().get_or_wait(key, piece, number, asker)
