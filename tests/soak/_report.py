"""A run in words and numbers: `Report`, as JSON and as Markdown."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._crew import Sample
from ._journal import KINDS, Step
from ._judgement import Finding

_MIB = 2**20
# The part of a run, at its beginning, in which pools and caches fill.
_WARM_UP = 0.3
_BLOCKS = 8
# The tolerated growth of a run of any length: allocators and a group with more members take memory. If the warm-up is
# shorter than `_COLD_MINUTES`, caches still fill by 10 to 36 MiB a minute, and more growth is tolerated.
_TOLERATED_MIB = 24
_COLD_MINUTES = 2
_TOLERATED_WHEN_COLD_MIB = 64
# A slope counts from this many standard errors on.
_NOISES = 2


@dataclasses.dataclass(frozen=True)
class KindOfCall:
    """All calls of a kind. A call of several executions, such as a nested one, counts once for each execution."""

    kind: str
    begun: int
    answered: int
    failed: int
    p50_ms: float
    p99_ms: float


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of a worker that lived from the beginning to the end, in MiB.

    Resident memory rises and falls with the tensors in flight. A leak shows in the lowest values. So the slope is
    fitted to the minima of equal parts of the time, and the noise is its standard error. The memory is flat if its
    growth is tolerated, or if the slope is at most its noise: a smaller leak does not show.
    """

    name: str
    first_mib: float
    last_mib: float
    slope_mib_per_minute: float
    noise_mib_per_minute: float
    growth_mib: float
    tolerated_mib: float
    is_flat: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of a run.

    Attributes:
        misfortunes: how often each misfortune happened, by the names of `MISFORTUNES` and "rejoin"; and "stall", how
            often the machine itself stood still for seconds.
        reasons: the explanations of failed calls, and their numbers.
        findings: the events that must not happen.
        notes: further results, lines of Markdown.
    """

    minutes: float
    seed: int
    workers: int
    hosts: int
    gibibytes: float
    kinds: list[KindOfCall]
    misfortunes: dict[str, int]
    reasons: dict[str, int]
    memory: list[Memory]
    findings: list[Finding]
    notes: list[str] = dataclasses.field(default_factory=list)

    def write(self, directory: Path) -> Path:
        """Write ``report.json`` and ``report.md``; return the path of ``report.md``."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "report.json").write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        page = directory / "report.md"
        page.write_text(self.to_markdown())
        return page

    def to_markdown(self) -> str:
        answered = sum(kind.answered for kind in self.kinds)
        lines = [
            f"# Soak of {self.minutes:.1f} minutes, seed {self.seed}",
            "",
            f"{self.workers} workers on {self.hosts} hosts; {answered:,} executions answered, {self.gibibytes:.1f} GiB "
            f"of tensors.",
            "",
            *self.notes,
            *table(("misfortune", "times"), [(what, f"{count:,}") for what, count in self.misfortunes.items()]),
            "",
            *table(
                ("calls", "begun", "answered", "failed", "p50, ms", "p99, ms"),
                [
                    (k.kind, f"{k.begun:,}", f"{k.answered:,}", f"{k.failed:,}", f"{k.p50_ms:.1f}", f"{k.p99_ms:.0f}")
                    for k in self.kinds
                ],
            ),
            "",
            *table(("failed because", "calls"), [(why, f"{count:,}") for why, count in self.reasons.items()]),
            "",
            *table(
                ("resident memory, MiB", "at first", "at last", "slope a minute", "its noise", "grown", "tolerated"),
                [
                    (
                        m.name,
                        f"{m.first_mib:.0f}",
                        f"{m.last_mib:.0f}",
                        f"{m.slope_mib_per_minute:+.2f}",
                        f"{m.noise_mib_per_minute:.2f}",
                        f"{m.growth_mib:+.0f}",
                        f"{m.tolerated_mib:.0f}",
                    )
                    for m in self.memory
                ],
            ),
            "",
            "No findings." if not self.findings else "## Findings",
        ]
        if any(m.tolerated_mib > _TOLERATED_MIB for m in self.memory):
            lines += ["", "Too short to tell growth of memory from caches that fill: a run of 7 minutes or more does."]
        for finding in self.findings:
            lines += ["", f"{finding.count} x {finding.what}", *(f"- `{example}`" for example in finding.examples)]
        return "\n".join(lines) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def kinds_of(calls: np.ndarray) -> list[KindOfCall]:
    return [_kind_of(kind, calls[calls["kind"] == number]) for number, kind in enumerate(KINDS)]


def _kind_of(kind: str, calls: np.ndarray) -> KindOfCall:
    begun, answered, failed = (calls[calls["step"] == step] for step in (Step.BEGUN, Step.ANSWERED, Step.FAILED))
    _, at_begin, at_end = np.intersect1d(begun["call"], answered["call"], return_indices=True)
    took = (answered["time"][at_end] - begun["time"][at_begin]) * 1e3
    p50, p99 = np.percentile(took, (50, 99)) if took.size else (math.nan, math.nan)
    return KindOfCall(kind, begun.size, answered.size, failed.size, float(p50), float(p99))


def gibibytes_of(calls: np.ndarray) -> float:
    """Return the GiB of tensors, in both directions."""
    return float(calls["bytes"][calls["step"] == Step.ANSWERED].sum(dtype=np.int64)) / 2**30


def memory_of(name: str, samples: Sequence[Sample]) -> Memory:
    times = np.array([sample.time for sample in samples]) / 60
    resident = np.array([sample.resident_bytes for sample in samples]) / _MIB
    warm_up = _WARM_UP * (times[-1] - times[0])
    is_warm = times >= times[0] + warm_up
    blocks = zip(*(np.array_split(values[is_warm], _BLOCKS) for values in (times, resident)), strict=True)
    middles, floors = zip(*((block.mean(), values.min()) for block, values in blocks), strict=True)
    (slope, _), covariance = np.polyfit(middles, floors, 1, cov=True)
    noise = math.sqrt(covariance[0][0])
    growth = slope * (middles[-1] - middles[0])
    tolerated = _TOLERATED_MIB if warm_up >= _COLD_MINUTES else _TOLERATED_WHEN_COLD_MIB
    is_flat = slope <= _NOISES * noise or growth <= tolerated
    return Memory(
        name, float(floors[0]), float(floors[-1]), float(slope), noise, float(growth), tolerated, bool(is_flat)
    )


def count_misfortunes(timeline: Sequence[dict[str, Any]]) -> dict[str, int]:
    return dict(collections.Counter(event["what"] for event in timeline))
