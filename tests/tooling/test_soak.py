"""The judge of ``tools/soak.sh`` finds faults, and excuses failures that a misfortune explains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.soak._journal import ENTRY, KINDS, Step
from tests.soak._judgement import Judgement, judge, what_did_not_happen

LIMIT = 4.0
BEGUN, EXECUTED, ANSWERED, FAILED = Step


def entries(*steps: tuple[int, Step], kind: str = "rpc_sync") -> np.ndarray:
    return np.array([(call, 10.0, 0, step, KINDS.index(kind), 0) for call, step in steps], ENTRY)


def event(rank: int, what: str, at: float, **values: Any) -> dict[str, Any]:
    return {"rank": rank, "generation": 0, "what": what, "at": at, **values}


def joined(rank: int, at: float, host: str, generation: int = 0) -> list[dict[str, Any]]:
    who = {"name": f"worker{rank}", "pid": 7 + generation, "host": host, "generation": generation}
    return [event(rank, what, at, **who) for what in ("joining", "joined")]


LOST = "WorkerLost: lost worker 'worker1' (rank 1, pid 7 on b): it has died or cannot be reached any more (why)"
MEMBERS = [*joined(0, 1.0, "a"), *joined(1, 1.0, "b"), *joined(2, 1.0, "c")]


def judged(
    calls: np.ndarray | None = None,
    failures: tuple[dict[str, Any], ...] = (),
    timeline: tuple[dict[str, Any], ...] = (),
    members: tuple[dict[str, Any], ...] = (),
) -> Judgement:
    return judge(entries() if calls is None else calls, [*MEMBERS, *members, *failures], timeline, LIMIT)


def failure(at: float, error: str = LOST, began: float | None = None, among: tuple[str, ...] = ("worker1",)) -> Any:
    began = at - 0.1 if began is None else began
    return event(0, "failed", at, kind="rpc_sync", among=list(among), began=began, error=error)


def test_a_call_that_was_executed_once_and_answered_is_in_order() -> None:
    assert judged(entries((1, BEGUN), (1, EXECUTED), (1, ANSWERED), (2, BEGUN), (2, FAILED))).findings == []


@pytest.mark.parametrize(
    ("steps", "finding"),
    [
        ((BEGUN, EXECUTED, EXECUTED, ANSWERED), "executed more than once"),
        ((BEGUN, EXECUTED, EXECUTED, FAILED), "executed more than once"),
        ((BEGUN, ANSWERED), "answered and not executed"),
        ((EXECUTED,), "executed and never begun"),
        ((BEGUN, EXECUTED), "neither answered nor failed"),
        ((BEGUN, EXECUTED, ANSWERED, FAILED), "ended more than once"),
    ],
)
def test_a_call_that_is_lost_or_doubled_is_a_finding(steps: tuple[Step, ...], finding: str) -> None:
    assert [found.what for found in judged(entries(*((1, step) for step in steps))).findings] == [finding]


KILL = {"what": "kill", "at": 9.9, "name": "worker1", "life": "1.0"}
CUT = {"what": "cut", "at": 9.0, "until": 11.0, "host": "b"}
CUT_OFF = {"what": "cut off", "at": 3.0, "parted": 5.0, "until": 9.5, "host": "b"}
RESET = {"what": "reset", "at": 9.0, "parted": 9.0, "until": 9.1, "host": "b"}
NO_FILES = {"what": "no files", "at": 9.0, "until": 11.0, "name": "worker0"}
TOO_MANY = "RuntimeError: could not send to worker 'worker2' (rank 2, pid 7 on c): too many files open"
NO_HOST = "ValueError: 'worker1' cannot be a host of a server: no living worker has that name; close to it: worker2"
CUT_OFF_REASON = "a host was parted from the others: cut off"
UNDECIDED = "RuntimeError: 'pushes 1' could not be made within rpc_timeout: the decider of the group does not answer"
GONE = "RuntimeError: all hosts of the server 'pushes 1' are lost: worker1, worker2"
BOTH = ("worker1", "worker2", "worker0")
KILL_2 = {"what": "kill", "at": 9.5, "name": "worker2", "life": "2.0"}
SUCCESSOR = tuple(joined(1, 10.5, "b", generation=1))


@pytest.mark.parametrize(
    ("failed", "timeline", "reason"),
    [
        (failure(10.0), (KILL,), "its process was killed"),
        (failure(9.0), (KILL,), "unexplained"),
        # The successor joined long before.
        (failure(20.0), (KILL,), "unexplained"),
        # The error names the pid of another process.
        (failure(10.0, LOST.replace("pid 7", "pid 6")), (KILL,), "unexplained"),
        (failure(10.0, "CallTimedOut: RPC ran for more than set timeout (1 ms)"), (KILL,), "unexplained"),
        (failure(10.0, NO_HOST), (KILL,), "a host had ended"),
        (failure(10.0, NO_HOST), (CUT,), "unexplained"),
        (failure(10.0), (CUT,), "unexplained"),
        (failure(5.1), (CUT_OFF,), CUT_OFF_REASON),
        # The failure comes before half the limit.
        (failure(4.9), (CUT_OFF,), "unexplained"),
        (failure(10.0), ({**CUT_OFF, "host": "c"},), "unexplained"),
        (failure(9.5), (RESET,), "a host was parted from the others: reset"),
        (failure(8.9), (RESET,), "unexplained"),
        (failure(10.0, TOO_MANY), (NO_FILES,), "it could not open files"),
        (failure(12.0, TOO_MANY), (NO_FILES,), "unexplained"),
        (failure(10.0, "RuntimeError: something else"), (KILL, CUT_OFF), "unexplained"),
        # The group waits for the workers of any silent host.
        (failure(10.0, UNDECIDED, among=()), (CUT_OFF,), f"no epoch was in force; {CUT_OFF_REASON}"),
        (failure(10.0, UNDECIDED, among=()), (KILL, CUT), "unexplained"),
        (failure(10.0, GONE, among=BOTH), (KILL, KILL_2), "both hosts were lost"),
        (failure(10.0, GONE, among=BOTH), (KILL,), "unexplained"),
    ],
)
def test_a_failure_needs_a_reason(failed: Any, timeline: tuple[dict[str, Any], ...], reason: str) -> None:
    judgement = judged(failures=(failed,), timeline=timeline, members=SUCCESSOR)
    assert judgement.reasons == {reason: 1}
    assert len(judgement.findings) == (reason == "unexplained")


TAKEN = "the name 'seat 1' is taken: it is a value of worker 'worker1' (rank 1); choose another name"
STOP = {"what": "stop", "at": 9.0, "until": 10.5, "host": "a"}


@pytest.mark.parametrize(
    ("known", "at", "timeline", "is_stale"),
    [
        ({"lives": ["1.0 0"]}, 10.5, (KILL,), False),
        ({"lives": ["1.0 0"]}, 12.0, (KILL,), True),
        ({"error": TAKEN}, 12.0, (KILL,), True),
        ({"error": TAKEN}, 12.0, (), False),
        # The worker, or its host, may have been unable to learn of the end.
        ({"lives": ["1.0 0"]}, 12.0, (KILL, STOP), False),
        # The kernel needs time to end a process, and closes its connections last.
        ({"lives": ["1.0 0"]}, 12.0, ({**KILL, "gone": 11.5},), False),
    ],
)
def test_a_name_that_outlives_its_worker_is_a_finding(
    known: dict[str, Any], at: float, timeline: tuple[dict[str, Any], ...], is_stale: bool
) -> None:
    looked = event(0, "taken" if "error" in known else "names", at, began=at, **known)
    whats = [found.what for found in judged(failures=(looked,), timeline=timeline).findings]
    assert whats == ["a name has outlived its worker"] * is_stale


@pytest.mark.parametrize(
    ("answered", "happened", "minutes", "findings"),
    [
        ({"rpc_sync": 10, "nested": 9}, {"kill": 1, "cut": 3}, 1, ["nested: 9 of at least 10"]),
        ({"rpc_sync": 300, "nested": 300}, {"kill": 1, "cut": 3}, 30, []),
        ({"rpc_sync": 10, "nested": 10}, {"kill": 0, "stall": 1}, 1, ["kill", "cut"]),
    ],
)
def test_a_run_in_which_little_happens_proves_nothing(
    answered: dict[str, int], happened: dict[str, int], minutes: float, findings: list[str]
) -> None:
    found = what_did_not_happen(answered, happened, ("kill", "cut"), minutes)
    assert [example for finding in found for example in finding.examples] == findings
