"""``TORCH_UCX_RPC_TRACE`` shows the time of each call in Chrome and Perfetto."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest
import torch.distributed.rpc as rpc

from tests.support.workers import Transport, run_workers

pytestmark = pytest.mark.ucx_only

CALLS = 20
SPANS = {
    "worker0": {"send request", "receive answer", "complete call"},
    "worker1": {"receive request", "decode request", "run handler", "send answer"},
}


def nothing() -> None:
    pass


def call_worker1(rank: int) -> None:
    if rank == 0:
        for _ in range(CALLS):
            rpc.rpc_sync("worker1", nothing)


def test_a_trace_has_the_spans_of_both_sides_joined_by_arrows(tmp_path: Path, transport: Transport) -> None:
    file = tmp_path / "trace.json"
    run_workers(2, call_worker1, transport=transport, env={"TORCH_UCX_RPC_TRACE": str(file)})
    # The array is not closed: processes append to it, and the format allows it.
    events = json.loads(file.read_text(encoding="ascii").rstrip().rstrip(",") + "]")

    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert sorted(names.values()) == ["worker0", "worker1"]
    spans = collections.defaultdict(lambda: collections.defaultdict(list))
    for event in events:
        if event["ph"] == "X":
            spans[event["args"]["call"]][names[event["pid"]]].append(event)
    whole = [sides for sides in spans.values() if {e["name"] for e in sides["worker0"]} == SPANS["worker0"]]
    assert len(whole) >= CALLS
    for sides in whole:
        assert {event["name"] for event in sides["worker1"]} == SPANS["worker1"]
        assert all(event["dur"] >= 0 for side in sides.values() for event in side)

    starts, ends = (
        {(event["name"], event["id"]): event for event in events if event["ph"] == phase} for phase in ("s", "f")
    )
    joined = starts.keys() & ends.keys()
    assert {name for name, _ in joined} == {"request", "answer"}
    assert len(joined) >= 2 * CALLS
    assert all(starts[arrow]["pid"] != ends[arrow]["pid"] for arrow in joined)
