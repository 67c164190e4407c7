"""Where does the time of one small call go?

Traces ``rpc_sync`` of a Python function without arguments between two workers (TORCH_UCX_RPC_TRACE), and prints the
median of each step. The time between the agent's spans goes into torch's Python and C++ above the agent, and into
wake-ups.

    python -m benchmarks.breakdown [--waiting auto|poll|sleep] [--tcp]
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import os
import statistics
import tempfile
from pathlib import Path

import torch.distributed.rpc as rpc

from benchmarks import harness, jobs
from benchmarks.small_calls import nothing

CALLS = 3000


@dataclasses.dataclass(frozen=True)
class Step:
    name: str
    begin: tuple[str, str]  # a span, and its beginning or end
    end: tuple[str, str]


STEPS = (
    Step("caller: encode, submit to UCX", ("send request", "begin"), ("send request", "end")),
    Step("to the callee, its wake-up", ("send request", "end"), ("receive request", "begin")),
    Step("callee: hand to a thread", ("receive request", "begin"), ("decode request", "begin")),
    Step("callee: decode", ("decode request", "begin"), ("decode request", "end")),
    Step("callee: torch unpickles, runs, pickles", ("run handler", "begin"), ("run handler", "end")),
    Step("callee: encode, submit to UCX", ("send answer", "begin"), ("send answer", "end")),
    Step("to the caller, its wake-up", ("send answer", "end"), ("receive answer", "begin")),
    Step("caller: decode, torch unpickles", ("receive answer", "begin"), ("complete call", "end")),
)
REST = "caller: torch pickles, before and after"


def measure() -> harness.Figures:
    harness.durations_us(lambda: rpc.rpc_sync("worker1", nothing), CALLS)
    return {}


def steps_us(trace: str) -> dict[str, list[float]]:
    calls: dict[str, dict[tuple[str, str], float]] = collections.defaultdict(dict)
    for line in trace.splitlines():
        if '"ph":"X"' in line:
            event = json.loads(line.rstrip(","))
            times = calls[event["args"]["call"]]
            times[event["name"], "begin"] = event["ts"]
            times[event["name"], "end"] = event["ts"] + event["dur"]
    ends = {end for step in STEPS for end in (step.begin, step.end)}
    whole = [times for times in calls.values() if ends <= times.keys()]
    whole.sort(key=lambda times: times["send request", "begin"])
    whole = whole[len(whole) // 4 :]  # drops the warm-up
    durations = {step.name: [times[step.end] - times[step.begin] for times in whole] for step in STEPS}
    durations[REST] = [
        later["send request", "begin"] - earlier["complete call", "end"] for earlier, later in itertools.pairwise(whole)
    ]
    return durations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", default="auto", choices=("auto", "poll", "sleep"))
    parser.add_argument("--tcp", action="store_true", help="use TCP instead of shared memory")
    arguments = parser.parse_args()
    transport = jobs.UCX_TCP if arguments.tcp else jobs.UCX
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        os.environ["TORCH_UCX_RPC_TRACE"] = str(file)
        traced = dataclasses.replace(transport, options={"waiting": arguments.waiting})
        with jobs.RpcJob(traced, measure) as job:
            job.measure()
        durations = steps_us(file.read_text(encoding="ascii"))
    print("| step | p50, us | p10 to p90 |\n|---|---:|---:|")
    for name, values in durations.items():
        deciles = statistics.quantiles(values, n=10)
        print(f"| {name} | {statistics.median(values):.1f} | {deciles[0]:.1f} to {deciles[-1]:.1f} |")
    print(f"| in sum | {sum(statistics.median(values) for values in durations.values()):.1f} | |")


if __name__ == "__main__":
    main()
