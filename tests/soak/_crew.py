"""The workers as processes: started, killed, given orders, measured."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import resource
import select
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.labs import VirtualHosts, move_to_host
from tests.support.workers import Steps, Transport, Worker, dump_stacks, kill, process_context, worker_name

from ._worker import Life, hangs

_PAGE = os.sysconf("SC_PAGESIZE")
_LOOK_EVERY_S = 0.05
_SAMPLE_EVERY_S = 0.5
_STALL_S = 2.0
_FIRST_WORD_S = 60.0
_LONGEST_OUTPUT = 4000


@dataclasses.dataclass(frozen=True)
class Sample:
    """The resources of a worker's process at one time."""

    time: float
    resident_bytes: int
    threads: int
    files: int


class Member:
    """A process of a worker, from its start to its end."""

    def __init__(self, worker: Worker, life: Life) -> None:
        self._worker = worker
        self.life = life
        self.samples: list[Sample] = []
        self.result: dict[str, Any] | None = None
        self.error = ""
        self.was_killed = False
        self.membership = 0
        context = process_context()
        self._report, its_end = context.Pipe(duplex=False)
        name = worker_name(life.rank)
        self.process: BaseProcess = context.Process(target=worker.main, args=(life.rank, its_end), name=name)
        self.process.start()
        its_end.close()

    @property
    def name(self) -> str:
        return worker_name(self.life.rank)

    @property
    def who(self) -> str:
        """The worker's current name. A process may be a member several times, each time with another name."""
        return f"{self.life} {self.membership}"

    def pid(self) -> int | None:
        """The pid of the worker, or None before it exists. The worker is a child of the started process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with contextlib.suppress(OSError):
            if words := children.read_text().split():
                return int(words[0])
        return None

    def sample(self) -> None:
        pid = self.pid()
        with contextlib.suppress(OSError):
            process = Path(f"/proc/{pid}")
            files, threads = (sum(1 for _ in (process / folder).iterdir()) for folder in ("fd", "task"))
            resident = int((process / "statm").read_text().split()[1]) * _PAGE
            self.samples.append(Sample(time.monotonic(), resident, threads, files))

    def has_ended(self) -> bool:
        """Whether the worker has ended. This also reads its report."""
        if self._report.poll():
            with contextlib.suppress(EOFError):
                succeeded, content = pickle.loads(self._report.recv_bytes())
                if succeeded:
                    self.result = content
                else:
                    self.error = content
        return not self.process.is_alive()

    def output(self) -> str:
        """The last part of the worker's stderr."""
        file = self._worker.output_file(self.life.rank, "stderr")
        return file.read_text(errors="replace")[-_LONGEST_OUTPUT:] if file.exists() else ""

    def stacks(self) -> str:
        pid = self.pid()
        return "(it has no process)" if pid is None else dump_stacks([pid], self._worker.directory)[pid]


