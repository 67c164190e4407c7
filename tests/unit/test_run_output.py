"""The launcher's record of its workers' output."""

from __future__ import annotations

import io
import os
import sys
import threading
import types
from pathlib import Path

import pytest

from torch_ucx_rpc._cli import _output
from torch_ucx_rpc._cli._output import WorkerOutput


class SlowTarget(io.BytesIO):
    """A reader of the launcher's output. It waits for the event `goes_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.goes_on = threading.Event(), threading.Event()

    def write(self, data: object) -> int:
        self.waits.set()
        assert self.goes_on.wait(60)
        return super().write(data)  # type: ignore[arg-type]


def test_written_output_is_known_after_catching_up(monkeypatch: pytest.MonkeyPatch) -> None:
    target = SlowTarget()
    monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(buffer=target))
    output = WorkerOutput(None)
    pipe = Path(output.path("worker0", "stderr"))
    output.start()
    with pipe.open("wb", buffering=0) as stderr:
        stderr.write(b"a line\n")
        assert target.waits.wait(60)
        os.write(stderr.fileno(), b"Traceback (most recent call last):\nValueError: no\n")
        assert output.last_traceback("worker0") == float("-inf")
        threading.Timer(0.3, target.goes_on.set).start()
        output.catch_up()
        assert output.last_traceback("worker0") > float("-inf")
        assert output.last_words("worker0").endswith("ValueError: no")
    output.close()


def test_a_line_without_an_end_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_output, "_LONGEST_LINE", 4)
    target = io.BytesIO()
    stream = _output.Stream(target, b"[worker0] ")  # type: ignore[arg-type]
    for part in (b"abc", b"def", b"gh\n"):
        stream.take(part)
    assert target.getvalue() == b"[worker0] abcdef\n[worker0] gh\n"


def test_silent_workers_do_not_delay_catching_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_output, "_CATCHING_UP_S", 3600)
    output = WorkerOutput(None)
    # A restarted worker has the same pipe.
    for _ in range(2):
        output.path("worker0", "stderr")
        output.start()
        output.catch_up()
        output.catch_up()
        output.finish()
    output.close()
