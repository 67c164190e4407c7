"""``python -m benchmarks``: runs benchmarks, prints their tables, and keeps every round as JSON.

    python -m benchmarks                        the short set, ten minutes
    python -m benchmarks --all                  everything
    python -m benchmarks small_calls            one question
    python -m benchmarks --all --record NAME    and keep all rounds in benchmarks/results/NAME.json
    python -m benchmarks life --record NAME     measure one again; the file keeps the other results
    python -m benchmarks --against ../before    compare with another checkout, built in place by the same Python

Most files here ask one question. harness.py compares contenders, and jobs.py has them. The exit code is 1 if a bound is
missed or a contender has failed. Results are written after each benchmark, and a benchmark that crashes does not stop
the others. tables.py writes the tables of the docs from the kept results, and plot.py draws them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import harness, jobs, kept

# The file of each benchmark and its variable there, in the order of the report.
BENCHMARKS = {
    "small_calls": "small_calls:BENCHMARK",
    "large_tensors": "large_tensors:BENCHMARK",
    "channel": "channel:BENCHMARK",
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
    "checkpoint_pause": "checkpoints:PAUSE",
    "checkpoint_memory": "checkpoints:MEMORY",
    "device_tensors": "device_tensors:BENCHMARK",
    "native_updates": "native_updates:BENCHMARK",
    "services": "services:CALL",
    "service_death": "services:DEATH",
    "service_joining": "services:JOINING",
    "reduction": "reduction:STEP",
    "reduction_disturbed": "reduction:DISTURBED",
    "idle": "idle:BENCHMARK",
    "launched": "launched:BENCHMARK",
    "others": "others:BENCHMARK",
    "sizes": "growth:SIZE_SWEEP",
    "calls_in_flight": "growth:IN_FLIGHT_SWEEP",
    "workers": "growth:WORKER_SWEEP",
}


Advance = Callable[[str], None]


def load(name: str) -> harness.Benchmark:
    module, variable = BENCHMARKS[name].split(":")
    benchmark = getattr(importlib.import_module(f"benchmarks.{module}"), variable)
    assert isinstance(benchmark, harness.Benchmark)
    return benchmark


def load_or_tell(name: str) -> harness.Benchmark | None:
    """Return the benchmark. If one of its imports is missing or broken, write the reason to stderr and return None."""
    try:
        return load(name)
    except Exception:
        print(f"{name} cannot be loaded: {traceback.format_exc()}", file=sys.stderr, flush=True)
        return None


def measured(name: str, benchmark: harness.Benchmark, rounds: int | None, advance: Advance) -> harness.Result:
    """Return the result of a benchmark. If the benchmark itself crashes, all contenders count as failed."""

    def say(contender: str, figures: harness.Figures) -> None:
        if not sys.stderr.isatty():  # a log: even an interrupted run leaves its figures
            print(f"measured {name}, {contender}: {json.dumps(figures)}", file=sys.stderr, flush=True)

    try:
        return harness.run(benchmark, rounds, lambda contender: advance(f"{name}: {contender}"), say)
    except Exception:
        reason = traceback.format_exc()
        print(f"{name} has failed: {reason}", file=sys.stderr, flush=True)
        return harness.Result(benchmark, {"UCX": []}, {"UCX": reason})


@contextlib.contextmanager
def progress(chosen: Mapping[str, harness.Benchmark], rounds: int | None) -> Iterator[Advance]:
    """Show a bar on a terminal, with the contender that is being measured."""
    # Only runs of benchmarks need tqdm. Writing and checking tables does not.
    from tqdm import tqdm

    total = 0
    for benchmark in chosen.values():
        with contextlib.suppress(Exception):  # the benchmark itself will raise it again
            total += harness.steps(benchmark, rounds)
    with tqdm(total=total, unit="step", disable=not sys.stderr.isatty()) as bar:

        def advance(what: str) -> None:
            bar.set_description(what)
            bar.update()

        yield advance


def main(command_line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--all", action="store_true", help="also benchmarks that take long")
    parser.add_argument("--rounds", type=int, help="rounds of each contender (default: each benchmark's own)")
    parser.add_argument("--minutes", type=float, help="after this time each benchmark has one round")
    parser.add_argument("--json", type=Path, help="keep every round in this file")
    parser.add_argument("--record", metavar="NAME", help="keep every round in benchmarks/results, for the docs")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="compare with this checkout, not TensorPipe")
    arguments = parser.parse_args(command_line)

    loaded = {name: load_or_tell(name) for name in arguments.names or BENCHMARKS}
    chosen = {name: benchmark for name, benchmark in loaded.items() if benchmark is not None}
    lost = sorted(loaded.keys() - chosen.keys())
    if not arguments.names and not torch.cuda.is_available():
        chosen = {name: benchmark for name, benchmark in chosen.items() if not benchmark.needs_gpu}
    if not arguments.names and not arguments.all:
        chosen = {name: benchmark for name, benchmark in chosen.items() if benchmark.in_short_set}
    if arguments.against:
        other = arguments.against.resolve()
        if not list(other.glob("torch_ucx_rpc/_C*.so")):
            parser.error(f"{other} has no extension: run `python setup.py build_ext --inplace` there")
        compared = {name: jobs.against(benchmark, other) for name, benchmark in chosen.items()}
        chosen = {name: benchmark for name, benchmark in compared.items() if benchmark.contenders()}
    records = [kept.Record(arguments.json)] if arguments.json else []
    if arguments.record:
        records.append(kept.Record(kept.RESULTS / f"{arguments.record}.json", keeps_others=bool(arguments.names)))

    results = {}
    began = time.monotonic()
    with progress(chosen, arguments.rounds) as advance:
        for name, benchmark in chosen.items():
            load_before, started = os.getloadavg()[0], time.monotonic()
            is_late = arguments.minutes is not None and started - began > 60 * arguments.minutes
            results[name] = measured(name, benchmark, 1 if is_late else arguments.rounds, advance)
            for record in records:
                record.add(name, results[name], load_before, time.monotonic() - started)
            print("\n".join(harness.table(results[name])), end="\n\n", flush=True)
            took, all_took = time.monotonic() - started, time.monotonic() - began
            said = f"{len(results)} of {len(chosen)} done: {name} took {took:.0f} s, all {all_took:.0f} s"
            print(said, file=sys.stderr, flush=True)

    for name, lanes in jobs.LANES.items():
        print(f"{name} went by {lanes}")
    verdicts = [verdict for result in results.values() for verdict in result.verdicts()]
    missed = [verdict for verdict in verdicts if not verdict.holds]
    failed = {name: sorted(result.failures) for name, result in results.items() if result.failures}
    for verdict in missed:
        print(f"MISSED: {verdict}")
    for name, contenders in failed.items():
        print(f"FAILED in {name}: {', '.join(contenders)}")
    for name in lost:
        print(f"NOT LOADED: {name}")
    print(f"{len(verdicts) - len(missed)} of {len(verdicts)} bounds hold.")
    return 1 if missed or failed or lost else 0


if __name__ == "__main__":
    sys.exit(main())
