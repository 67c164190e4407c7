"""``torch-ucx-rpc check``: measures the calls between every pair of workers, and judges the figures."""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as rpc

import torch_ucx_rpc
from _torch_ucx_rpc_cli import ExitCode
from torch_ucx_rpc import _agent
from torch_ucx_rpc._bootstrap import network, record
from torch_ucx_rpc._cli._console import check_seconds, console, human_bytes, human_us, with_progress
from torch_ucx_rpc._launch.environment import find_launch

_SHARED_MEMORY = ("sysv/", "posix/", "xpmem/", "cma/", "knem/")
_TENSOR_BYTES = 32 << 20
# A pair that is this much worse than the median of its kind is more than noise. A median needs this many pairs to mean
# something.
_OUTLIER = 4
_LEAST_PAIRS = 6
# Warm-up, calls and tensors of a pair take some tenths of a second. If a host is in more pairs than this, each pair
# gets less time.
_UNHURRIED_PAIRS = 60
# How long to wait for a worker to end, and the longest time for measuring a pair if nothing is wrong.
_END_S = 10.0
_PAIR_S = 5.0

_UNREACHABLE = (
    "if it runs, the network interface or transport that UCX takes does not lead there: unset UCX_NET_DEVICES and "
    "UCX_TLS, check firewalls (UCX listens on any free port), and compare `python -m torch_ucx_rpc info` on both hosts"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The host of a worker, and its means of communication."""

    host: str
    machine: str
    ipc: str
    address: str | None
    infiniband: list[str]
    has_cuda: bool
    tls: str | None

    def shares_memory_with(self, other: Place) -> bool:
        return (self.machine, self.ipc) == (other.machine, other.ipc)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Measurements of calls from one worker to another; an error instead if the calls failed."""

    caller: str
    callee: str
    lanes: list[str] = dataclasses.field(default_factory=list)
    latency_us: float = 0.0
    bytes_per_s: float = 0.0
    # The interface of the caller that leads to the callee.
    route: str | None = None
    error: str | None = None


def main(arguments: argparse.Namespace) -> int:
    if not arguments.json:
        console(arguments)
    check_seconds(arguments, "--timeout", arguments.timeout)
    try:
        launch = find_launch(os.environ)
    except ValueError as error:
        arguments.error(str(error))
    # A shell in an allocation of one task, or a single pod, has no other worker to call.
    if launch is not None and launch.world_size > 1:
        if arguments.workers is not None:
            arguments.error(f"-n is for workers that this command starts, and {launch.launcher} has started this one")
        return _work(None, launch.world_size, "env://", arguments)
    size = 2 if arguments.workers is None else arguments.workers
    if size < 2:
        arguments.error(f"-n must be at least 2, for workers to call each other; it cannot be {size}")
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="torch_ucx_rpc-check-") as folder:
        url = f"file://{folder}/store"  # torch takes the path as it is: as_uri() would quote it
        # The functions of argparse cannot be pickled, so they stay here.
        plain = argparse.Namespace(timeout=arguments.timeout)
        others = [spawn.Process(target=_other, args=(rank, size, url, plain)) for rank in range(1, size)]
        for other in others:
            other.start()
        try:
            return _work(0, size, url, arguments)
        finally:
            for other in others:
                other.join(_END_S)
                other.kill()
                other.join()


def _work(rank: int | None, size: int, url: str, arguments: argparse.Namespace) -> int:
    """Run as one worker, under a launcher if it has no rank yet; return the exit code."""
    torch.set_num_threads(1)
    options = torch_ucx_rpc.UcxRpcBackendOptions(
        init_method=url, rpc_timeout=arguments.timeout, init_timeout=arguments.timeout
    )
    try:
        if rank is None:
            torch_ucx_rpc.init_rpc(rpc_backend_options=options)
        else:
            torch_ucx_rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
        if rpc.get_worker_info().id == 0:
            return _judge(arguments)
        # Other ranks serve until rank 0 is done, but not for ever, since rank 0 may be unable to tell them.
        rpc.shutdown(timeout=2 * arguments.timeout + _PAIR_S * size**2)
    except (RuntimeError, ValueError) as error:
        print(f"check: {error}", file=sys.stderr)
        return ExitCode.UNREACHABLE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return ExitCode.OK


def _other(rank: int, size: int, url: str, arguments: argparse.Namespace) -> None:
    sys.exit(_work(rank, size, url, arguments))


