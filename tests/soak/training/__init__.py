"""Kill, stop and start again trainers and the hosts of their gradients: all copies of the model must stay equal.

    python -m tests.soak.training --minutes 1
    python -m tests.soak.training --minutes 1 --cuts    as root: each worker on a virtual host, at times cut off

Five jobs, one after the other: trainers that share the work, trainers with one host and with two, trainers with a
quorum, and trainers of parameters that hosts keep. Each trainer notes a digest of its parameters at the beginning of
each step. A job fails if two trainers have different parameters in the same step, if a trainer begins no step for
`_STALL_S`, or if a process ends without an order. Then it prints the stacks of the other processes, and what they know
of each other.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import functools
import hashlib
import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.rpc as rpc
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from tests.support.labs import VirtualHost, VirtualHosts, move_to_host
from torch_ucx_rpc import UcxRpcBackendOptions, reduction
from torch_ucx_rpc._workers.life import life as present_life
from torch_ucx_rpc.reduction._office import office

# Calls have a longer limit than stalls, so a hanging call is found as a stall before it fails.
_STALL_S = 15.0
_TIMEOUT_S = 40.0
_STARTING_S = 60.0
_ENDING_S = 60.0
# In the last moments trainers may differ: some go on after others have left.
_LAST_S = 0.5
_PAUSES_S = (0.1, 0.3, 0.6, 1.0)
_ABSENCES_S = (0.0, 0.5, 2.0)
# The share of strikes that do not kill a worker, but stop it or cut it off: for a moment, or until the others have left
# it out.
_SILENCING = 0.3
_SILENCES_S = (0.5, 2.0, 7.0)

_PROCESSES = multiprocessing.get_context("forkserver")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of job."""

    title: str
    trainers: int
    hosts: tuple[str, ...] = ()
    quorum: int | None = None
    # The hosts have the optimizer and the parameters, and save them.
    keeps: bool = False

    @property
    def workers(self) -> tuple[str, ...]:
        return (*self.hosts, *(f"trainer{number}" for number in range(self.trainers)))


KINDS = (
    Kind("trainers that share the work", 4),
    Kind("one host", 3, ("host0",)),
    Kind("two hosts", 3, ("host0", "host1")),
    Kind("a quorum", 4, quorum=3),
    Kind("parameters on two hosts", 3, ("host0", "host1"), keeps=True),
)


# ------------------------------------------------------------------------------------------------------------ a process


