"""The agent's spans in torch.profiler and in its Chrome traces, beside torch's own events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc as rpc
from torch.profiler import ProfilerActivity, profile

from tests.support.workers import in_worker0, over_shared_memory, run_workers

pytestmark = pytest.mark.ucx_only

SPAN = "torch_ucx_rpc: "


@over_shared_memory
@in_worker0(of=2, silent=False)  # for Kineto's output
def test_the_profiler_sees_the_calls_of_its_thread() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(3):
            rpc.rpc_sync("worker1", torch.add, (torch.ones(1), 1))
    counts = {event.key: event.count for event in profiled.key_averages() if event.key.startswith(SPAN)}
    assert counts.get(f"{SPAN}send request") == 3
    rpc.rpc_sync("worker1", torch.add, (torch.ones(1), 1))
    assert counts == {event.key: event.count for event in profiled.key_averages() if event.key.startswith(SPAN)}


def profile_all_threads(rank: int, folder: str) -> None:
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everything) as profiled:
        # All calls of both workers happen between these two.
        rpc.api._barrier({"worker0", "worker1"})
        if rank == 0:
            rpc.rpc_sync("worker1", torch.add, (torch.ones(1), 1))
        rpc.api._barrier({"worker0", "worker1"})
    profiled.export_chrome_trace(f"{folder}/{rank}.json")


def test_traces_of_all_threads_have_the_callees_spans_too(tmp_path: Path) -> None:
    run_workers(2, profile_all_threads, str(tmp_path), silent=False)
    names = [
        {event["name"] for event in json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]}
        for rank in range(2)
    ]
    assert f"{SPAN}send request" in names[0]
    assert {f"{SPAN}decode request", f"{SPAN}run handler", f"{SPAN}send answer"} <= names[1]
