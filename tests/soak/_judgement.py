"""`judge`: the events of a run that must not happen."""

from __future__ import annotations

import collections
import dataclasses
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ._journal import KINDS, UNCOUNTED, Step, writer_of

# The name of a worker in errors (docs/failure_model.md).
_WORKER = re.compile(r"worker '(\w+)' \(rank (\d+), pid (\d+) on (\w+)\)")
# The failure of a leaving worker's handlers.
_LEAVING = re.compile(r"RPC is not running on worker '(\w+)': it has been shut down")
_MOST_EXAMPLES = 5
# The refusal of a name (docs/services.md).
_HAS_IT = re.compile(r"it is a value of worker '(\w+)'")
# The refusal of a server with an unknown host.
_NO_HOST = re.compile(r"'(\w+)' cannot be a host of a server: no living worker has that name")
# The failure of pushes when all their hosts are lost (docs/reduction.md).
_STATE_IS_LOST = re.compile("all hosts of the server")
# The failures of names and pushes while no epoch is in force (docs/development/membership.md).
_UNDECIDED = re.compile("no worker decides|the decider of the group does not answer|is cut off from the others")
# The refusal of an RRef whose owner's rank another worker has (RRefLost).
_OWNER_IS_REPLACED = "owner is gone and another worker has its rank"
# TorchScript's failure in two threads at once (python/cpython issue 106905), before CPython 3.11.8 and 3.12.2.
_TWO_PARSED = "AST constructor recursion depth mismatch"
_MAY_NOT_PARSE_TWICE = sys.version_info < (3, 11, 8) or (3, 12) <= sys.version_info < (3, 12, 2)
# The time to forget a killed worker's names if its kernel reports the end. If the worker only falls silent, forgetting
# takes this many times the limit.
_FORGETTING_S, _SILENCE = 1.0, 1.5
# A run needs this many answers of each kind of call. On two busy cores the rarest kind gets about a hundred.
_ANSWERS_A_MINUTE = 10


