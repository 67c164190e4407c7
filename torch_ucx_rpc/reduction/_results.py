"""The last result of each piece that was given to this worker: `results`, and `result_of`, which hosts call.

When a host is lost with a round, some trainers may have had its answer and others not. The host that takes over asks
the former, so that all get the same.
"""

from __future__ import annotations

from torch import Tensor

from torch_ucx_rpc._observe.life import Life, PerLife


class Results:
    """By server and piece, the number of a round and its result. Any thread may use it."""

    def __init__(self, life: Life) -> None:
        self._last: dict[tuple[str, str], tuple[int, list[Tensor]]] = {}

    def keep(self, key: str, piece: str, number: int, tensors: list[Tensor]) -> None:
        self._last[key, piece] = (number, tensors)

    def get(self, key: str, piece: str, number: int) -> list[Tensor] | None:
        kept = self._last.get((key, piece))
        return kept[1] if kept is not None and kept[0] == number else None

    def drop(self, key: str, model: str) -> None:
        """Forget the pieces of a model."""
        for known in list(self._last):
            if known[0] == key and known[1].startswith(f"{model}/"):
                self._last.pop(known, None)


results = PerLife(Results)


def result_of(key: str, piece: str, number: int) -> list[Tensor] | None:
    """The result of a round, if it is the last one of that piece that this worker knows."""
    return results().get(key, piece, number)