def work(kind: Kind, name: str, life: int, folder: Path, host_pid: int | None) -> None:
    """Work as a trainer until there is a file named ``stop``, or as a host until there is one named ``end``."""
    if host_pid is not None:
        move_to_host(host_pid)
    torch.set_num_threads(1)
    stacks = (folder / f"{name}.stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    threading.Thread(target=tell_when_asked, args=(folder, name), daemon=True).start()
    rpc.init_rpc(
        name,
        backend=rpc.BackendType["UCX"],
        rank=kind.workers.index(name),
        world_size=None,
        rpc_backend_options=UcxRpcBackendOptions(init_method=(folder / "store").as_uri(), rpc_timeout=_TIMEOUT_S),
    )
    try:
        if name in kind.hosts:
            _joined(folder, name, life).touch()
            while not (folder / "end").exists():
                time.sleep(0.05)
        else:
            train(kind, life, folder)
    except BaseException:
        (folder / f"{name}.failure").write_text(traceback.format_exc())
        raise
    rpc.shutdown(graceful=False)


def tell_when_asked(folder: Path, name: str) -> None:
    """Write what this worker knows of the others, once there is a file named ``tell``."""
    while not (folder / "tell").exists():
        time.sleep(0.2)
    known = [f"workers: {sorted(info.name for info in present_life().living())}"]
    if office.is_made():
        group = office().group
        known += ["in force" if group.is_current() else group.why_not_current()]
        known += [str(opening) for opening in office()._openings.values()]
        attempt = group._epochs._attempt
        known += [f"{time.monotonic():.2f} s; unanswered messages: {group._unanswered}"]
        known += [f"{what}: {value}" for what, value in vars(group._epochs).items()]
        known += [f"attempt: {attempt.ballot} {attempt.value} {attempt.votes}"] if attempt is not None else []
    (folder / f"{name}.known").write_text("\n".join(known) + "\n")


def _joined(folder: Path, name: str, life: int) -> Path:
    """The file by which a host shows that it has joined."""
    return folder / f"{name}-{life}.joined"


class Journal:
    """The parameters of a trainer at the beginning of each of its steps."""

    def __init__(self, life: int, folder: Path, server: reduction.Server) -> None:
        self._server = server
        self._file = (folder / f"{rpc.get_worker_info().name}-{life}.steps").open("a", buffering=1)

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        everything = b"".join(parameter.detach().numpy().tobytes() for parameter in parameters)
        digest = hashlib.sha256(everything).hexdigest()[:16]
        self._file.write(f"{time.time():.3f} {max(self._server.positions.values(), default=0)} {digest}\n")


def train(kind: Kind, life: int, folder: Path) -> None:
    torch.manual_seed(rpc.get_worker_info().id)
    run = train_parameters_of_hosts if kind.keeps else train_copies
    run(kind, life, folder).leave()


def train_parameters_of_hosts(kind: Kind, life: int, folder: Path) -> reduction.Server:
    parameters = [torch.zeros(64), torch.zeros(1000)]
    adam = functools.partial(torch.optim.Adam, lr=0.01)
    server = serve(kind, parameters=parameters, optimizer=adam, checkpoint=folder / "saved", checkpoint_every=1)
    journal = Journal(life, folder, server)
    while not (folder / "stop").exists():
        parameters = reduction.push_pull(server, [torch.randn_like(parameter) for parameter in parameters])
        journal.note(parameters)
    return server


def train_copies(kind: Kind, life: int, folder: Path) -> reduction.Server:
    server = serve(kind)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    copy = reduction.DataParallel(model, server, optimizer=optimizer, quorum=kind.quorum, bucket_bytes=1 << 12)
    journal = Journal(life, folder, server)
    while not (folder / "stop").exists():
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        out = copy(x)
        journal.note(model.parameters())
        F.mse_loss(out, x.sum(1, keepdim=True)).backward()
        optimizer.step()
    return server


def serve(kind: Kind, **options: Any) -> reduction.Server:
    """Return the server once a host exists: both hosts may be restarting."""
    give_up_at = time.monotonic() + _STARTING_S
    while True:
        try:
            return reduction.serve(*kind.hosts, trainers=kind.trainers, **options)
        except ValueError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.1)


# ----------------------------------------------------------------------------------------------------------- the chaos


class Failed(Exception):
    """A finding."""


