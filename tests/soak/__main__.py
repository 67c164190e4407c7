"""``python -m tests.soak --minutes 1``: see the package's docstring."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from pathlib import Path

from tests.support.labs import VirtualHosts

from ._chaos import MISFORTUNES, Chaos
from ._crew import Crew, Member, WorkerEnded
from ._journal import read_calls, read_events
from ._judgement import Finding, judge, what_did_not_happen
from ._leftovers import left_by_workers, left_on_hosts
from ._report import Report, count_misfortunes, gibibytes_of, kinds_of, memory_of
from ._worker import HEARTBEAT_LIMIT_S, LONGEST_CALL_S

_HOSTS = ("a", "b", "c")
_WORKERS = 6
_STARTING_S = 120.0
# A run may take this much longer, until every misfortune has happened.
_LONGER_S = 120.0
# The time after the last misfortune until all must see each other.
_PEACE_S = 2.0
# The time of a worker to end its calls, and to leave, or to join again.
_ENDING_S = LONGEST_CALL_S + 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="of bad luck (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of all choices (default: any)")
    parser.add_argument("--report", type=Path, required=True, help="folder for report.json and report.md")
    arguments = parser.parse_args()
    print(f"soak: {arguments.minutes:g} minutes, seed {arguments.seed}", flush=True)
    # Drop the files of an earlier run.
    shutil.rmtree(arguments.report, ignore_errors=True)
    journals = arguments.report.resolve() / "journals"
    journals.mkdir(parents=True)
    report = run(arguments.minutes, arguments.seed, journals)
    page = report.write(arguments.report)
    print(f"{page.read_text()}\nwritten to {page}")
    return 1 if report.findings else 0


def run(minutes: float, seed: int, directory: Path) -> Report:
    """Let the workers live for the time of the run, and return the report."""
    findings: list[Finding] = []
    was_cut_short = False
    with VirtualHosts(_HOSTS) as hosts:
        with Crew(hosts, _WORKERS, seed, directory) as crew:
            chaos = Chaos(crew, seed)
            try:
                if absent := crew.all_say("joined", _STARTING_S):
                    raise RuntimeError(f"not joined in {_STARTING_S:.0f} s: {', '.join(m.name for m in absent)}")
                begin = time.monotonic()
                while time.monotonic() < begin + 60 * minutes or (
                    chaos.missing and time.monotonic() < begin + 60 * minutes + _LONGER_S
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
    judgement = judge(calls, events, timeline, HEARTBEAT_LIMIT_S)
    findings += left_by_workers(crew.current.values(), calls)
    survivors = [member for member in crew.current.values() if member.life.generation == 0]
    # A run that was cut short has too few samples, and a finding that says why.
    memory = [] if was_cut_short else [memory_of(member.name, member.samples) for member in survivors]
    for growing in (m for m in memory if not m.is_flat):
        findings.append(Finding("memory grows", 1, (str(growing),)))
    kinds, misfortunes = kinds_of(calls), count_misfortunes(timeline)
    findings += what_did_not_happen({kind.kind: kind.answered for kind in kinds}, misfortunes, MISFORTUNES, minutes)
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
    )


def _end(crew: Crew) -> list[Finding]:
    """Let all calls end, all references go, and all workers leave; return the workers that do not."""
    # A worker that must join again leaves only when its calls have ended, and not while others look for it.
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


if __name__ == "__main__":
    sys.exit(main())
