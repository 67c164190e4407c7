"""``python -m benchmarks``: run benchmarks, print their tables, keep every round as JSON.

    python -m benchmarks                  the short set, five minutes
    python -m benchmarks --all            everything
    python -m benchmarks small_calls      one question

Each file here asks one question; harness.py says how contenders are compared. plot.py draws what the JSON holds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import harness

# In the order in which they are reported: the file, and what it calls its benchmark.
BENCHMARKS = {
    "small_calls": "small_calls:BENCHMARK",
    "large_tensors": "large_tensors:BENCHMARK",
    "beside_large": "beside_large:BENCHMARK",
    "arrays": "arrays:BENCHMARK",
    "in_flight": "in_flight:BENCHMARK",
    "overload": "overload:BENCHMARK",
    "deadlines": "deadlines:BENCHMARK",
    "all_pairs": "many_workers:ALL_PAIRS",
    "life": "many_workers:LIFE",
    "parameter_server": "autograd:PARAMETER_SERVER",
    "pipeline": "autograd:PIPELINE",
    "pipelines": "pipelines:TUTORIAL",
    "makespan": "pipelines:MAKESPAN",
    "rematerialization": "pipelines:REMATERIALIZATION",
    "recovery": "pipelines:RECOVERY",
    "device_tensors": "device_tensors:BENCHMARK",
    "native_updates": "native_updates:BENCHMARK",
    "idle": "idle:BENCHMARK",
    "others": "others:BENCHMARK",
    "sizes": "growth:SIZE_SWEEP",
    "calls_in_flight": "growth:IN_FLIGHT_SWEEP",
    "workers": "growth:WORKER_SWEEP",
}


def load(name: str) -> harness.Benchmark:
    module, variable = BENCHMARKS[name].split(":")
    benchmark = getattr(importlib.import_module(f"benchmarks.{module}"), variable)
    assert isinstance(benchmark, harness.Benchmark)
    return benchmark


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--all", action="store_true", help="also those that take long")
    parser.add_argument("--rounds", type=int, help="rounds of each contender (default: each benchmark's own)")
    parser.add_argument("--json", type=Path, help="keep every round here")
    arguments = parser.parse_args()

    chosen = {name: load(name) for name in arguments.names or BENCHMARKS}
    if not arguments.names and not torch.cuda.is_available():
        chosen = {name: benchmark for name, benchmark in chosen.items() if not benchmark.needs_gpu}
    if not arguments.names and not arguments.all:
        chosen = {name: benchmark for name, benchmark in chosen.items() if benchmark.in_short_set}
    results = {}
    total = sum(harness.steps(benchmark, arguments.rounds) for benchmark in chosen.values())
    with tqdm(total=total, unit="step", disable=not sys.stderr.isatty()) as bar:
        for name, benchmark in chosen.items():

            def advance(contender: str, name: str = name) -> None:
                bar.set_description(f"{name}: {contender}")
                bar.update()

            results[name] = harness.run(benchmark, arguments.rounds, advance)
            bar.clear()
            print("\n".join(harness.table(results[name])), end="\n\n", flush=True)

    if arguments.json:
        record = {
            "circumstances": harness.circumstances(),
            "rounds": {name: result.rounds for name, result in results.items()},
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