class Job:
    """The processes of a job, which die and are restarted, each on its host if there are ``hosts``."""

    def __init__(self, kind: Kind, choices: random.Random, folder: Path, hosts: Iterable[VirtualHost]) -> None:
        self._kind = kind
        self._hosts = {host.name: host for host in hosts}
        self._choices = choices
        self._folder = folder
        self._processes: dict[str, Any] = {}
        self._lives = collections.Counter[str]()
        self._began: dict[str, float] = {}
        self._returns: dict[str, float] = {}
        # For each process that is stopped or cut off: when that ends, and the action that ends it.
        self._silent: dict[str, tuple[float, Callable[[], None]]] = {}
        # The number of seconds for which no process has been silent.
        self._calm_s = 0.0
        # The time of each trainer's last step, and the calm seconds before it.
        self._progress: dict[str, tuple[float, float]] = {}
        self.silences = collections.Counter[str]()
        self.killed: list[tuple[float, str]] = []
        for name in kind.workers:
            self._start(name)

    def _start(self, name: str) -> None:
        self._lives[name] += 1
        host_pid = self._hosts[name].pid if self._hosts else None
        arguments = (self._kind, name, self._lives[name], self._folder, host_pid)
        process = _PROCESSES.Process(target=work, args=arguments, daemon=True)
        process.start()
        self._processes[name] = process
        self._began[name] = time.time()

    def _signal(self, name: str, number: int) -> None:
        pid = self._processes[name].pid
        # On a virtual host, ``pid`` is a process that waits for the worker, its only child.
        child = Path(f"/proc/{pid}/task/{pid}/children").read_text() if self._hosts else ""
        os.kill(int(child or pid), number)

    def _journal(self, name: str) -> Path:
        return self._folder / f"{name}-{self._lives[name]}.steps"

    def _last_step(self, name: str) -> float | None:
        """Return the time at which the process of this name began its last step."""
        journal = self._journal(name)
        return journal.stat().st_mtime if journal.exists() and journal.stat().st_size else None

    def _number(self, name: str) -> int:
        """Return the number of the last step that the process of this name has begun."""
        return int(self._journal(name).read_text().splitlines()[-1].split()[1])

    def live(self, seconds: float) -> None:
        """Kill and restart for ``seconds``. Raises `Failed` if a process stalls, or ends without an order."""
        give_up_at = time.monotonic() + _STARTING_S
        while not all(self._last_step(name) for name in self._kind.workers if name not in self._kind.hosts):
            self._look()
            if time.monotonic() > give_up_at:
                raise Failed("not all trainers have begun")
            time.sleep(0.05)
        over, strike_at = time.monotonic() + seconds, time.monotonic()
        before = strike_at
        while (now := time.monotonic()) < over:
            if not self._silent:
                self._calm_s += now - before
            before = now
            time.sleep(0.02)
            for name in [name for name, at in self._returns.items() if now > at]:
                del self._returns[name]
                self._start(name)
            self._continue(now)
            self._look()
            if now > strike_at:
                strike_at = now + self._choices.choice(_PAUSES_S)
                self._strike(now)

    def _continue(self, now: float = float("inf")) -> None:
        """Continue the silent processes whose time is over."""
        for name in [name for name, (until, _) in self._silent.items() if now > until]:
            _, end = self._silent.pop(name)
            self._began[name] = time.time()
            end()

    def _strike(self, now: float) -> None:
        """Kill, stop or cut off a process. Leave one of two hosts, and one trainer with the state, alive and in
        touch."""
        living = [name for name in self._processes if name not in self._returns and name not in self._silent]
        of_kind = [name for name in living if name in self._kind.hosts]
        hosts = [name for name in of_kind if _joined(self._folder, name, self._lives[name]).exists()]
        trainers = [name for name in living if name not in self._kind.hosts and self._last_step(name)]
        numbers = {name: self._number(name) for name in trainers}
        # A trainer one step behind has the state, or can still get it.
        with_state = [name for name in trainers if numbers[name] >= max(numbers.values()) - 1]
        if len(with_state) == 1:
            trainers.remove(with_state[0])
        may_lose_host = len(hosts) > 1 or len(self._kind.hosts) == 1
        candidates = [*(hosts if may_lose_host else []), *trainers]
        if not candidates:
            return
        name = self._choices.choice(candidates)
        if self._choices.random() < _SILENCING and not self._silent:
            self._silence(name, now + self._choices.choice(_SILENCES_S))
            return
        self.killed.append((time.time(), f"{name}-{self._lives[name]}"))
        self._signal(name, signal.SIGKILL)
        self._processes[name].join()
        self._returns[name] = now + self._choices.choice(_ABSENCES_S)

    def _silence(self, name: str, until: float) -> None:
        if self._hosts and self._choices.random() < 0.5:
            self.silences["cuts"] += 1
            self._silent[name] = until, self._hosts[name].heal
            self._hosts[name].cut()
        else:
            self.silences["stops"] += 1
            self._silent[name] = until, functools.partial(self._signal, name, signal.SIGCONT)
            self._signal(name, signal.SIGSTOP)

    def _look(self) -> None:
        for name, process in self._processes.items():
            if name in self._returns or name in self._silent:
                continue
            if process.exitcode is not None:
                raise Failed(f"{name} has ended by itself: {self._why(name)}")
            last = max(self._last_step(name) or 0.0, self._began[name])
            if name in self._kind.hosts or last != self._progress.get(name, (0.0, 0.0))[0]:
                self._progress[name] = (last, self._calm_s)
            elif self._calm_s - self._progress[name][1] > _STALL_S:
                raise Failed(f"{name} has begun no step for {_STALL_S:g} s, while no process was silent")

    def _why(self, name: str) -> str:
        failure = self._folder / f"{name}.failure"
        return failure.read_text() if failure.exists() else f"exit code {self._processes[name].exitcode}"

    def end(self) -> None:
        """Have all leave. A trainer that has not begun yet would wait for the others, and is killed."""
        self._continue()
        for name in self._returns.keys() & set(self._kind.hosts):
            del self._returns[name]
            self._start(name)
        for file, names in (("stop", set(self._kind.workers) - set(self._kind.hosts)), ("end", self._kind.hosts)):
            (self._folder / file).touch()
            for name in names:
                process = self._processes[name]
                if name in self._returns:
                    continue
                if file == "stop" and not self._last_step(name):
                    process.kill()
                process.join(_ENDING_S)
                if process.exitcode is None:
                    raise Failed(f"{name} does not end")
                if process.exitcode not in (0, -signal.SIGKILL):
                    raise Failed(f"{name} has failed at the end: {self._why(name)}")

    def stacks(self) -> str:
        """Return what all processes that have joined RPC know of each other, and their stacks."""
        names = [name for name in self._kind.workers if self._processes[name].exitcode is None]
        living = [name for name in names if (self._folder / f"{name}.stacks").exists()]
        (self._folder / "tell").touch()
        for name in living:
            self._signal(name, signal.SIGUSR1)
        time.sleep(1)
        files = [(name, self._folder / f"{name}.{kind}") for name in living for kind in ("known", "stacks")]
        return "\n".join(f"{name}:\n{file.read_text()}" for name, file in files if file.exists())

    def kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()


