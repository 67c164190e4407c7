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

from torch_ucx_rpc._observe.life import Life, PerLife
from torch_ucx_rpc._observe.lost import Gone, timed_out, was_lost
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
    # For whom the first step by way of these hosts waits.
    expected: _Names


class Used(Protocol):
    """A server, as the worker that uses it keeps it."""

    spec: Spec

    @property
    def takes_part(self) -> bool:
        """Whether this worker trains by way of it."""

    @property
    def has_joined(self) -> bool:
        """Whether steps wait for this worker: it does not wait for another one's state."""


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

    def hosts_of(self, name: str, takes_part: bool) -> Hosts | None:
        """The hosts of a server that this worker uses, or, with ``takes_part``, by way of which it trains.

        Expected is this worker alone, or nobody.
        """
        server = self._used.get(name)
        if server is None or (takes_part and not server.takes_part):
            return None
        spec = server.spec
        return Hosts(spec.hosts, spec.shards, spec.generation, (self._life.info.name,) if server.has_joined else ())

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

    def convene(self, name: str, generation: int) -> Hosts:
        """The hosts of a server in this generation, or a later one: all that train, the first time this is asked."""
        with self._convening:
            known = _ask_all(self._life, name, takes_part=True)
            newest = max(known.values(), key=lambda hosts: hosts.generation, default=None)
            expected = tuple(worker for hosts in known.values() for worker in hosts.expected)
            if newest is not None and newest.generation >= generation:
                return newest._replace(expected=expected)
            if (name, generation) not in self._convened:
                shards = 1 if newest is None else newest.shards
                self._convened[name, generation] = Hosts(tuple(known), shards, generation, expected)
            return self._convened[name, generation]


class _Meeting:
    """The trainers of a server, until all have come that will be its hosts."""

    def __init__(self, expected: int, expected_names: _Names) -> None:
        self.expected = expected
        self.expected_names = expected_names
        self.came: dict[int, tuple[Trainer, Future[_Names]]] = {}
        self.hosts: _Names | None = None


meetings = PerLife(Meetings)


def _hosts_of(name: str, takes_part: bool) -> Hosts | None:
    return meetings().hosts_of(name, takes_part)


@rpc.functions.async_execution
def _meet(name: str, trainer: Trainer, expected: int, names: _Names) -> Future[_Names]:
    return meetings().meet(name, trainer, expected, names)


def _convene(name: str, generation: int) -> Hosts:
    return meetings().convene(name, generation)


def trainers_as_hosts(name: str, expected: int, expected_names: _Names, life: Life) -> Hosts:
    """The trainers of a server in the order of ranks; waits for all of them if none has begun yet."""
    own = Trainer.of(life)
    while True:
        # One that trains already knows.
        known = _ask_all(life, name, takes_part=False)
        if known:
            return max(known.values(), key=lambda hosts: hosts.generation)
        leader = life.living()[0]
        try:
            # By a call to this worker too, which has a timeout.
            call = rpc.rpc_async(leader, _meet, args=(name, own, expected, expected_names))
            while not (call.done() or life.is_static) and life.living()[0].name == leader.name:
                time.sleep(_LOOK_AGAIN_S)
            if (call.done() or life.is_static) and (names := tuple(call.wait())):
                return Hosts(names, len(names), 0, expected_names)
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


def other_trainers_as_hosts(name: str, generation: int, life: Life) -> Hosts:
    """The trainers that are left when all hosts of a server are lost. RuntimeError if there are none."""
    while True:
        try:
            found = _call(life, life.living()[0], _convene, name, generation)
        except RuntimeError as error:
            if not was_lost(error):
                raise
            time.sleep(_LOOK_AGAIN_S)
            continue
        if not found.names:
            raise RuntimeError(f"all trainers of the server {name!r} are lost or have left, and so are its hosts")
        return found


def _ask_all(life: Life, name: str, takes_part: bool) -> dict[str, Hosts]:
    """By worker, in the order of ranks, the hosts of a server that it uses."""
    asked: list[tuple[WorkerInfo, Callable[[], Hosts | None]]] = []
    for info in life.living():
        if info.name == life.info.name:
            asked.append((info, lambda: meetings().hosts_of(name, takes_part)))
        else:
            try:
                asked.append((info, rpc.rpc_async(info, _hosts_of, args=(name, takes_part)).wait))
            except RuntimeError as error:
                if not was_lost(error):
                    raise
    known = {}
    for info, answer in asked:
        try:
            if (hosts := answer()) is not None:
                known[info.name] = hosts
        except RuntimeError as error:
            if not was_lost(error):
                raise
    return known


def _call(life: Life, worker: WorkerInfo, function: Callable[..., _T], *arguments: object) -> _T:
    if worker.name == life.info.name:
        return function(*arguments)
    answer: _T = rpc.rpc_sync(worker, function, args=arguments)
    return answer
