"""One RPC job of a test, followed from the pytest process: starts its workers and accounts for each of them."""

from __future__ import annotations

import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.support.labs import VirtualHosts

from ._processes import dump_stacks, kill, process_context, reserved_port
from ._worker import Transport, Worker, worker_name

# After the first failure, the other workers have this time to report or end: later errors often say more.
_GRACE_S = 5.0

# The agent's warning for tensors of a GPU over TCP alone, where it is not a fault.
SAID_OVER_TCP = "are in device memory that UCX cannot share with another process"

# A line of UCX's log, on stdout, with this level fails the test. The agent itself reports ordinary failures.
_UCX_ERROR = "UCX  ERROR"


class WorkersFailed(AssertionError):
    """Some worker of a job raised, died or hung. The text has the output of all workers."""


def run_workers(
    world_size: int,
    body: Callable[..., Any],
    *args: object,
    backend: str = "UCX",
    transport: Transport = Transport.SHARED_MEMORY,
    hosts: VirtualHosts | None = None,
    options: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    init: bool = True,
    shutdown: bool = True,
    exit_codes: Mapping[int, int] | None = None,
    expendable: Collection[int] = (),
    silent: bool = True,
    timeout: float = 50.0,
) -> list[Any]:
    """Call ``body(rank, *args)`` in ``world_size`` processes that form one RPC job; return what each returned, by rank.

    RPC is initialized before the body, under the names ``worker0``, ``worker1``, ..., and shut down gracefully after
    it. ``body`` is a function of a module; it, its arguments and its results are pickled.

    Args:
        backend: ``"UCX"`` or ``"TENSORPIPE"``.
        transport: how the workers reach each other.
        hosts: hosts of the workers, in turn; this machine by default.
        options: arguments for the backend's options object.
        env: variables that are set in each worker before UCX is loaded.
        init: false if the body itself joins, with `workers.init_rpc`, and shuts down.
        shutdown: false if the body shuts RPC down itself.
        exit_codes: rank to exit code, of the workers whose body ends the process and returns nothing (None is their
            result).
        expendable: ranks that may end in any way, or not at all: they are killed when the others have ended.
        silent: fail if a worker writes to stderr, or UCX an error to its log. Not enforced for TensorPipe, or between
            hosts, where torch's Store warns of names that it cannot resolve.
        timeout: seconds for the whole job; a longer job is taken to hang. The default is shorter than a call's default
            timeout, so that a hanging call fails the test.

    Raises WorkersFailed with each worker's traceback, end and output. If the job hangs, the error also has the Python
    stacks of every worker that is left, and the C++ stacks if gdb is installed. No process outlives this call.
    """
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory(prefix="workers-") as directory, reserved_port() as port:
        own_store = None
        if backend == "TENSORPIPE" and init and not hosts:
            # TensorPipe's shutdown reads the Store last. It fails if rank 0 has ended by then, and the Store with it.
            own_store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        worker = Worker(
            world_size=world_size,
            backend=backend,
            transport=transport,
            options=dict(options or {}),
            host_pids=tuple(host.pid for host in hosts or ()),
            env={
                "MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1",
                "MASTER_PORT": str(port),
                **({} if own_store is None else {"TORCHELASTIC_USE_AGENT_STORE": "True"}),
                **(env or {}),
            },
            init=init,
            shutdown=init and shutdown,
            directory=Path(directory),
            call=pickle.dumps((body, args)),
        )
        return _Job(
            worker, dict(exit_codes or {}), frozenset(expendable), silent and backend == "UCX" and not hosts
        ).run(timeout)


