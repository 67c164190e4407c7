"""Servers without workers of their own: the trainers meet at the first of them, and become the hosts.

The trainers that begin with a server meet at the living worker with the lowest rank. Trainers that come later ask all
workers whether one of them trains, and take over what it knows. Once all hosts are lost, all trainers that are left
become the hosts of the server's next generation; again the worker with the lowest rank says who they are, to each of
them the same.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import WorkerInfo
from torch.futures import Future

from torch_ucx_rpc._workers.life import Life, PerLife
from torch_ucx_rpc._workers.lost import Gone, timed_out, was_lost
from torch_ucx_rpc.reduction._messages import Spec, Trainer

_T = TypeVar("_T")
_Names = tuple[str, ...]

# Between two looks for a worker of a lower rank, at which the trainers meet then.
_LOOK_AGAIN_S = 0.02


class Hosts(NamedTuple):
    """The hosts of a server of which trainers are the hosts; see `Spec` for ``shards`` and ``generation``."""

    names: _Names
    shards: int
    generation: int


class Found(NamedTuple):
    """The hosts as a trainer finds them, and those of them that others do not use any more."""

    hosts: Hosts
    lost: _Names = ()


class NextHosts(NamedTuple):
    """The hosts after all have been lost, and the trainers for whom the first step by way of them waits."""

    hosts: Hosts
    expected: _Names


class Use(NamedTuple):
    """How a worker uses a server."""

    hosts: Hosts
    # Those of them that it does not use any more. Another worker may have such a name by now.
    lost: _Names
    # Steps wait for it: it does not wait for another one's state.
    has_joined: bool
    # It has done a step.
    has_begun: bool


class Used(Protocol):
    """A server, as the worker that uses it keeps it."""

    @property
    def spec(self) -> Spec:
        """Its hosts among other things."""

    @property
    def takes_part(self) -> bool:
        """Whether this worker trains by way of it."""

    def lost_hosts(self) -> _Names:
        """See `Use`."""

    @property
    def has_joined(self) -> bool:
        """See `Use`."""

    @property
    def has_begun(self) -> bool:
        """See `Use`."""


class Meetings:
    """The servers that this worker uses, by name, and the meetings of trainers here. Any thread may use it."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._lock = threading.Lock()
        self._used: dict[str, Used] = {}
        self._meetings: dict[str, _Meeting] = {}
        self._convening = threading.Lock()
        self._convened: dict[tuple[str, int], Hosts] = {}
        life.watch(self._on_gone)
        life.before_leaving(self._close)

    # -- what this worker uses

    def use(self, server: Used) -> None:
        self._used[server.spec.name] = server

    def use_of(self, name: str, takes_part: bool) -> Use | None:
        """How this worker uses a server; with ``takes_part`` only if it trains by way of it."""
        server = self._used.get(name)
        if server is None or (takes_part and not server.takes_part):
            return None
        spec = server.spec
        hosts = Hosts(spec.hosts, spec.shards, spec.generation)
        return Use(hosts, server.lost_hosts(), server.has_joined, server.has_begun)

    # -- the first hosts

    def meet(self, name: str, trainer: Trainer, expected: int, names: _Names) -> Future[_Names]:
        """The hosts of a server, once all are there."""
        future: Future[_Names] = Future()
        with self._lock:
            meeting = self._meetings.get(name)
            living = {info.name for info in self._life.living()}
            if meeting is None or (meeting.hosts is not None and living.isdisjoint(meeting.hosts)):
                # Those of the last meeting have all ended, and nobody uses their server: it is made anew.
                meeting = self._meetings[name] = _Meeting(expected, names)
                for convened in list(self._convened):
                    if convened[0] == name:
                        del self._convened[convened]
            meeting.came[trainer.life] = (trainer, future)
            complete = self._complete(meeting)
        for waiting, hosts in complete:
            waiting.set_result(hosts)
        return future

    def _complete(self, meeting: _Meeting) -> list[tuple[Future[_Names], _Names]]:
        """The answers that can be given now. The caller holds the lock."""
        if meeting.hosts is None:
            # Of a name that has been taken anew, the successor may come.
            gone = self._life.gone_names() - {info.name for info in self._life.living()}
            came = {trainer.name for trainer, _ in meeting.came.values()} | gone
            names = meeting.expected_names
            are_all_there = came.issuperset(names) if names else len(meeting.came) >= meeting.expected
            # All go to a worker with a lower rank as soon as they see it.
            if not are_all_there or self._life.living()[0].name != self._life.info.name:
                return []
            meeting.hosts = tuple(trainer.name for trainer in sorted(trainer for trainer, _ in meeting.came.values()))
        waiting = [(future, meeting.hosts) for _, future in meeting.came.values()]
        meeting.came.clear()
        return waiting

    def _close(self) -> None:
        """This worker leaves: all who have come meet elsewhere."""
        with self._lock:
            waiting = [future for meeting in self._meetings.values() for _, future in meeting.came.values()]
            self._meetings.clear()
        for future in waiting:
            future.set_result(())

    def _on_gone(self, gone: Gone) -> None:
        complete = []
        with self._lock:
            for meeting in self._meetings.values():
                meeting.came.pop(gone.session, None)
                complete += self._complete(meeting) if meeting.came else []
        for future, hosts in complete:
            future.set_result(hosts)

    # -- the next hosts

    def convene(self, name: str, generation: int) -> NextHosts:
        """The hosts of a server in this generation, or a later one: all that train, the first time this is asked."""
        with self._convening:
            known = _ask_all(self._life, name, takes_part=True)
            newest = _newest(known)
            if newest is None or newest.generation < generation:
                if (name, generation) not in self._convened:
                    shards = 1 if newest is None else newest.shards
                    self._convened[name, generation] = Hosts(tuple(known), shards, generation)
                newest = self._convened[name, generation]
            return NextHosts(newest, _joined(known))


