"""The judges of ``tools/verbs.sh`` find faults. They need no machines."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.verbs._machines import KILLED, Ended
from tests.verbs._trials import _lost
from tests.verbs._workers import Failed, Workers, faults

LOST = {
    "calls": 9,
    "told_after_s": 11.0,
    "error": "lost worker 'w1' (rank 1, pid 7 on n2): it has died or cannot be reached any more (why)",
    "open_call": "failed",
    "open_call_s": 0.1,
    "shutdown_error": "... lost worker 'w1' ...",
    "shutdown_s": 0.5,
}


class FakeMachine:
    """Programs end there at once, with a status, an output, and facts."""

    def __init__(self, shared: Path, *, status: int | None = 0, output: str = "", **facts: Any) -> None:
        self._shared = shared
        self._ended = Ended(status, output)
        self._facts = {"ready": True, **facts}

    def expect_on(self) -> None:
        pass

    def begin_program(self, program: str, environment: dict[str, str]) -> Any:
        text = "".join(json.dumps({name: value}) + "\n" for name, value in self._facts.items())
        (self._shared / Path(environment["FACTS"]).name).write_text(text)
        return SimpleNamespace(wait=lambda timeout: self._ended, output=self._ended.output)


def machines(shared: Path, first: dict[str, Any], second: dict[str, Any] | None = None) -> Any:
    both = [FakeMachine(shared, **values) for values in (first, {"shutdown_s": 1.0, **(second or {})})]
    return SimpleNamespace(shared=shared, first=both[0], second=both[1])


def lost(shared: Path, second: dict[str, Any] | None = None, status: int | None = 0, **first: Any) -> str:
    workers = Workers(machines(shared, {**LOST, **first}, {"status": status, **(second or {})}), "watch.py")
    return _lost(workers, (10.0, 12.0), second=(status,))


@pytest.mark.parametrize(
    "line",
    [
        "[n1:12:0] ucp_ep.c:497 Assertion `ucs_hlist_is_empty(&ep->ext->proto_reqs)' failed",
        "[1.2] [n1:12:0] parser.c:2 UCX  WARN  unused environment variable: UCX_X",
        "==== backtrace ====\n[n1:12:0:12] Caught signal 11 (Segmentation fault)",
    ],
)
def test_a_fault_is_found_in_the_output_of_a_worker(line: str, tmp_path: Path) -> None:
    assert len(faults(f"before\n{line}\nafter\n")) == 1
    with pytest.raises(Failed, match="w1 says"):
        lost(tmp_path, {"output": line})


def test_a_loss_that_is_reported_in_time_passes(tmp_path: Path) -> None:
    assert lost(tmp_path) == "told after 11.0 s, shutdown 0.5 s, of the other one 1.0 s"
    assert lost(tmp_path, {"shutdown_s": 2.0}, KILLED) == "told after 11.0 s, shutdown 0.5 s, of the other one 2.0 s"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"told_after_s": 12.5}, "told after 12.5 s, wanted within 12 s"),
        ({"told_after_s": 3.0}, "before 10 s"),
        ({"error": "a timeout"}, "the error is another: a timeout"),
        ({"open_call": "answered"}, "the open call"),
        ({"open_call_s": 2.0}, "the open call"),
        ({"shutdown_error": "a timeout"}, "shutdown: a timeout"),
        ({"shutdown_s": 30.0}, "shutdown after 30.0 s"),
    ],
)
def test_a_loss_with_the_wrong_report_fails(tmp_path: Path, facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(Failed, match=reason):
        lost(tmp_path, **facts)