class _Job:
    def __init__(self, worker: Worker, exit_codes: dict[int, int], expendable: frozenset[int], silent: bool) -> None:
        self._worker = worker
        self._expendable = expendable
        self._expected_exit_codes = exit_codes
        self._silent = silent
        self._results: dict[int, Any] = {}
        self._failures: dict[int, str] = {}
        self._silent_ends: set[int] = set()
        self._processes: list[BaseProcess] = []
        self._reports: list[Connection] = []

    def run(self, timeout: float) -> list[Any]:
        __tracebackhide__ = True
        try:
            self._start()
            self._follow(time.monotonic() + timeout, timeout)
        finally:
            kill(self._processes)
        if self._silent:
            self._check_silence()
        if self._failures:
            raise WorkersFailed(self._account())
        return [self._results.get(rank) for rank in range(self._worker.world_size)]

    def _start(self) -> None:
        context = process_context()
        for rank in range(self._worker.world_size):
            report, worker_end = context.Pipe(duplex=False)
            process = context.Process(target=self._worker.main, args=(rank, worker_end), name=worker_name(rank))
            process.start()
            # Only the worker still has this end, so the pipe ends with the worker.
            worker_end.close()
            self._processes.append(process)
            self._reports.append(report)

    def _follow(self, deadline: float, timeout: float) -> None:
        # A worker is finished when its process has ended. Any report is then in the pipe.
        running = {rank: process for rank, process in enumerate(self._processes) if rank not in self._expendable}
        while running and not (self._failures and time.monotonic() > deadline):
            readable = {self._reports[rank]: rank for rank in running if not self._has_reported(rank)}
            ended = {process.sentinel: rank for rank, process in running.items()}
            ready = wait([*readable, *ended], max(0.0, deadline - time.monotonic()))
            if not ready and not self._failures:
                self._hang(running, timeout)
                return
            for one in ready:
                failed_before = bool(self._failures)
                if one in readable:
                    self._take_report(readable[one])
                elif (rank := ended[one]) in running:
                    self._take_end(rank)
                    del running[rank]
                if self._failures and not failed_before:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        for rank in running:
            self._failures.setdefault(rank, f"had not ended {_GRACE_S:.0f} s after the first failure, and was killed")

    def _has_reported(self, rank: int) -> bool:
        return rank in self._results or rank in self._failures or rank in self._silent_ends

    def _take_report(self, rank: int) -> None:
        try:
            succeeded, content = pickle.loads(self._reports[rank].recv_bytes())
        except EOFError:
            # The worker ends without a report. Its exit code comes next, and shows whether that was expected.
            self._silent_ends.add(rank)
            return
        if succeeded:
            self._results[rank] = content
        else:
            self._failures[rank] = f"raised:\n{content}"

    def _take_end(self, rank: int) -> None:
        process = self._processes[rank]
        process.join()
        if self._reports[rank].poll() and not self._has_reported(rank):
            self._take_report(rank)
        code = process.exitcode
        if code != self._expected_exit_codes.get(rank, 0):
            end = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            self._failures.setdefault(rank, f"ended with {end}")
        elif rank in self._silent_ends and rank not in self._expected_exit_codes:
            self._failures[rank] = "ended within its body"

    def _hang(self, running: dict[int, BaseProcess], timeout: float) -> None:
        stacks = dump_stacks([process.pid for process in running.values()], self._worker.directory)
        for rank, process in running.items():
            state = "had finished its body but not ended" if rank in self._results else "had not finished"
            self._failures[rank] = f"{state} after {timeout:.0f} s, and was killed\n{stacks[process.pid]}"

    def _check_silence(self) -> None:
        for rank in range(self._worker.world_size):
            lines = self._output(rank, "stderr").splitlines()
            if self._worker.transport is Transport.TCP:
                lines = [line for line in lines if SAID_OVER_TCP not in line]
            if lines:
                self._failures.setdefault(rank, "wrote to stderr")
            if _UCX_ERROR in self._output(rank, "stdout"):
                self._failures.setdefault(rank, "printed a line of UCX's log")

    def _output(self, rank: int, stream: str) -> str:
        file = self._worker.output_file(rank, stream)
        # A worker that ended early has no such file.
        return file.read_text(errors="replace") if file.exists() else ""

    def _account(self) -> str:
        lines = []
        # In the order of failures: the first is usually the cause of the rest.
        innocent = set(range(self._worker.world_size)) - set(self._failures)
        for rank, failure in [*self._failures.items(), *((rank, "did not fail") for rank in sorted(innocent))]:
            lines.append(f"{worker_name(rank)} (process {self._processes[rank].pid}) {failure}")
            for stream in ("stdout", "stderr"):
                if output := self._output(rank, stream):
                    lines.append(f"--- {stream} of {worker_name(rank)}, its end ---\n{output[-10_000:]}")
        return "\n".join(lines)
