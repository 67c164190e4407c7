"""``torch-ucx-rpc top``: tables of a running job's statistics."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from _torch_ucx_rpc_cli import ExitCode
from torch_ucx_rpc import Latencies, Statistics
from torch_ucx_rpc._cli._console import check_seconds, console, human_bytes, human_us
from torch_ucx_rpc._observe import socket as observation

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class View:
    """All workers of a job at one time."""

    time_s: float
    # By rank; a text instead of statistics is the reason for their absence.
    workers: dict[int, Statistics | str]


class Job:
    """One job, as its workers on this host see it."""

    def __init__(self, found: list[observation.Found], sample: Statistics) -> None:
        self.found = found
        self._sample = sample

    def __str__(self) -> str:
        pids = ", ".join(str(found.pid) for found in self.found)
        return f"{len(self._sample.peers)} workers, here the processes {pids}"

    def view(self) -> View:
        """Ask the workers of this host directly, and the workers of other hosts through one of these. The view of an
        ended job is empty."""
        workers: dict[int, Statistics | str] = {}
        relay = None
        for found in self.found:
            with contextlib.suppress(OSError, ValueError):
                workers.update(found.ask())
                relay = found
        snapshots = [worker for worker in workers.values() if isinstance(worker, Statistics)]
        if relay is not None and snapshots:
            self._sample = snapshots[-1]
            elsewhere = [p.rank for p in self._sample.peers if p.rank not in workers and p.state in _THERE]
            if elsewhere:
                with contextlib.suppress(OSError, ValueError):
                    workers.update(relay.ask(elsewhere))
            for peer in self._sample.peers:
                workers.setdefault(peer.rank, peer.state)
        return View(time.monotonic(), dict(sorted(workers.items())))


_THERE = ("present", "resuming", "leaving")


def main(arguments: argparse.Namespace) -> int:
    if arguments.json and not arguments.once:
        arguments.error("--json goes with --once")
    check_seconds(arguments, "--interval", arguments.interval)
    out = None if arguments.json else console(arguments)
    jobs = jobs_of_this_host()
    if arguments.pid is not None:
        jobs = [job for job in jobs if arguments.pid in [found.pid for found in job.found]]
    if not jobs:
        whose = "" if arguments.pid is None else f" in process {arguments.pid}"
        print(
            f"top: no worker of this user runs on this host{whose}. Start this on a host of the job, as its user; in "
            f"containers, inside one of them (docker exec, kubectl exec).",
            file=sys.stderr,
        )
        return ExitCode.NO_JOB
    if len(jobs) > 1:
        print("top: several jobs have workers on this host; choose one with --pid:", file=sys.stderr)
        for job in jobs:
            print(f"  --pid {job.found[0].pid}  ({job})", file=sys.stderr)
        return ExitCode.NO_JOB
    view = jobs[0].view()
    if arguments.json:
        print(json.dumps({rank: w if isinstance(w, str) else w.to_values() for rank, w in view.workers.items()}))
    elif arguments.once:
        assert out is not None
        out.print(_picture(None, view, arguments, out))
    else:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(jobs[0], out, view, arguments)
    return ExitCode.OK


def jobs_of_this_host() -> list[Job]:
    """The jobs of this user."""
    answers: list[tuple[observation.Found, Statistics]] = []
    for found in observation.workers_of_this_host():
        with contextlib.suppress(OSError, ValueError):
            # A worker that has not met the others yet belongs to no job.
            answers += [(found, a) for a in found.ask().values() if isinstance(a, Statistics) and a.peers]
    jobs = []
    while answers:
        _, sample = answers[0]
        sessions = {peer.session for peer in sample.peers}
        members = [(found, other) for found, other in answers if other.session in sessions]
        answers = [answer for answer in answers if answer not in members]
        jobs.append(Job([found for found, _ in members], sample))
    return jobs


def _watch(job: Job, out: Any, view: View, arguments: argparse.Namespace) -> None:
    from rich.live import Live

    first = _picture(None, view, arguments, out)
    with contextlib.ExitStack() as stack:
        if out.is_terminal:
            live = stack.enter_context(Live(first, console=out, auto_refresh=False, screen=True))
            show = functools.partial(live.update, refresh=True)
        else:
            # For a file or a pipe, Live would write nothing before the end.
            show = out.print
            show(first)
        while view.workers:
            time.sleep(arguments.interval)
            before, view = view, job.view()
            show(_picture(before, view, arguments, out))
    out.print("top: the workers on this host have ended.")


def _picture(before: View | None, now: View, arguments: argparse.Namespace, out: Console) -> Table:
    """A table of the changes between two views, or since the beginning, at most as wide as ``out``."""
    make = _services if arguments.services else _peers if arguments.peers else _workers
    layout, rows = make(before, now)
    shown = list(layout.columns)
    # Otherwise rich measures the cells after cutting them.
    unbounded = out.options.update(width=1_000_000)
    for name in ("", *layout.least_important):
        shown = [column for column in shown if column.removesuffix("/s") != name]
        table = _table(layout, shown, rows, out.width)
        if out.measure(table, options=unbounded).maximum <= out.width:
            break
    return table


@dataclasses.dataclass(frozen=True)
class Layout:
    """The columns of a table: texts first, then figures, and the columns that a narrow terminal omits."""

    texts: tuple[str, ...]
    figures: tuple[str, ...]
    # In the order of omission, and without "/s".
    least_important: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return self.texts + self.figures


# A cell for each column, or fewer.
Rows: TypeAlias = list[tuple[str, ...]]


def _table(layout: Layout, shown: list[str], rows: Rows, width: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    hidden = [column for column in layout.columns if column not in shown]
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption=f"a wider terminal has: {', '.join(hidden)}" if hidden else None,
        caption_justify="left",
    )
    for column in shown:
        if column in layout.texts:
            # These columns also show errors of workers, which may be long.
            table.add_column(column, no_wrap=True, max_width=max(12, width // 5))
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = dict(zip(layout.columns, row, strict=False))
        table.add_row(*(cells.get(column, "") for column in shown))
    return table


def _workers(before: View | None, now: View) -> tuple[Layout, Rows]:
    per = "/s" if before else ""
    layout = Layout(
        ("worker", "host"),
        (
            f"calls{per}",
            "open",
            "p50",
            "p99",
            f"sent{per}",
            f"recv{per}",
            "run",
            "wait",
            "window",
            "pool",
            "failed",
        ),
        ("window", "pool", "run", "p50", "recv", "sent", "wait"),
    )
    rows: Rows = []
    for rank, worker in now.workers.items():
        if isinstance(worker, str):
            rows.append((f"{rank}", worker))
            continue
        earlier, seconds = _earlier(before, now, rank)
        calls, latencies = worker.calls_sent, worker.latencies
        sent, received = worker.bytes_sent, worker.bytes_received
        if earlier is not None:
            calls, latencies = calls - earlier.calls_sent, latencies - earlier.latencies
            sent, received = sent - earlier.bytes_sent, received - earlier.bytes_received
        rows.append(
            (
                worker.name,
                next(peer.host for peer in worker.peers if peer.rank == rank),
                f"{calls / seconds:.0f}",
                str(worker.calls_open),
                *_percentiles(latencies),
                human_bytes(sent / seconds),
                human_bytes(received / seconds),
                str(worker.requests_running),
                str(worker.requests_waiting + worker.window_waiting_messages),
                f"{worker.window_in_use_bytes / worker.window_limit_bytes:.0%}",
                human_bytes(worker.pool_in_use_bytes + worker.pool_cached_bytes),
                str(sum(peer.calls_failed for peer in worker.peers)),
            )
        )
    return layout, rows


def _peers(before: View | None, now: View) -> tuple[Layout, Rows]:
    per = "/s" if before else ""
    layout = Layout(
        ("from", "to", "state", "lanes"),
        (f"calls{per}", "open", "p50", "p99", f"sent{per}", "failed"),
        ("sent", "open", "p50", "failed"),
    )
    rows: Rows = []
    for rank, worker in now.workers.items():
        if isinstance(worker, str):
            rows.append((f"{rank}", "", worker))
            continue
        earlier, seconds = _earlier(before, now, rank)
        known = {peer.session: peer for peer in earlier.peers} if earlier else {}
        for peer in worker.peers:
            if not peer.calls_sent and not peer.lanes:
                continue
            old = known.get(peer.session)
            calls, sent, latencies = peer.calls_sent, peer.bytes_sent, peer.latencies
            if old is not None:
                calls, sent = calls - old.calls_sent, sent - old.bytes_sent
                latencies = latencies - old.latencies
            rows.append(
                (
                    worker.name,
                    peer.name,
                    peer.state,
                    ", ".join(peer.lanes),
                    f"{calls / seconds:.0f}",
                    str(peer.calls_open),
                    *_percentiles(latencies),
                    human_bytes(sent / seconds),
                    str(peer.calls_failed),
                )
            )
    return layout, rows


def _services(before: View | None, now: View) -> tuple[Layout, Rows]:
    per = "/s" if before else ""
    layout = Layout(("service", "worker"), ("replicas", f"calls{per}", "open", "errors"), ())
    rows = []
    for rank, worker in now.workers.items():
        if isinstance(worker, str):
            continue
        earlier, seconds = _earlier(before, now, rank)
        known = {service.name: service for service in earlier.services} if earlier else {}
        for service in worker.services:
            calls = service.calls
            if service.name in known and known[service.name].calls <= calls:
                calls -= known[service.name].calls
            figures = (str(len(service.replicas)), f"{calls / seconds:.0f}", str(service.open), str(service.errors))
            rows.append((service.name, rank, (service.name, worker.name, *figures)))
    return layout, [row for _, _, row in sorted(rows)]


def _earlier(before: View | None, now: View, rank: int) -> tuple[Statistics | None, float]:
    """Return the same worker in the previous view, and the seconds since; None and 1 to count from the beginning."""
    if before is None:
        return None, 1.0
    worker, earlier = now.workers[rank], before.workers.get(rank)
    assert isinstance(worker, Statistics)
    # A restarted worker counts from zero.
    is_same = isinstance(earlier, Statistics) and earlier.session == worker.session
    return (earlier if is_same else None), now.time_s - before.time_s  # type: ignore[return-value]


def _percentiles(latencies: Latencies) -> Iterator[str]:
    return (human_us(latencies.percentile_us(percent)) for percent in (50, 99))
