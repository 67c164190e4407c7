"""The results of the runs, in results/: one file for each configuration (backend, UCX_* variables, cores, GPUs).

New runs of a configuration replace the earlier ones. ``suites.json``, beside them, lists the suites of the torch that
ran.
"""

from __future__ import annotations

import collections
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
SUITES = RESULTS / "suites.json"

# From harmless to bad: the worst result of several runs counts.
OUTCOMES = ("passed", "skipped", "not collected", "not run", "failed")
COUNTED = ("collected", "passed", "skipped", "failed")

Data = dict[str, Any]


def record(files: Iterable[Path]) -> None:
    """Store the runs of one configuration in place of the earlier ones."""
    from ._suites import installed_release, installed_suites

    reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for file, report in zip(files, reports, strict=True):
        if not report["complete"]:
            sys.exit(f"{file} is of a run that was broken off: nothing is stored.")
        if (report["configuration"], report["versions"]) != (reports[0]["configuration"], reports[0]["versions"]):
            sys.exit(f"{file} and {files[0]} are not of the same configuration: store them one after the other.")
    lists = installed_suites()
    RESULTS.mkdir(exist_ok=True)
    write(SUITES, {"torch": installed_release(), "lists": lists})
    kept = {**condensed(reports, lists), "commit": commit()}
    write(RESULTS / f"{file_name(reports[0]['configuration'])}.json", kept)


def commit() -> str:
    """Return the commit of the sources that just ran, with "-dirty" if the package or the tests differ from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    # Results that the last configuration wrote do not count as a difference.
    sources = (":/torch_ucx_rpc", ":/tests", ":!/tests/conformance/results")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *sources)
    return (f"{head}-dirty" if changed else head) or "unknown"


def _git(*command: str) -> str:
    found = subprocess.run(["git", *command], cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def file_name(configuration: Data) -> str:
    """Return a name such as ucx-tcp-self-2-cores."""
    parts = [configuration["backend"], *configuration["environment"].values(), amount(configuration, "cores")]
    if configuration["gpus"]:
        parts.append(amount(configuration, "gpus"))
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower())


def amount(configuration: Data, name: str) -> str:
    unit = {"cores": "core", "gpus": "GPU"}[name]
    return f"{configuration[name]} {unit}" + ("" if configuration[name] == 1 else "s")


def condensed(reports: list[Data], lists: Data) -> Data:
    """Return the counts, and the names of the tests that did not pass in every run."""
    suites, exceptions = {}, {}
    for suite, tests in ((suite, tests) for listed in lists.values() for suite, tests in listed.items()):
        runs = [report["outcomes"].get(suite, {}) for report in reports]
        collected = set().union(*runs)
        if not collected:
            continue
        counts = collections.Counter({"collected": len(collected)})
        for test in sorted(collected.union(tests)):
            ends = [run.get(test, ("not collected", "")) for run in runs]
            worst = max((outcome for outcome, _ in ends), key=OUTCOMES.index)
            counts[worst] += 1
            if worst != "passed":
                exceptions[f"{suite}.{test}"] = sentence(worst, ends)
        suites[suite] = {name: counts[name] for name in COUNTED}
    return {
        "configuration": reports[0]["configuration"],
        "versions": reports[0]["versions"],
        "runs": [run_of(report) for report in reports],
        "suites": suites,
        "not passed": exceptions,
    }


def sentence(worst: str, ends: list[list[str]]) -> str:
    """Return a text such as "skipped: Need at least 1 CUDA device", or "failed in 1 of 3 runs: RuntimeError: no"."""
    reasons = [reason for outcome, reason in ends if outcome == worst]
    often = f" in {len(reasons)} of {len(ends)} runs" if len(reasons) < len(ends) else ""
    return f"{worst}{often}" + (f": {reasons[0]}" if reasons[0] else "")


def run_of(report: Data) -> Data:
    counts = collections.Counter(outcome for tests in report["outcomes"].values() for outcome, _ in tests.values())
    return {"started": report["started"], "seconds": report["seconds"], "outcomes": counts}


def write(file: Path, data: Data) -> None:
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def stored() -> tuple[Data, list[Data]]:
    """Return suites.json and the results, each backend's plainest configuration first."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in RESULTS.glob("*.json") if file != SUITES]

    def plainest_first(result: Data) -> tuple:
        chosen = result["configuration"]
        return chosen["backend"] != "UCX", chosen["gpus"], chosen["environment"] != {}, -chosen["cores"], str(chosen)

    return json.loads(SUITES.read_text(encoding="utf-8")), sorted(results, key=plainest_first)
