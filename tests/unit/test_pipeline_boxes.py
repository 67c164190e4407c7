"""Boxes of a pipeline's hosts: the channel of one is open as long as this process uses it."""

from __future__ import annotations

import pytest

from torch_ucx_rpc.pipeline import _exchange
from torch_ucx_rpc.pipeline._exchange import Box, close_to_send, open_to_send


class Slots:
    """The epochs of a process's channels, by name."""

    def __init__(self) -> None:
        self.open: dict[str, int] = {}

    def advance(self, name: str, epoch: int) -> None:
        if self.open.get(name, 0) > epoch:
            raise ValueError(f"{name} is in a later epoch")
        self.open[name] = epoch

    def close(self, name: str) -> None:
        self.open.pop(name, None)


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    made = Slots()
    monkeypatch.setattr(_exchange, "slots", lambda: made)
    return made.open


def test_the_last_of_two_senders_closes_a_channel(channels: dict[str, int]) -> None:
    open_to_send("a")
    open_to_send("a")
    close_to_send("a")
    assert channels == {"a": 0}
    close_to_send("a")
    assert channels == {}


def test_a_sender_that_ends_leaves_the_box_here_open(channels: dict[str, int]) -> None:
    box = Box("a", 3)
    open_to_send("a")
    close_to_send("a")
    assert channels == {"a": 3}
    box.close()
    box.close()
    assert channels == {}


def test_a_box_that_closes_ends_its_waits_despite_senders(channels: dict[str, int]) -> None:
    open_to_send("a")
    box = Box("a", 1)
    box.close()
    assert channels == {}
    close_to_send("a")
    open_to_send("a")
    assert channels == {"a": 0}
    close_to_send("a")
    assert channels == {}
