"""``python -m benchmarks``: run benchmarks, print their tables, keep every round as JSON.

    python -m benchmarks                        the short set, six minutes
    python -m benchmarks --all                  everything
    python -m benchmarks small_calls            one question
    python -m benchmarks --all --record NAME    and keep all rounds in benchmarks/results/NAME.json
    python -m benchmarks --against ../before    this checkout against another one, built in place by the same Python

Each file here asks one question; harness.py says how contenders are compared. It ends with 1 where a bound is missed or
a contender has failed. tables.py writes the tables of the docs from what is kept, and plot.py draws it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import harness

RESULTS = Path(__file__).parent / "results"

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
    "services": "services:CALL",
    "service_death": "services:DEATH",
    "service_joining": "services:JOINING",
    "reduction": "reduction:STEP",
    "reduction_disturbed": "reduction:DISTURBED",
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


def main(command_line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--all", action="store_true", help="also those that take long")
    parser.add_argument("--rounds", type=int, help="rounds of each contender (default: each benchmark's own)")
    parser.add_argument("--json", type=Path, help="keep every round here")
    parser.add_argument("--record", metavar="NAME", help="keep every round in benchmarks/results, for the docs")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout, instead of TensorPipe")
    arguments = parser.parse_args(command_line)
    load_before = os.getloadavg()[0]

    chosen = {name: load(name) for name in arguments.names or BENCHMARKS}
    if not arguments.names and not torch.cuda.is_available():
        chosen = {name: benchmark for name, benchmark in chosen.items() if not benchmark.needs_gpu}
    if not arguments.names and not arguments.all:
        chosen = {name: benchmark for name, benchmark in chosen.items() if benchmark.in_short_set}
    if arguments.against:
        other = arguments.against.resolve()
        if not list(other.glob("torch_ucx_rpc/_C*.so")):
            parser.error(f"{other} has no extension: run `python setup.py build_ext --inplace` there")
        compared = {name: harness.against(benchmark, other) for name, benchmark in chosen.items()}
        chosen = {name: benchmark for name, benchmark in compared.items() if benchmark.contenders()}
    # Of those who run benchmarks; the tables are written, and checked, without it.
    from tqdm import tqdm

    results = {}
    total = sum(harness.steps(benchmark, arguments.rounds) for benchmark in chosen.values())
    with tqdm(total=total, unit="step", disable=not sys.stderr.isatty()) as bar:
        for name, benchmark in chosen.items():

            def advance(contender: str, name: str = name) -> None:
                bar.set_description(f"{name}: {contender}")
                bar.update()

            def say(contender: str, figures: harness.Figures, name: str = name) -> None:
                if bar.disable:  # into a log: a run that is cut short has said what it found
                    print(f"measured {name}, {contender}: {json.dumps(figures)}", file=sys.stderr, flush=True)

            results[name] = harness.run(benchmark, arguments.rounds, advance, say)
            bar.clear()
            print("\n".join(harness.table(results[name])), end="\n\n", flush=True)

    files = [arguments.json] if arguments.json else []
    files += [RESULTS / f"{arguments.record}.json"] if arguments.record else []
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(harness.record(results, load_before), indent=1) + "\n", encoding="utf-8")

    for name, lanes in harness.LANES.items():
        print(f"{name} went by {lanes}")
    verdicts = [verdict for result in results.values() for verdict in result.verdicts()]
    missed = [verdict for verdict in verdicts if not verdict.holds]
    failed = {name: sorted(result.failures) for name, result in results.items() if result.failures}
    for verdict in missed:
        print(f"MISSED: {verdict}")
    for name, contenders in failed.items():
        print(f"FAILED in {name}: {', '.join(contenders)}")
    print(f"{len(verdicts) - len(missed)} of {len(verdicts)} bounds hold.")
    return 1 if missed or failed else 0


if __name__ == "__main__":
    sys.exit(main())