def _judge(arguments: argparse.Namespace) -> int:
    """Do rank 0's part: let the workers measure all pairs, judge the figures, and print them."""
    assert _agent.current is not None
    places, errors = {}, []
    for info in _agent.current.get_worker_infos():
        try:
            places[info.name] = rpc.rpc_sync(info.name, where)
        except RuntimeError as error:
            errors.append(f"{info.name} cannot be called: {error}; {_UNREACHABLE}")
    pairs = list(with_progress(_measure_all(places), len(places) * (len(places) - 1), "measuring pairs of workers"))
    errors += [f"{pair.caller} cannot call {pair.callee}: {pair.error}; {_UNREACHABLE}" for pair in pairs if pair.error]
    warnings, notes = judge(places, pairs)
    if arguments.json:
        report = {
            "workers": {name: dataclasses.asdict(place) for name, place in places.items()},
            "pairs": [dataclasses.asdict(pair) for pair in pairs],
            "errors": errors,
            "warnings": warnings,
            "notes": notes,
        }
        print(json.dumps(report, indent=2))
    else:
        _print(console(arguments), places, pairs)
        for kind, texts in {"ERROR": errors, "WARNING": warnings, "note": notes}.items():
            for text in texts:
                print(f"{kind}: {text}")
        if not errors and not warnings:
            print("No problems found.")
    if not errors:
        rpc.shutdown(timeout=arguments.timeout)
    if errors:
        return ExitCode.UNREACHABLE
    return ExitCode.WARNINGS if warnings else ExitCode.OK


# ---- Measuring -------------------------------------------------------------------------------------------------------


def where() -> Place:
    """The place of the worker that runs this."""
    agent = _agent.current
    assert agent is not None
    facts = record.process_facts()
    host = network.host_of(agent.store)
    return Place(
        host=facts["host"],
        machine=facts["boot_id"],
        ipc=str(Path("/proc/self/ns/ipc").readlink()),
        address=None if host is None else network.address_towards(host),
        infiniband=network.active_ports(),
        has_cuda=torch.cuda.is_available(),
        tls=os.environ.get("UCX_TLS"),
    )


def _measure_all(places: dict[str, Place]) -> Iterator[Pair]:
    hosts = {name: place.host for name, place in places.items()}
    waiting = [(caller, callee) for caller in places for callee in places if caller != callee]
    effort = min(1.0, _UNHURRIED_PAIRS * len(set(hosts.values())) / max(1, len(waiting)))
    while waiting:
        # Each host measures one pair at a time, so that pairs do not disturb each other.
        busy: set[str] = set()
        measured = []
        for caller, callee in list(waiting):
            if not busy & {hosts[caller], hosts[callee]}:
                busy |= {hosts[caller], hosts[callee]}
                waiting.remove((caller, callee))
                measured.append((caller, callee, rpc.rpc_async(caller, measure, (callee, places[callee], effort))))
        for caller, callee, future in measured:
            try:
                yield future.wait()
            except RuntimeError as error:
                # The text of a caller's exception begins with the traceback.
                yield Pair(caller=caller, callee=callee, error=str(error).strip().splitlines()[-1])


def nothing() -> None:
    """The smallest call, for latencies."""


def take(tensor: torch.Tensor) -> None:
    """A call with a large tensor, to measure its transfer to the callee."""