class _Meeting:
    """The trainers of a server, until all have come that will be its hosts."""

    def __init__(self, expected: int, expected_names: _Names) -> None:
        self.expected = expected
        self.expected_names = expected_names
        self.came: dict[int, tuple[Trainer, Future[_Names]]] = {}
        self.hosts: _Names | None = None


meetings = PerLife(Meetings)


def _use_of(name: str, takes_part: bool) -> Use | None:
    return meetings().use_of(name, takes_part)


@rpc.functions.async_execution
def _meet(name: str, trainer: Trainer, expected: int, names: _Names) -> Future[_Names]:
    return meetings().meet(name, trainer, expected, names)


def _convene(name: str, generation: int) -> NextHosts:
    return meetings().convene(name, generation)


def trainers_as_hosts(name: str, expected: int, expected_names: _Names, life: Life) -> Found:
    """The trainers of a server in the order of ranks, and who of them is lost; waits for all if none has begun yet."""
    own = Trainer.of(life)
    while True:
        # One that trains already knows.
        known = _ask_all(life, name, takes_part=False)
        if newest := _newest(known):
            lost = {host for use in known.values() if use.hosts == newest for host in use.lost}
            return Found(newest, tuple(sorted(lost)))
        leader = life.living()[0]
        try:
            # By a call to this worker too, which has a timeout.
            call = rpc.rpc_async(leader, _meet, args=(name, own, expected, expected_names))
            while not (call.done() or life.is_static) and life.living()[0].name == leader.name:
                time.sleep(_LOOK_AGAIN_S)
            if (call.done() or life.is_static) and (names := tuple(call.wait())):
                return Found(Hosts(names, len(names), 0))
        except RuntimeError as error:
            if timed_out(error):
                raise RuntimeError(
                    f"not all trainers have called reduction.serve(): it waits for {expected}"
                    f"{' (' + ', '.join(expected_names) + ')' if expected_names else ''}. Where fewer train, "
                    f"serve(trainers=N) says how many ({error})"
                ) from error
            if not was_lost(error):
                raise
        # The worker that was asked has ended, or is about to, or has been asked too early.
        time.sleep(_LOOK_AGAIN_S)


def is_trained_by_others(name: str, life: Life) -> bool:
    """Whether other workers have done steps by way of a server."""
    known = _ask_all(life, name, takes_part=True)
    return any(use.has_begun for worker, use in known.items() if worker != life.info.name)


def joined_trainers(name: str, life: Life) -> _Names:
    """The trainers of a server for which a step by way of new hosts waits."""
    return _joined(_ask_all(life, name, takes_part=True))


def other_trainers_as_hosts(name: str, generation: int, life: Life) -> NextHosts:
    """The trainers that are left when all hosts of a server are lost. RuntimeError if there are none."""
    while True:
        try:
            found = _call(life, life.living()[0], _convene, name, generation)
        except RuntimeError as error:
            if not was_lost(error):
                raise
            time.sleep(_LOOK_AGAIN_S)
            continue
        if not found.hosts.names:
            raise RuntimeError(f"all trainers of the server {name!r} are lost or have left, and so are its hosts")
        return found


def _newest(known: dict[str, Use]) -> Hosts | None:
    return max((use.hosts for use in known.values()), key=lambda hosts: hosts.generation, default=None)


def _joined(known: dict[str, Use]) -> _Names:
    return tuple(worker for worker, use in known.items() if use.has_joined)


def _ask_all(life: Life, name: str, takes_part: bool) -> dict[str, Use]:
    """By worker, in the order of ranks, how it uses a server."""
    asked: list[tuple[WorkerInfo, Callable[[], Use | None]]] = []
    for info in life.living():
        if info.name == life.info.name:
            asked.append((info, lambda: meetings().use_of(name, takes_part)))
        else:
            try:
                asked.append((info, rpc.rpc_async(info, _use_of, args=(name, takes_part)).wait))
            except RuntimeError as error:
                if not was_lost(error):
                    raise
    known = {}
    for info, answer in asked:
        try:
            if (use := answer()) is not None:
                known[info.name] = use
        except RuntimeError as error:
            if not was_lost(error):
                raise
    return known


def _call(life: Life, worker: WorkerInfo, function: Callable[..., _T], *arguments: object) -> _T:
    if worker.name == life.info.name:
        return function(*arguments)
    answer: _T = rpc.rpc_sync(worker, function, args=arguments)
    return answer
