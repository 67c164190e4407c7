"""What does an idle worker cost?"""

from __future__ import annotations

import resource
import time

import torch.distributed.rpc as rpc

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure

IDLE_S = 4.0


def nothing() -> None:
    """The callee of a call that connects."""


def used_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure() -> harness.Figures:
    rpc.rpc_sync("worker1", nothing)
    time.sleep(0.2)
    before = used_s(), rpc.rpc_sync("worker1", used_s)
    time.sleep(IDLE_S)
    after = used_s(), rpc.rpc_sync("worker1", used_s)
    return {"CPU time of an idle worker": 100 * max(after[0] - before[0], after[1] - before[1]) / IDLE_S}


BENCHMARK = harness.Benchmark(
    question="What does an idle worker cost?",
    figures=(Figure("CPU time of an idle worker", "% of a core", (Bound(0.5, 0, reference=None),)),),
    contenders=lambda: [jobs.RpcJob(transport, measure) for transport in jobs.ON_ONE_HOST],
    rounds=3,
)
