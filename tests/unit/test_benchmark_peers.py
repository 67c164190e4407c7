"""The programs that measure other libraries: what they ask of them, and one of them, Gloo, which torch has."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import jobs, others, plot  # noqa: E402  (found through the line above)
from benchmarks.peers import measuring  # noqa: E402

ROWS = {figure.name for figure in others.BENCHMARK.figures}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(measuring, "rounds_of", lambda echoes: 2)
    monkeypatch.setattr(measuring, "ARRAYS", {name: (array, 2) for name, (array, _) in measuring.ARRAYS.items()})
    return


@pytest.mark.usefixtures("short")
def test_the_other_side_knows_what_is_measured() -> None:
    asked = []

    def echo_at_once(array: np.ndarray, echoes: int) -> list[np.ndarray]:
        asked.append((array.nbytes, echoes))
        return [array] * echoes

    figures = measuring.measured(lambda array: echo_at_once(array, 1)[0], echo_at_once)
    assert figures.keys() == ROWS
    assert asked == [(array.nbytes, echoes) for array, echoes in measuring.schedule()]


@pytest.mark.usefixtures("short")
def test_a_wrong_answer_is_no_figure() -> None:
    with pytest.raises(AssertionError):
        measuring.measured(lambda array: array[::-1], lambda array, echoes: [array] * echoes)


def test_each_column_has_a_program() -> None:
    assert {other.name for other in others.OTHERS} == measuring.PROGRAMS.keys()
    for module in measuring.PROGRAMS.values():
        assert importlib.util.find_spec(f"benchmarks.peers.{module}") is not None


def test_gloo_is_measured_and_drawn(tmp_path: Path) -> None:
    gloo = next(other for other in others.OTHERS if other.name == "Gloo")
    figures = gloo.measure()
    assert figures.keys() == ROWS
    assert jobs.LANES["Gloo"] == "tcp"
    plot.draw_others({"UCX": [figures, figures], "Gloo": [figures]}, tmp_path / "others.svg")
    assert "Gloo" in (tmp_path / "others.svg").read_text(encoding="utf-8")


def test_a_library_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_PEERS_PYTHON", sys.executable)
    assert not others.Other("Nobody", "no_such_library", "").is_installed()
    monkeypatch.delenv("BENCH_PEERS_PYTHON")
    assert not others.Other("Ray", "ray", "").is_installed()
