"""Cuts of up to 40 s, resets and dying proxies, at default limits: no call is lost or doubled.

    python -m tests.soak.resuming --minutes 10 --report build/soak/resuming     as root

The workers and calls are those of the general soak, in a group of fixed size or a dynamic one. No worker dies, so no
call may fail. Only names, and pushes without an epoch, may fail while a group leaves out the workers of a silent host.
Each worker also calls each other worker all the time, with small calls: the first answer after a repair comes within
`_SOON_S`.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import math
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed.rpc as rpc

import torch_ucx_rpc
from tests.support.labs import VirtualHost
from tests.support.workers import Stalls, Steps, agent, worker_name

from ._chaos import Misfortunes
from ._crew import Crew
from ._journal import Journal
from ._judgement import Finding
from ._proxy import Proxy
from ._report import table
from ._run import Kind, run_and_report
from ._worker import OPTIONS, Life, live

# The default limits survive cuts of these lengths (docs/failure_model.md). From `_LONG_S` on, others suspect the host.
_SHORTEST_S, _LONG_S, _LONGEST_S = 1.0, 10.0, 40.0
_SOON_S = 2.0
# A group leaves out a worker after a silence of this length. Names then fail by design (docs/services.md).
_LEFT_OUT_S = 3.0
# The pause after a misfortune. Waiting calls end in that pause.
_PEACE_S = (5.0, 10.0)
_PROBE_EVERY_S = 0.05
_LIFELINES = 4
# Each misfortune must happen in a short run too.
_LONGER_S = 400.0

SHORT, LONG = (_SHORTEST_S, _LONG_S), (_LONG_S, _LONGEST_S)
MISFORTUNES = (
    *("cut", "long cut", "link down", "long link down", "proxy down", "long proxy down"),
    *("reset", "reset while cut"),
)


class Cuts(Misfortunes):
    """Misfortunes after which all workers live and see each other.

    The workers of the last host reach the others by a proxy.
    """

    expected = MISFORTUNES

    def __init__(self, crew: Crew, seed: int) -> None:
        super().__init__(crew, seed)
        self._bag: list[str] = []
        *others, proxied = crew.hosts
        self._proxied, self._proxy = proxied, Proxy(proxied, [host.address for host in others])

    def close(self) -> None:
        self._proxy.close()

    def strike(self) -> None:
        if not self._bag:
            self._bag = [*MISFORTUNES, "reset"]
            self._choice.shuffle(self._bag)
        self._crew.watch(self._choice.uniform(*_PEACE_S))
        what = self._bag.pop()
        host = self._choice.choice(self._crew.hosts)
        length = LONG if what.startswith("long") else SHORT
        if what == "reset":
            self._during(what, host, host.reset_connections, lambda: None, (0, 0))
        elif what == "reset while cut":
            self._during(what, host, lambda: (host.cut(), host.reset_connections()), host.heal, length)
        elif what.endswith("cut"):
            self._during(what, host, host.cut, host.heal, length)
        elif what.endswith("link down"):
            self._during(what, host, host.link_down, host.link_up, length)
        else:
            self._during(what, self._proxied, self._proxy.die, self._proxy.live_again, length)

    def _during(
        self,
        what: str,
        host: VirtualHost,
        begin: Callable[[], object],
        end: Callable[[], object],
        length: tuple[float, float],
    ) -> None:
        event = {"what": what, "at": time.monotonic(), "host": host.name}
        self.timeline.append(event)
        begin()
        shortest, longest = length
        # Short cuts are more frequent.
        seconds = math.exp(self._choice.uniform(math.log(shortest), math.log(longest))) if longest else 0.0
        try:
            self._crew.watch(seconds)
        finally:
            end()
            event["until"] = time.monotonic()
            if event["until"] > event["at"] + _LEFT_OUT_S:
                event["left out"] = event["at"]


# ------------------------------------------------------------------------------------------------------------ a worker


def live_on(rank: int, life: Life) -> dict[str, int]:
    """A worker of the general soak, which also probes the others."""
    journal, steps = Journal(life.directory, rank, life.generation), Steps(life.directory)
    with Stalls() as stalls:
        others = [worker_name(other) for other in range(life.world_size) if other != rank]
        probes = [threading.Thread(target=probe, args=(to, life, journal, steps, stalls)) for to in others]
        for thread in probes:
            thread.start()
        left = live(rank, life)
        for thread in probes:
            thread.join()
    # The last agent still exists, with its lifelines to the workers of other hosts.
    if left.get("open: socket", 0) <= _LIFELINES:
        left.pop("open: socket", None)
    return left


def probe(to: str, life: Life, journal: Journal, steps: Steps, stalls: Stalls) -> None:
    """Call a worker until the order to stop, and write down when each call was answered."""
    while not steps.is_done("stop"):
        time.sleep(_PROBE_EVERY_S)
        if not steps.is_done(f"joined {life} 0") or to not in {info.name for info in agent().get_worker_infos()}:
            continue
        began, before = time.monotonic(), stalls.seconds()
        try:
            host = rpc.rpc_sync(to, socket.gethostname)
        except RuntimeError as error:
            journal.note("failed", kind="probe", among=[to], began=began, error=f"{type(error).__name__}: {error}")
        else:
            journal.note("probe", to=to, on=host, began=began, stalled=stalls.seconds() - before)
    [resumed] = [peer.times_resumed for peer in torch_ucx_rpc.statistics().peers if peer.name == to]
    journal.note("resumed", to=to, times=resumed)


# ------------------------------------------------------------------------------------------------------- the judgement


def judge_waits(
    events: Iterable[dict[str, Any]], timeline: Iterable[dict[str, Any]]
) -> tuple[list[Finding], list[str]]:
    """Return findings about late first answers, and lines about all of them.

    Args:
        events: of all journals, as of `read_events`.
        timeline: of `Cuts`.
    """
    events, cuts = list(events), [event for event in timeline if "host" in event]
    host_of = {worker_name(event["rank"]): event["host"] for event in events if event["what"] == "joined"}
    answers: dict[tuple[str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for event in events:
        if event["what"] == "probe":
            answers[worker_name(event["rank"]), event["to"]].append(event)
    waits: dict[str, list[float]] = {what: [] for what in MISFORTUNES}
    late = []
    for pair, probes in answers.items():
        times = [probe["at"] for probe in probes]
        for cut in cuts:
            if sum(host_of[name] == cut["host"] for name in pair) != 1:
                continue
            first = bisect.bisect_right(times, cut["until"])
            if first == len(times):
                late.append(f"{' to '.join(pair)}: no answer after {cut}")
                continue
            wait = times[first] - cut["until"]
            waits[cut["what"]].append(wait)
            if wait > _SOON_S + probes[first]["stalled"]:
                late.append(f"{' to '.join(pair)}: {wait:.2f} s after {cut}, {probes[first]}")

    def is_at_peace(pair: tuple[str, str], probe: dict[str, Any]) -> bool:
        mine = [cut for cut in cuts if cut["host"] in map(host_of.get, pair)]
        return not any(cut["at"] < probe["at"] and probe["began"] < cut["until"] + _SOON_S for cut in mine)

    others = [p["at"] - p["began"] for pair, probes in answers.items() for p in probes if is_at_peace(pair, p)]
    resumed = sum(event["times"] for event in events if event["what"] == "resumed")
    rows = [(f"first answer after: {what}", times) for what, times in waits.items()]
    rows.append(("all other small calls", others))
    lines = [
        f"Connections were resumed {resumed:,} times.",
        "",
        *table(
            ("seconds", "calls", "p50", "p90", "p99", "longest"),
            [
                (what, f"{len(times):,}", *(f"{part:.2f}" for part in np.percentile(times, (50, 90, 99, 100))))
                for what, times in rows
                if times
            ],
        ),
        "",
    ]
    findings = [Finding(f"a first answer was later than {_SOON_S:g} s", len(late), tuple(late[:10]))] if late else []
    if not resumed:
        findings.append(Finding("no connection was resumed", 1, ()))
    return findings, lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak.resuming", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="length of the soak (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of all choices (default: random)")
    parser.add_argument("--group", choices=("fixed", "dynamic"), help="(default: by the seed)")
    parser.add_argument("--report", type=Path, required=True, help="folder for report.json and report.md")
    arguments = parser.parse_args()
    group = arguments.group or random.Random(arguments.seed).choice(("fixed", "dynamic"))
    print(f"soak.resuming: {arguments.minutes:g} minutes, seed {arguments.seed}, a {group} group", flush=True)
    limit = torch_ucx_rpc.UcxRpcBackendOptions().heartbeat_limit
    # The limits are those that users have. A small pool is full before the growth of memory is measured.
    options = {"host_pool_bytes": OPTIONS["host_pool_bytes"]}
    kind = Kind(Cuts, options, limit, group == "fixed", live_on, _LONGER_S, judge_waits)
    return run_and_report(kind, arguments.minutes, arguments.seed, arguments.report)


if __name__ == "__main__":
    # Workers import their functions by the module's name.
    from tests.soak.resuming import main as main_of_module

    sys.exit(main_of_module())