def measure(callee: str, place: Place, effort: float) -> Pair:
    """Measure calls from this worker to ``callee``, and fewer of them if ``effort`` is less than 1."""
    caller = rpc.get_worker_info().name
    calls, tensors = max(10, int(200 * effort)), max(2, int(8 * effort))
    tensor = torch.ones(_TENSOR_BYTES, dtype=torch.uint8)
    # The first calls of each kind make connections and warm receive buffers.
    for _ in range(calls // 5):
        rpc.rpc_sync(callee, nothing)
    rpc.rpc_sync(callee, take, (tensor,))
    latency = statistics.median(_seconds(callee, nothing) for _ in range(calls))
    transfer = statistics.median(_seconds(callee, take, tensor) for _ in range(tensors))
    lanes = next(peer.lanes for peer in torch_ucx_rpc.statistics().peers if peer.name == callee)
    return Pair(
        caller=caller,
        callee=callee,
        lanes=list(lanes),
        latency_us=1e6 * latency,
        bytes_per_s=tensor.nbytes / transfer,
        route=None if place.address is None else network.interface_to(place.address),
    )


def _seconds(callee: str, function: Any, *arguments: Any) -> float:
    started = time.perf_counter()
    rpc.rpc_sync(callee, function, arguments)
    return time.perf_counter() - started


# ---- Judging ---------------------------------------------------------------------------------------------------------


def judge(places: dict[str, Place], pairs: Iterable[Pair]) -> tuple[list[str], list[str]]:
    """Warnings about pairs that are slower than they should be, and notes that need no action."""
    good = [pair for pair in pairs if not pair.error]
    warnings = []
    for pair in good:
        caller, callee = places[pair.caller], places[pair.callee]
        if caller.shares_memory_with(callee):
            warnings += _of_same_host(pair, caller)
        else:
            warnings += _of_network(pair, caller, callee)
    for kind, members in _kinds(places, good).items():
        if len(members) >= _LEAST_PAIRS:
            warnings += _outliers(kind, members)
    notes = []
    machines: dict[str, set[str]] = {}
    for place in places.values():
        machines.setdefault(place.machine, set()).add(place.ipc)
    if any(len(spaces) > 1 for spaces in machines.values()):
        notes.append(
            "workers on one machine, in containers of their own, use the network: with a common IPC namespace "
            "(Docker: --ipc=host; Kubernetes: hostIPC: true, or one pod) they would use shared memory"
        )
    if any(place.has_cuda for place in places.values()):
        notes.append("only CPU tensors were sent: CUDA tensors need device_maps, and this check has none")
    return warnings, notes


def _of_same_host(pair: Pair, place: Place) -> list[str]:
    if any(lane.startswith(_SHARED_MEMORY) for lane in pair.lanes):
        return []
    if place.tls:
        cure = f"UCX_TLS={place.tls} leaves it out: unset it, or add sm"
    else:
        cure = "check the size of /dev/shm, and UCX_SHM_DEVICES and UCX_MM_ERROR_HANDLING if they are set"
    return [
        f"{pair.caller} and {pair.callee} are both on {place.host} and do not use shared memory but "
        f"{', '.join(pair.lanes)}; {cure}"
    ]


def _of_network(pair: Pair, caller: Place, callee: Place) -> list[str]:
    interfaces = [lane.partition("/")[2] for lane in pair.lanes if lane.startswith("tcp/")]
    warnings = []
    if pair.route is not None and any(interface != pair.route for interface in interfaces):
        warnings.append(
            f"{pair.caller} reaches {pair.callee} by {', '.join(pair.lanes)}, and the way from {caller.host} to "
            f"{callee.host} is {pair.route}; unset UCX_NET_DEVICES, or set it to {pair.route}"
        )
    if interfaces and caller.infiniband and callee.infiniband:
        warnings.append(
            f"{caller.host} and {callee.host} both have InfiniBand or RoCE ({', '.join(caller.infiniband)}), and "
            f"{pair.caller} reaches {pair.callee} by {', '.join(pair.lanes)}; see `python -m torch_ucx_rpc info`"
        )
    return warnings


def _kinds(places: dict[str, Place], pairs: Iterable[Pair]) -> dict[str, list[Pair]]:
    """Group the pairs that should be equally fast, by the transports that they use."""
    kinds: dict[str, list[Pair]] = {}
    for pair in pairs:
        side = "same host" if places[pair.caller].shares_memory_with(places[pair.callee]) else "network"
        transports = sorted({lane.partition("/")[0] for lane in pair.lanes})
        kinds.setdefault(f"{side}, {'+'.join(transports)}", []).append(pair)
    return kinds


def _outliers(kind: str, pairs: list[Pair]) -> list[str]:
    latency = statistics.median(pair.latency_us for pair in pairs)
    bandwidth = statistics.median(pair.bytes_per_s for pair in pairs)
    texts = []
    for pair in pairs:
        figures = []
        if pair.latency_us > _OUTLIER * latency:
            figures.append(f"a call takes {human_us(pair.latency_us)}, the median is {human_us(latency)}")
        if pair.bytes_per_s < bandwidth / _OUTLIER:
            figures.append(f"{human_bytes(pair.bytes_per_s)}/s, the median is {human_bytes(bandwidth)}/s")
        if figures:
            texts.append(
                f"{pair.caller} to {pair.callee} is slower than the other pairs ({kind}): {'; '.join(figures)}; check "
                f"what else runs on these hosts, and the cable and port between them"
            )
    return texts


# ---- Printing --------------------------------------------------------------------------------------------------------


def _print(out: Any, places: dict[str, Place], pairs: list[Pair]) -> None:
    from rich.table import Table

    by_names = {(pair.caller, pair.callee): pair for pair in pairs}
    # If this matrix is too wide for the terminal, only the summary below appears.
    if 12 + 16 * len(places) <= out.width:
        matrix = Table("", *places, title="from the worker on the left to the one above", show_lines=True)
        for caller, place in places.items():
            cells = (by_names.get((caller, callee)) for callee in places)
            matrix.add_row(f"{caller}\n{place.host}", *(_cell(pair) for pair in cells))
        out.print(matrix)
    summary = Table("", "pairs", "a call, median (range)", "32 MiB, median (range)")
    for kind, members in _kinds(places, [pair for pair in pairs if not pair.error]).items():
        latencies = sorted(pair.latency_us for pair in members)
        rates = sorted(pair.bytes_per_s for pair in members)
        summary.add_row(
            kind,
            str(len(members)),
            f"{human_us(statistics.median(latencies))} ({human_us(latencies[0])} to {human_us(latencies[-1])})",
            f"{human_bytes(statistics.median(rates))}/s ({human_bytes(rates[0])}/s to {human_bytes(rates[-1])}/s)",
        )
    out.print(summary)


def _cell(pair: Pair | None) -> str:
    if pair is None:
        return ""
    if pair.error:
        return "failed"
    return "\n".join([*pair.lanes, human_us(pair.latency_us), f"{human_bytes(pair.bytes_per_s)}/s"])