@dataclasses.dataclass(frozen=True)
class Finding:
    """An event that must not happen, and how often it did."""

    what: str
    count: int
    examples: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The outcome of a run: the reasons of the calls that failed, and the findings that have no reason."""

    findings: list[Finding]
    reasons: dict[str, int]


@dataclasses.dataclass(frozen=True)
class _Membership:
    """A membership of a worker. It can be lost only after its end, or when a host was parted from the others."""

    rank: int
    generation: int
    # "rank.generation number": one for each membership.
    life: str
    name: str
    pid: int
    host: str
    joining: float
    end: float
    # If it was killed: when the kernel had ended the process and closed its connections. Else ``end``.
    gone: float
    was_killed: bool


@dataclasses.dataclass(frozen=True)
class _Failure:
    began: float
    at: float
    hosts: frozenset[str]
    names: frozenset[str]
    text: str


def judge(
    calls: np.ndarray,
    events: Iterable[dict[str, Any]],
    timeline: Iterable[dict[str, Any]],
    heartbeat_limit: float,
) -> Judgement:
    """Compare the journals of the workers with the misfortunes that struck them.

    Args:
        calls: entries of all journals, as of `read_calls`.
        events: of all journals, as of `read_events`.
        timeline: of `Chaos`.
        heartbeat_limit: that of the workers, in seconds. A shorter cut loses no worker.
    """
    events, timeline = list(events), list(timeline)
    history = _History(events, timeline, heartbeat_limit)
    found = _Findings()
    _judge_executions(calls, found)
    _judge_ends(calls, {(m.rank, m.generation) for m in history.memberships if m.was_killed}, found)
    reasons: collections.Counter[str] = collections.Counter()
    for event in events:
        what = event["what"]
        if what in ("failed", "not admitted"):
            reason = history.reason(event)
            reasons[reason or "unexplained"] += 1
            if not reason:
                found.add(f"{what} for no reason: {event.get('kind', '')}", _shown(event))
        elif what == "wrong" and (reason := history.why_names_differ(event)):
            reasons[reason] += 1
        elif what in ("names", "taken"):
            if stale := history.stale_names(event):
                found.add("a name has outlived its worker", *stale, count=len(stale))
        elif what in ("wrong", "split", "hangs"):
            found.add(
                {"wrong": "wrong answer", "split": "a worker does not see all others", "hangs": "hangs"}[what],
                _shown(event),
            )
    return Judgement(found.all(), dict(reasons.most_common()))


def what_did_not_happen(
    answered: Mapping[str, int], misfortunes: Mapping[str, int], expected: Collection[str], minutes: float
) -> list[Finding]:
    """Return findings about calls that were not made and misfortunes that did not happen.

    Args:
        answered: executions that were answered, by the kind of call.
        misfortunes: how often each happened. ``expected`` has the ones that must happen.
    """
    fewest = max(1, round(_ANSWERS_A_MINUTE * minutes))
    idle = [f"{kind}: {count} of at least {fewest}" for kind, count in answered.items() if count < fewest]
    absent = [what for what in expected if not misfortunes.get(what)]
    findings = []
    if idle:
        findings.append(Finding("hardly any call of a kind was answered", len(idle), tuple(idle)))
    if absent:
        findings.append(Finding("a misfortune did not happen", len(absent), tuple(absent)))
    return findings


class _Findings:
    def __init__(self) -> None:
        self._examples: dict[str, list[str]] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, what: str, *examples: str, count: int = 1) -> None:
        self._counts[what] += count
        kept = self._examples.setdefault(what, [])
        kept.extend(examples[: _MOST_EXAMPLES - len(kept)])

    def all(self) -> list[Finding]:
        return [Finding(what, count, tuple(self._examples[what])) for what, count in self._counts.items()]


def _judge_executions(calls: np.ndarray, found: _Findings) -> None:
    numbers, counts = np.unique(calls["call"][calls["step"] == Step.EXECUTED], return_counts=True)
    if (doubled := numbers[counts > 1]).size:
        found.add("executed more than once", *map(_call, doubled), count=doubled.size)
    # Some calls that time out by design are dropped before they run.
    exempt = [KINDS.index(kind) for kind in (*UNCOUNTED, "timeout")]
    answered = calls[(calls["step"] == Step.ANSWERED) & ~np.isin(calls["kind"], exempt)]["call"]
    if (unfounded := np.setdiff1d(answered, numbers)).size:
        found.add("answered and not executed", *map(_call, unfounded), count=unfounded.size)
    begun = calls["call"][calls["step"] == Step.BEGUN]
    if (strange := np.setdiff1d(numbers, begun)).size:
        found.add("executed and never begun", *map(_call, strange), count=strange.size)


def _judge_ends(calls: np.ndarray, killed: set[tuple[int, int]], found: _Findings) -> None:
    begun = calls["call"][calls["step"] == Step.BEGUN]
    ended = calls["call"][(calls["step"] == Step.ANSWERED) | (calls["step"] == Step.FAILED)]
    open_ = [call for call in np.setdiff1d(begun, ended).tolist() if writer_of(call) not in killed]
    if open_:
        found.add("neither answered nor failed", *map(_call, open_), count=len(open_))
    numbers, counts = np.unique(ended, return_counts=True)
    if (twice := numbers[counts > 1]).size:
        found.add("ended more than once", *map(_call, twice), count=twice.size)


def _call(number: int) -> str:
    rank, generation = writer_of(int(number))
    return f"call {int(number):#x} of {rank}.{generation}"


def _shown(event: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in event.items())


class _History:
    """The members over time, and what parted them."""

    def __init__(self, events: list[dict[str, Any]], timeline: list[dict[str, Any]], heartbeat_limit: float) -> None:
        self._limit = heartbeat_limit
        self._parted = [event for event in timeline if "parted" in event]
        # A group may leave out workers that are merely silent (docs/services.md).
        self._left_out = [event for event in timeline if "left out" in event]
        self._timeline = timeline
        kills = {event["life"]: event for event in timeline if event["what"] == "kill"}
        self.memberships = []
        for event in sorted(events, key=lambda event: event["at"]):
            if event["what"] != "joining":
                continue
            life = (event["rank"], event["generation"])
            leaving = [e["at"] for e in events if e["what"] == "leaving" and (e["rank"], e["generation"]) == life]
            left = min((at for at in leaving if at > event["at"]), default=float("inf"))
            kill = kills.get(f"{life[0]}.{life[1]}", {"at": float("inf")})
            died = kill["at"]
            who = {name: event[name] for name in ("rank", "generation", "name", "pid", "host")}
            end, was_killed = min(left, died), died < left
            gone = kill.get("gone", end) if was_killed else end
            before = sum((m.rank, m.generation) == life for m in self.memberships)
            name = f"{life[0]}.{life[1]} {before}"
            self.memberships.append(
                _Membership(life=name, joining=event["at"], end=end, gone=gone, was_killed=was_killed, **who)
            )
        self._joined = [event for event in events if event["what"] == "joined"]
        self._host_of = {m.name: m.host for m in self.memberships}

    def reason(self, event: dict[str, Any]) -> str:
        """Return the misfortune that explains a failed call or join, or an empty text."""
        failure = self._failure(event)
        for name, _, pid, host in _WORKER.findall(failure.text):
            if reason := self._why_gone(failure, name, int(pid), host):
                return reason
        if any(self._has_left(failure, name) for name in _LEAVING.findall(failure.text)):
            return "it left"
        if "could not find destination worker" in failure.text and self._was_anybody_absent(failure):
            return "it had not joined yet"
        if _OWNER_IS_REPLACED in failure.text and self._was_anybody_absent(failure):
            return "the owner of an RRef was replaced"
        if absent := _NO_HOST.findall(failure.text):
            return "a host had ended" if self._was_absent(absent[0], failure) else self._why_parted(failure)
        if event["what"] == "not admitted" and self._is_amid(failure, "cut", "cut off"):
            return "the Store was out of reach"
        if "ran for more than set timeout" in failure.text and self._is_amid(failure, "stall"):
            return "the machine stood still"
        if re.search("many (open files|files open)", failure.text) and self._is_amid(failure, "no files"):
            return "it could not open files"
        if _TWO_PARSED in failure.text and _MAY_NOT_PARSE_TWICE:
            return "two threads of CPython parsed at once"
        if _STATE_IS_LOST.search(failure.text):
            return self._why_state_is_lost(failure, event["among"][:2])
        if _UNDECIDED.search(failure.text) and (reason := self._why_parted(failure, self._host_of.values())):
            return f"no epoch was in force; {reason}"
        if _UNDECIDED.search(failure.text) and event.get("kind") in ("push", "name"):
            return self._why_left_out(failure, self._host_of.values())
        return self.why_names_differ(event)

    def why_names_differ(self, event: dict[str, Any]) -> str:
        """Return the reason why workers disagree on names: during a cut each side has a decider."""
        if event.get("kind") != "name":
            return ""
        parted = self._why_parted(self._failure(event), self._host_of.values())
        return parted and f"two workers decided on names; {parted}"

    def _failure(self, event: dict[str, Any]) -> _Failure:
        names = frozenset([*event.get("among", []), f"worker{event['rank']}"])
        hosts = frozenset(self._host_of[name] for name in names if name in self._host_of)
        return _Failure(event.get("began", event["at"]), event["at"], hosts, names, event["error"])

    def stale_names(self, event: dict[str, Any]) -> list[str]:
        """Return the names of dead workers that a worker still knew too long after the death."""
        holders = _HAS_IT.findall(event.get("error", ""))
        known = [m for m in self.memberships if m.joining <= event["at"]]
        lives = [next(m for m in known if m.life == life) for life in event.get("lives", ())]
        # The refusal names only the worker: take its latest life.
        lives += [max((m for m in known if m.name == name), key=lambda m: m.joining) for name in holders]
        return [
            f"{m.name} (life {m.life}) has ended {event['began'] - m.gone:.2f} s ago: {_shown(event)}"
            for m in lives
            if m.gone + self._longest_known(m, event) < event["began"]
        ]

    def _longest_known(self, gone: _Membership, event: dict[str, Any]) -> float:
        quiet = [e for e in self._timeline if "until" in e and e["at"] <= event["at"] and gone.end <= e["until"]]
        return self._limit * _SILENCE + sum(e["until"] - e["at"] for e in quiet) if quiet else _FORGETTING_S

    def _why_state_is_lost(self, failure: _Failure, among: list[str]) -> str:
        if reason := self._why_parted(failure):
            return reason
        ended = {m.name for m in self.memberships if failure.began - self._limit <= m.end <= failure.at}
        return "both hosts were lost" if ended.issuperset(among) else ""

    def _is_amid(self, failure: _Failure, *kinds: str) -> bool:
        amid = [event for event in self._timeline if event["what"] in kinds]
        return any(event["at"] <= failure.at and failure.began <= event["until"] for event in amid)

    def _why_gone(self, failure: _Failure, name: str, pid: int, host: str) -> str:
        for gone in self.memberships:
            if (gone.name, gone.pid, gone.host) != (name, pid, host) or not gone.joining <= failure.at:
                continue
            # A call that began after the successor's join went to the successor.
            if gone.end <= failure.at and failure.began <= self._next_joined(name, gone.end) + self._limit:
                return "its process was killed" if gone.was_killed else "it left"
            if reason := self._why_parted(failure, {host}):
                return reason
        return ""

    def _has_left(self, failure: _Failure, name: str) -> bool:
        return any(
            gone.end <= failure.at and failure.began <= self._next_joined(name, gone.end) + self._limit
            for gone in self.memberships
            if gone.name == name and not gone.was_killed
        )

    def _next_joined(self, name: str, after: float) -> float:
        return min((e["at"] for e in self._joined if e["name"] == name and e["at"] > after), default=float("inf"))

    def _repaired(self, cut: dict[str, Any]) -> float:
        names = [name for name, host in self._host_of.items() if host == cut["host"]]
        return max((self._next_joined(name, cut["until"]) for name in names), default=cut["until"]) + self._limit

    def _was_anybody_absent(self, failure: _Failure) -> bool:
        if any(self._was_absent(name, failure) for name in failure.names):
            return True
        return bool(self._why_parted(failure))

    def _was_absent(self, name: str, failure: _Failure) -> bool:
        ends = [m.end for m in self.memberships if m.name == name and m.end <= failure.at]
        # The other workers learn of a new worker one after the other.
        return failure.began <= self._next_joined(name, max(ends, default=0.0)) + self._limit

    def _why_parted(self, failure: _Failure, hosts: Collection[str] = ()) -> str:
        """Name a cut of a host that takes part in the call, or of one of ``hosts``. Return an empty text if there was
        none."""
        for cut in self._parted:
            if cut["host"] in failure.hosts.union(hosts) and self._has_parted(cut, failure):
                return f"a host was parted from the others: {cut['what']}"
        return ""

    def _why_left_out(self, failure: _Failure, hosts: Collection[str]) -> str:
        for cut in self._left_out:
            if cut["host"] in hosts and cut["left out"] <= failure.at and failure.began <= cut["until"] + self._limit:
                return f"its group has left a host out: {cut['what']}"
        return ""

    def _has_parted(self, cut: dict[str, Any], failure: _Failure) -> bool:
        return cut["parted"] <= failure.at and failure.began <= self._repaired(cut)