class Crew:
    """All present and earlier workers of a run, on the hosts in turn, with a Store beside them."""

    def __init__(
        self,
        hosts: VirtualHosts,
        size: int,
        seed: int,
        directory: Path,
        options: dict[str, Any],
        is_fixed: bool,
        body: Callable[[int, Life], dict[str, int]],
    ) -> None:
        self.hosts = hosts
        self.directory = directory
        self.steps = Steps(directory)
        self._size = size
        self._seed = seed
        self._options = options
        self._is_fixed = is_fixed
        self._body = body
        self._due = 0.0
        self.current: dict[int, Member] = {}
        self.past: list[Member] = []
        # Periods in which this machine ran no process.
        self.stalls: list[dict[str, Any]] = []
        # The descriptors of killed workers' processes, with the callbacks that get the time of the end.
        self._dying: dict[int, Callable[[float], None]] = {}
        self._is_over = threading.Event()
        self._watchman = threading.Thread(target=self._keep_watch, name="watchman")

    def __enter__(self) -> Crew:
        context = process_context()
        port, its_end = context.Pipe(duplex=False)
        self._store = context.Process(target=_serve_store, args=(self.hosts.head.pid, its_end), name="store")
        self._store.start()
        if not port.poll(_FIRST_WORD_S):
            raise RuntimeError(f"the Store has not come up within {_FIRST_WORD_S:.0f} s")
        self._worker = Worker(
            world_size=self._size,
            backend="UCX",
            transport=Transport.SHARED_MEMORY,
            options=self._options,
            host_pids=tuple(host.pid for host in self.hosts),
            # With this variable torch uses the Store as torchrun's: the Store outlives all workers.
            env={
                "MASTER_ADDR": self.hosts.head.address,
                "MASTER_PORT": str(port.recv()),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
            init=False,
            shutdown=False,
            directory=self.directory,
            call=b"",
        )
        self._watchman.start()
        for rank in range(self._size):
            self.start(rank)
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._watchman.join()
        for process in self._dying:
            os.close(process)
        kill([self._store, *(member.process for member in self.current.values())])

    def host_of(self, rank: int) -> str:
        return self.hosts[rank % len(self.hosts)].name

    def start(self, rank: int) -> None:
        """Start a worker, or its next life, on its host."""
        generation = sum(member.life.rank == rank for member in self.past)
        life = Life(rank, generation, self._size, self._seed, self.directory, self._is_fixed)
        # Each worker has a folder, since processes of several hosts share pids.
        folder = self.directory / f"life {life}"
        folder.mkdir()
        worker = dataclasses.replace(self._worker, directory=folder, call=pickle.dumps((self._body, (life,))))
        self.current[rank] = Member(worker, life)

    def kill(self, rank: int, on_end: Callable[[float], None]) -> None:
        """Kill a worker. The watchman's thread calls ``on_end(time)`` when its process has ended.

        On busy processors the kernel takes a second to end a process with hundreds of MiB, and closes its connections
        last.
        """
        member = self.current.pop(rank)
        pid = member.pid()
        member.was_killed = True
        if pid is not None:
            self._dying[os.pidfd_open(pid)] = on_end
            os.kill(pid, signal.SIGKILL)
        kill([member.process])
        self.past.append(member)

    def signal(self, rank: int, number: int) -> None:
        if (pid := self.current[rank].pid()) is not None:
            os.kill(pid, number)

    def limit_files(self, rank: int, to: int | None) -> None:
        """Forbid a worker to open files with this number or a higher one; None allows all."""
        if (pid := self.current[rank].pid()) is not None:
            _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (most if to is None else to, most))

    def first_free_file(self, rank: int) -> int:
        """The number of a worker's next file."""
        open_files = {int(file.name) for file in Path(f"/proc/{self.current[rank].pid()}/fd").iterdir()}
        return next(number for number in itertools.count() if number not in open_files)

    def rejoin(self, rank: int) -> None:
        """Make a worker leave ungracefully, and join again."""
        member = self.current[rank]
        self.steps.done(f"rejoin {member.who}")
        member.membership += 1

    def watch(self, seconds: float) -> None:
        """Let time pass and take samples. Raise WorkerEnded if a worker ends without having been killed."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if time.monotonic() >= self._due:
                self._due = time.monotonic() + _SAMPLE_EVERY_S
                for member in self.current.values():
                    member.sample()
                self._see_who_has_ended()
                self._see_who_hangs()
            time.sleep(min(left, _LOOK_EVERY_S))

    def _keep_watch(self) -> None:
        before = time.monotonic()
        while not self._is_over.wait(_LOOK_EVERY_S):
            now = time.monotonic()
            if now - before > _STALL_S:
                self.stalls.append({"what": "stall", "at": before, "until": now})
            before = now
            for process in [*self._dying]:
                if select.select([process], [], [], 0)[0]:
                    self._dying.pop(process)(time.monotonic())
                    os.close(process)

    def _see_who_has_ended(self) -> None:
        for member in self.current.values():
            if member.has_ended():
                raise WorkerEnded(member)

    def _see_who_hangs(self) -> None:
        """Write the stacks of all workers beside the journals if some worker's calls do not end."""
        # A worker that is ordered to join again gets another name at once, but its calls may hang under the earlier
        # name.
        names = [f"{member.life} {n}" for member in self.current.values() for n in range(member.membership + 1)]
        for step in map(hangs, names):
            if self.steps.is_done(step) and not self.steps.is_done(f"seen: {step}"):
                stacks = "\n".join(f"{other.name}\n{other.stacks()}" for other in self.current.values())
                (self.directory / f"{step}.stacks").write_text(stacks)
                self.steps.done(f"seen: {step}")

    def all_say(self, step: str, timeout: float) -> list[Member]:
        """Return the workers that have not done ``step`` in time."""
        deadline = time.monotonic() + timeout
        while True:
            silent = [m for m in self.current.values() if not self.steps.is_done(f"{step} {m.who}")]
            if not silent or time.monotonic() > deadline:
                return silent
            self.watch(0.1)

    def all_end(self, timeout: float) -> list[Member]:
        """Return the workers that have not ended in time."""
        deadline = time.monotonic() + timeout
        while True:
            running = [member for member in self.current.values() if not member.has_ended()]
            if not running or time.monotonic() > deadline:
                return running
            time.sleep(0.05)


class WorkerEnded(RuntimeError):
    """A worker has ended without an order."""

    def __init__(self, member: Member) -> None:
        code = member.process.exitcode
        super().__init__(f"{member.name} has ended with {code}\n{member.error}\n--- stderr ---\n{member.output()}")


def _serve_store(host_pid: int, report: Connection) -> None:
    """Serve the Store on a host that is never cut off. Threads of the Store answer the workers' requests."""
    move_to_host(host_pid)
    from torch.distributed import TCPStore

    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    report.send(store.port)
    signal.pause()