# -------------------------------------------------------------------------------------------------------- the judgement


class Step(NamedTuple):
    """The beginning of a step of a trainer."""

    at: float
    number: int
    digest: str
    who: str


def steps(folder: Path, killed: set[str]) -> Iterator[Step]:
    """Return the steps that trainers may share.

    A decider may close a step for itself, and be killed, stopped or cut off before it tells the others. The others then
    repeat the step. So two steps do not count: the last step of a killed process, and a step that a trainer left to
    take another trainer's state.
    """
    for journal in folder.glob("*.steps"):
        lines = [line.split() for line in journal.read_text().splitlines()]
        begun = [Step(float(at), int(number), digest, journal.stem) for at, number, digest in lines]
        for one, following in itertools.pairwise(begun):
            if following.number == one.number + 1:
                yield one
        if journal.stem not in killed:
            yield from begun[-1:]


def first_difference(done: list[Step], stopped_at: float) -> tuple[Step, Step] | None:
    """Find two trainers with different parameters in the same step."""
    first: dict[int, Step] = {}
    for step in sorted(done):
        if step.at > stopped_at - _LAST_S:
            break
        other = first.setdefault(step.number, step)
        # Before the first step each trainer has its own parameters, also after all have been killed.
        if step.number and other.digest != step.digest:
            return other, step
    return None


def story(two: tuple[Step, Step], done: list[Step], killed: list[tuple[float, str]]) -> str:
    """Describe the steps of each trainer around a difference, and the kills before it."""
    other, step = two
    lines = [f"in step {step.number} {step.who} has other parameters than {other.who}"]
    events = [(at, f"{name} is killed") for at, name in killed]
    events += [(one.at, f"{one.who} begins step {one.number} with {one.digest}") for one in done]
    began = other.at - 0.1
    lines += [f"  {at - step.at:+.3f} s: {what}" for at, what in sorted(events) if began < at < step.at + 0.02]
    return "\n".join(lines)


def run(kind: Kind, choices: random.Random, seconds: float, cuts: bool) -> bool:
    """Run one job; return whether it had no finding."""
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        hosts = opened.enter_context(VirtualHosts(kind.workers)) if cuts else ()
        job = Job(kind, choices, folder, hosts)
        found = None
        try:
            job.live(seconds)
            stopped_at = time.time()
            job.end()
        except Failed as error:
            found, stopped_at = f"{error}\n{job.stacks()}", time.time()
        finally:
            job.kill_all()
        done = list(steps(folder, {name for _, name in job.killed}))
    if found is None and (two := first_difference(done, stopped_at)):
        found = story(two, done, job.killed)
    kills = collections.Counter("host" if who.partition("-")[0] in kind.hosts else "trainer" for _, who in job.killed)
    if found is None and not (kills["trainer"] and (kills["host"] or not kind.hosts)):
        found = "not everything has been killed that was to be"
    killed = " and ".join(f"{count} {what}s" for what, count in kills.items())
    silences = "".join(f", {count} {what}" for what, count in sorted(job.silences.items()))
    killed = f"{killed or 'none'} killed{silences}"
    print(f"{kind.title}: {len(done)} steps, {killed}: {found or 'nothing was found'}", flush=True)
    return found is None


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak.training", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="length of the soak (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of all choices (default: random)")
    parser.add_argument("--cuts", action="store_true", help="cut workers off too; as root, on virtual hosts")
    arguments = parser.parse_args()
    print(f"soak of training: {arguments.minutes:g} minutes, seed {arguments.seed}", flush=True)
    _PROCESSES.set_forkserver_preload(["tests.soak.training"])
    choices = random.Random(arguments.seed)
    seconds = 60 * arguments.minutes / len(KINDS)
    results = [run(kind, choices, seconds, arguments.cuts) for kind in KINDS]
    return 0 if all(results) else 1


# The first optimizer imports much of torch: do that once here, instead of in each process that comes back.
torch.optim.Adam([torch.zeros(1, requires_grad=True)])
