"""By how much do calls that are not answered miss their deadlines, and what do they leave behind?

worker1 answers too late. Threads of both workers keep the two processes and the transport busy with small calls and
calls of 1 MiB. How long after its deadline does a call fail? 2,000 calls have different deadlines, and 1,000 calls have
the same one. Then 100,000 calls time out. The resident memory of both workers is compared with their memory after the
first tenth of these calls. A tenth of the calls and of the late answers have 1 MiB.
"""

from __future__ import annotations

import random
import threading
import time

import torch
import torch.distributed.rpc as rpc
from torch.futures import Future

from benchmarks import harness, jobs
from benchmarks.harness import Bound, Figure
from benchmarks.in_flight import MIB, resident_mib
from benchmarks.large_tensors import echo

LOADING_THREADS = 4
SPREAD_CALLS = 2_000
ALIKE_CALLS = 1_000
BATCH = 1_000
BATCHES = 100

# All answers share a tensor, so that making tensors adds no memory.
ANSWER = torch.ones(MIB // 4)

late: list[Future[object]] = []
load: list[Load] = []


@rpc.functions.async_execution
def answer_late(*_: object) -> Future[object]:
    late.append(Future())
    return late[-1]


def give_late_answers() -> None:
    while late:
        late.pop().set_result(ANSWER if len(late) % 10 == 0 else None)


class Load:
    """Threads that call the other worker, half of them with a tensor."""

    def __init__(self, to: str) -> None:
        self._to = to
        self._is_over = False
        self._threads = [threading.Thread(target=self._call, args=(index,)) for index in range(LOADING_THREADS)]
        for thread in self._threads:
            thread.start()

    def _call(self, index: int) -> None:
        value = torch.rand(MIB // 4 if index % 2 else 1)
        while not self._is_over:
            rpc.rpc_sync(self._to, echo, (value,))

    def end(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()


def begin_load(to: str) -> None:
    load.append(Load(to))


def end_load() -> None:
    load.pop().end()


def has_timed_out(call: Future[object]) -> bool:
    try:
        call.wait()
    except RuntimeError as error:
        return "RPC ran for more than" in str(error)
    return False


def call_until(due: float, lateness_ms: list[float]) -> Future[object]:
    call: Future[object] = rpc.rpc_async("worker1", answer_late, timeout=due - time.perf_counter())
    call.add_done_callback(lambda _: lateness_ms.append(1e3 * (time.perf_counter() - due)))
    return call


def measure_lateness() -> harness.Figures:
    rng = random.Random(0)
    spread: list[float] = []
    calls = []
    for _ in range(SPREAD_CALLS):
        calls.append(call_until(time.perf_counter() + rng.uniform(0.1, 1), spread))
        time.sleep(0.001)
    alike: list[float] = []
    due = time.perf_counter() + 2
    calls += [call_until(due, alike) for _ in range(ALIKE_CALLS)]
    # Asking each call for its exception takes time, and would delay calls that fail in that time.
    while len(spread) + len(alike) < len(calls):
        time.sleep(0.1)
    assert all(map(has_timed_out, calls))
    figures: harness.Figures = {}
    for name, lateness in (("spread", sorted(spread)), ("1,000 alike", sorted(alike))):
        figures |= {
            f"{name}, p50": harness.p50(lateness),
            f"{name}, p99": harness.p99(lateness),
            f"{name}, max": lateness[-1],
        }
    return figures


def time_out(batches: int) -> None:
    tensor = torch.ones(MIB // 4)
    for _ in range(batches):
        arguments = [(tensor,) if number % 10 == 0 else () for number in range(BATCH)]
        calls = [rpc.rpc_async("worker1", answer_late, values, timeout=0.1) for values in arguments]
        assert all(map(has_timed_out, calls))
        rpc.rpc_sync("worker1", give_late_answers)


def resident_of_both() -> tuple[float, float]:
    return resident_mib(peak=False), rpc.rpc_sync("worker1", resident_mib, (False,))


def measure() -> harness.Figures:
    rpc.rpc_sync("worker1", begin_load, ("worker0",))
    begin_load("worker1")
    figures = measure_lateness()
    end_load()
    rpc.rpc_sync("worker1", end_load)
    time_out(BATCHES // 10)
    before = resident_of_both()
    time_out(BATCHES - BATCHES // 10)
    after = resident_of_both()
    return {**figures, "growth of the caller": after[0] - before[0], "growth of the callee": after[1] - before[1]}


BENCHMARK = harness.Benchmark(
    question="How late do calls fail, and what do they leave?",
    figures=(
        *(
            Figure(f"{name}, {figure}", "ms", bounds)
            for name in ("spread", "1,000 alike")
            for figure, bounds in (
                ("p50", ()),
                ("p99", (Bound(50, reference=None),)),
                ("max", (Bound(500, reference=None),)),
            )
        ),
        Figure("growth of the caller", "MiB"),
        Figure("growth of the callee", "MiB"),
    ),
    contenders=lambda: [jobs.RpcJob(transport, measure) for transport in (jobs.UCX, jobs.UCX_TCP)],
    rounds=2,
    in_short_set=False,
)
