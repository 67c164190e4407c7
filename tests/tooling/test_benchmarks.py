"""Benchmarks end and name missed bounds. The tables of the docs match the results."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import harness, jobs, kept, tables
from benchmarks.harness import Benchmark, Bound, Figure

ROOT = Path(__file__).resolve().parents[2]

LATENCY = Figure("latency", "us", (Bound(0.5, 0.4),))
RATE = Figure("rate", "1/s", (Bound(2),), more_is_better=True)


def benchmark(figure: Figure, **values: float) -> Benchmark:
    """A benchmark that measures these values by contender. ``tensorpipe_uv`` is the contender "TensorPipe, uv"."""
    names = {"ucx": "UCX", "tensorpipe": "TensorPipe", "tensorpipe_uv": "TensorPipe, uv"}
    return Benchmark(
        "How?",
        (figure,),
        lambda: [jobs.Baseline(names[key], lambda value=value: {figure.name: value}) for key, value in values.items()],
        rounds=2,
    )


# ---- Ratios and bounds -----------------------------------------------------------------------------------------------


def test_ratio_is_to_tensorpipes_better_configuration() -> None:
    [verdict] = harness.run(benchmark(LATENCY, ucx=30.0, tensorpipe=100.0, tensorpipe_uv=50.0)).verdicts()
    assert (verdict.ratio, verdict.holds) == (0.6, False)
    [verdict] = harness.run(benchmark(RATE, ucx=30.0, tensorpipe=10.0, tensorpipe_uv=20.0)).verdicts()
    assert (verdict.ratio, verdict.holds) == (1.5, False)


def test_the_table_says_which_bounds_are_missed() -> None:
    for ucx, says in ((60.0, "0.60 | ≤ 0.5 | ≤ 0.4 | MISSED"), (40.0, "0.40 | ≤ 0.5 | ≤ 0.4 | holds")):
        *_, line = harness.table(harness.run(benchmark(LATENCY, ucx=ucx, tensorpipe=100.0)))
        assert line.endswith(f"| {says} |")


# ---- Contenders that fail --------------------------------------------------------------------------------------------


def hangs() -> harness.Figures:
    time.sleep(3600)
    return {}


def test_hung_job_fails_and_its_workers_are_gone_at_once() -> None:
    job = jobs.RpcJob(jobs.UCX, hangs, limit_s=60)
    with job:
        job._limit_s = 0.1
        with pytest.raises(harness.ContenderFailed, match="has not answered"):
            job.measure()
        for process in job._processes:
            process.join(30)
            assert process.exitcode == -signal.SIGKILL


# ---- The program, and kept results -----------------------------------------------------------------------------------


def is_of_another_tree() -> harness.Figures:
    import torch_ucx_rpc

    return {LATENCY.name: 1.0 + (not torch_ucx_rpc.__file__.startswith(str(ROOT)))}


def test_another_checkout_takes_turns_with_this_one(tmp_path: Path) -> None:
    (tmp_path / "torch_ucx_rpc").symlink_to(ROOT / "torch_ucx_rpc")
    question = Benchmark(
        "Which one?",
        (LATENCY,),
        lambda: [jobs.RpcJob(transport, is_of_another_tree) for transport in (jobs.UCX, jobs.TENSORPIPE)],
        rounds=2,
    )
    result = harness.run(jobs.against(question, tmp_path))
    assert not result.failures
    assert result.rounds == {"UCX": [{"latency": 1.0}] * 2, f"UCX, {tmp_path.name}": [{"latency": 2.0}] * 2}
    assert not list(result.verdicts())
    *_, line = harness.table(result)
    assert f"| 0.50 to UCX, {tmp_path.name} |" in line


@pytest.mark.parametrize(("ucx", "status"), [(40.0, 0), (60.0, 1)], ids=["holds", "missed"])
def test_the_program_ends_with_1_where_a_bound_is_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], ucx: float, status: int
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(program, "load", lambda _: benchmark(LATENCY, ucx=ucx, tensorpipe=100.0))
    file = tmp_path / "kept.json"
    assert program.main(["small_calls", "--json", str(file)]) == status
    assert ("MISSED: latency, UCX to TensorPipe" in capsys.readouterr().out) == bool(status)
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["rounds"]["small_calls"]["UCX"] == [{"latency": ucx}] * 2
    assert {"processor", "cores", "torch", "ucx"} <= found["circumstances"].keys()
    assert {"commit", "date", "seconds"} <= found["measured"]["small_calls"].keys()
    assert found["configuration"]["TensorPipe, uv"]["_channels"] == ["mpt_uv", "basic"]


def test_a_new_measurement_replaces_its_own_results_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(kept, "RESULTS", tmp_path)
    monkeypatch.setattr(program, "load", lambda _: benchmark(LATENCY, ucx=40.0, tensorpipe=100.0))
    assert program.main(["small_calls", "idle", "--record", "run"]) == 0
    monkeypatch.setattr(program, "load", lambda _: benchmark(LATENCY, ucx=30.0, tensorpipe=100.0))
    assert program.main(["idle", "--record", "run"]) == 0
    rounds = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["rounds"]
    assert [rounds[name]["UCX"][0]["latency"] for name in ("small_calls", "idle")] == [40.0, 30.0]


def test_the_tables_of_the_docs_match_the_results() -> None:
    stale = [page.name for page, text in tables.written_pages() if page.read_text(encoding="utf-8") != text]
    assert not stale, "run: python -m benchmarks.tables --write"


@pytest.mark.parametrize("claim", tables.CLAIMS, ids=lambda claim: claim.words[:30])
def test_the_claims_of_the_readme_match_the_results(claim: tables.Claim) -> None:
    assert claim.words in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert not list(tables.Run(claim.run).broken(claim)), "say less in the README"
