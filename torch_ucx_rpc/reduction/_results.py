"""The last result of each piece that was given to this worker: `results`, and `result_of`, which hosts call.

When a host is lost with a round, some trainers may have had its answer and others not. The host that takes over asks
the former, so that all get the same. An answer that was under way when the host died may arrive later than that
question, which waits for it. So may the state of a model, which brings the results that its donor had.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from torch_ucx_rpc._workers.life import Life, PerLife

_Result = list[Tensor] | None

# By piece, the number of its last round, and the result.
LastResults = dict[str, tuple[int, list[Tensor]]]


class _Question(NamedTuple):
    """The result of a round, for a host that waits for it."""

    piece: str
    number: int
    answer: Future[_Result]


class _Sent(NamedTuple):
    """A push that is not answered yet, the host that it was sent to, and who waits for what comes of it."""

    number: int | None
    host: str
    waiting: list[_Question]


class _Asked(NamedTuple):
    """A state that has not come yet, the trainer that was asked for it, and who waits for its results."""

    donor: str
    waiting: list[_Question]


class Results:
    """By server and piece, the number of a round and its result. Any thread may use it."""

    def __init__(self, life: Life) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, LastResults] = {}
        self._sent: dict[tuple[str, str], _Sent] = {}
        self._asked: dict[tuple[str, str], _Asked] = {}

    def keep(self, key: str, piece: str, number: int, tensors: list[Tensor]) -> None:
        self._last.setdefault(key, {})[piece] = (number, tensors)

    def get(self, key: str, piece: str, number: int) -> _Result:
        kept = self._last.get(key, {}).get(piece)
        return kept[1] if kept is not None and kept[0] == number else None

    def of_model(self, key: str, model: str) -> LastResults:
        """Of all pieces of a model, for a trainer that gets its state."""
        last = self._last.get(key, {})
        return {piece: kept for piece, kept in list(last.items()) if piece.startswith(f"{model}/")}

    def adopt(self, key: str, theirs: LastResults) -> None:
        """Keep those that a donor had."""
        self._last.setdefault(key, {}).update(theirs)

    def expect(self, key: str, piece: str, number: int | None, host: str) -> None:
        """A round has been pushed to a host. `settle` follows."""
        with self._lock:
            self._sent[key, piece] = _Sent(number, host, [])

    def settle(self, key: str, piece: str) -> None:
        """The push is answered, or its host is lost."""
        with self._lock:
            sent = self._sent.pop((key, piece), None)
        self._answer(key, [] if sent is None else sent.waiting)

    @contextlib.contextmanager
    def expect_state(self, key: str, model: str, donor: str) -> Iterator[None]:
        """Within it a donor is asked for its state, and the results are adopted."""
        asked = self._asked[key, model] = _Asked(donor, [])
        try:
            yield
        finally:
            with self._lock:
                del self._asked[key, model]
            self._answer(key, asked.waiting)

    def _answer(self, key: str, waiting: list[_Question]) -> None:
        for question in waiting:
            question.answer.set_result(self.get(key, question.piece, question.number))

    def get_or_wait(self, key: str, piece: str, number: int, asker: str, living: Collection[str]) -> Future[_Result]:
        """The result once it is known whether this worker gets it, from another host or a donor that was lost.

        ``asker``: the host that asks, and has none. ``living``: the workers that are not lost; a donor among them may
        give its state after this round only.
        """
        question = _Question(piece, number, Future())
        with self._lock:
            sent = self._sent.get((key, piece))
            asked = self._asked.get((key, piece.partition("/")[0]))
            if sent is not None and sent.number == number and sent.host != asker:
                sent.waiting.append(question)
                return question.answer
            if asked is not None and asked.donor not in living:
                asked.waiting.append(question)
                return question.answer
        self._answer(key, [question])
        return question.answer

    def drop(self, key: str, model: str) -> None:
        """Forget the pieces of a model."""
        for piece in self.of_model(key, model):
            self._last[key].pop(piece, None)


results = PerLife(Results)


@rpc.functions.async_execution
def result_of(key: str, piece: str, number: int, asker: str, living: tuple[str, ...]) -> Future[_Result]:
    """The result of a round, if it is the last one of that piece that this worker knows."""
    return results().get_or_wait(key, piece, number, asker, living)
