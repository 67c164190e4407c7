"""`run`: a soak from the start of its workers to its report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.labs import VirtualHosts

from ._chaos import Misfortunes
from ._crew import Crew, Member, WorkerEnded
from ._journal import read_calls, read_events
from ._judgement import Finding, judge, what_did_not_happen
from ._leftovers import left_by_workers, left_on_hosts
from ._report import Report, count_misfortunes, gibibytes_of, kinds_of, memory_of
from ._worker import HEARTBEAT_LIMIT_S, LONGEST_CALL_S, OPTIONS, Life, live

_HOSTS = ("a", "b", "c")
_WORKERS = 6
_STARTING_S = 120.0
# The time after the last misfortune until all must see each other.
_PEACE_S = 2.0
# The time that a worker has to end its calls, and to leave or join again.
_ENDING_S = LONGEST_CALL_S + 60


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of soak: the misfortunes, and the workers.

    ``judge_more`` gets the events of all journals and the timeline, and returns findings, and lines for the report.
    """

    misfortunes: Callable[[Crew, int], Misfortunes]
    options: dict[str, Any] = dataclasses.field(default_factory=lambda: OPTIONS)
    heartbeat_limit: float = HEARTBEAT_LIMIT_S
    is_fixed: bool = False
    body: Callable[[int, Life], dict[str, int]] = live
    # A run may take this much longer, until every misfortune has happened.
    longer: float = 120.0
    judge_more: Callable[[list[Any], list[Any]], tuple[list[Finding], list[str]]] = lambda events, timeline: ([], [])


def run_and_report(kind: Kind, minutes: float, seed: int, folder: Path) -> int:
    """Run, write and print the report, and return the exit code: 1 with findings. Drops files of an earlier run."""
    shutil.rmtree(folder, ignore_errors=True)
    journals = folder.resolve() / "journals"
    journals.mkdir(parents=True)
    report = run(kind, minutes, seed, journals)
    page = report.write(folder)
    print(f"{page.read_text()}\nwritten to {page}")
    return 1 if report.findings else 0


def run(kind: Kind, minutes: float, seed: int, directory: Path) -> Report:
    """Let the workers live for the time of the run, and return the report."""
    findings: list[Finding] = []
    was_cut_short = False
    with VirtualHosts(_HOSTS) as hosts:
        with (
            Crew(hosts, _WORKERS, seed, directory, kind.options, kind.is_fixed, kind.body) as crew,
            contextlib.closing(kind.misfortunes(crew, seed)) as chaos,
        ):
            begin = time.monotonic()
            try:
                if absent := crew.all_say("joined", _STARTING_S):
                    raise RuntimeError(f"not joined in {_STARTING_S:.0f} s: {', '.join(m.name for m in absent)}")
                begin = time.monotonic()
                while time.monotonic() < begin + 60 * minutes or (
                    chaos.missing and time.monotonic() < begin + 60 * minutes + kind.longer
                ):
                    chaos.strike()
                crew.watch(_PEACE_S)
                findings += _end(crew)
            except WorkerEnded as error:
                was_cut_short = True
                findings.append(Finding("a worker has ended by itself", 1, (str(error),)))
        kills = sum(event["what"] == "kill" for event in chaos.timeline)
        findings += left_on_hosts(hosts, kills)
    timeline = sorted([*chaos.timeline, *crew.stalls], key=lambda event: event["at"])
    (directory / "timeline.json").write_text(json.dumps(timeline, indent=1))
    calls, events = read_calls(directory), list(read_events(directory))
    judgement = judge(calls, events, timeline, kind.heartbeat_limit)
    more, notes = kind.judge_more(events, timeline)
    findings += more
    findings += left_by_workers(crew.current.values(), calls)
    survivors = [member for member in crew.current.values() if member.life.generation == 0]
    # A run that was cut short has too few samples, and a finding that says why.
    memory = [] if was_cut_short else [memory_of(member.name, member.samples) for member in survivors]
    for growing in (m for m in memory if not m.is_flat):
        findings.append(Finding("memory grows", 1, (str(growing),)))
    kinds, misfortunes = kinds_of(calls), count_misfortunes(timeline)
    findings += what_did_not_happen({k.kind: k.answered for k in kinds}, misfortunes, chaos.expected, minutes)
    return Report(
        minutes=(time.monotonic() - begin) / 60,
        seed=seed,
        workers=_WORKERS,
        hosts=len(_HOSTS),
        gibibytes=gibibytes_of(calls),
        kinds=kinds,
        misfortunes=misfortunes,
        reasons=judgement.reasons,
        memory=memory,
        findings=[*findings, *judgement.findings],
        notes=notes,
    )


def _end(crew: Crew) -> list[Finding]:
    """Let all calls end, all references go, and all workers leave. Return the workers that do not."""
    # A worker that must join again leaves only when its calls have ended. It must not leave while others look for it.
    if absent := crew.all_say("joined", _ENDING_S):
        return [_hang("a worker has not joined", absent)]
    for order, answer in (("stop", "stopped"), ("let go", "released")):
        crew.steps.done(order)
        if hanging := crew.all_say(answer, _ENDING_S):
            return [_hang(f"a worker has not {answer}", hanging)]
    crew.steps.done("leave")
    if hanging := crew.all_end(_ENDING_S):
        return [_hang("a worker has not left", hanging)]
    for member in crew.current.values():
        if member.result is None:
            raise WorkerEnded(member)
    return []


def _hang(what: str, members: list[Member]) -> Finding:
    return Finding(what, len(members), tuple(f"{member.name}\n{member.stacks()}" for member in members))
