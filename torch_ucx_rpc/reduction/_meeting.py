"""Servers without workers of their own: the trainers meet at the first of them, and become the hosts."""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import threading

import torch.distributed.rpc as rpc
from torch.futures import Future

from torch_ucx_rpc._observe.life import Life, PerLife
from torch_ucx_rpc._observe.lost import Gone, timed_out, was_lost
from torch_ucx_rpc.reduction._messages import Trainer
from torch_ucx_rpc.reduction._server import hosts_of

_Hosts = tuple[str, ...]


class _Meeting:
    """The trainers of a server, until all have come that will be its hosts."""

    def __init__(self, expected: int, expected_names: tuple[str, ...]) -> None:
        self.expected = expected
        self.expected_names = expected_names
        self.came: dict[int, tuple[Trainer, Future[_Hosts]]] = {}
        self.hosts: _Hosts | None = None


class _Meetings:
    """The meetings at this worker, by key of the server. Any thread may use it."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._lock = threading.Lock()
        self._meetings: dict[str, _Meeting] = {}
        life.watch(self._on_gone)

    def meet(self, key: str, trainer: Trainer, expected: int, names: tuple[str, ...]) -> Future[_Hosts]:
        """The hosts of a server, once all are there."""
        future: Future[_Hosts] = Future()
        with self._lock:
            meeting = self._meetings.setdefault(key, _Meeting(expected, names))
            meeting.came[trainer.life] = (trainer, future)
            complete = self._complete(meeting)
        for waiting, hosts in complete:
            waiting.set_result(hosts)
        return future

    def _complete(self, meeting: _Meeting) -> list[tuple[Future[_Hosts], _Hosts]]:
        """The answers that can be given now. The caller holds the lock."""
        if meeting.hosts is None:
            came = {trainer.name for trainer, _ in meeting.came.values()} | self._life.gone_names()
            names = meeting.expected_names
            if not (came.issuperset(names) if names else len(meeting.came) >= meeting.expected):
                return []
            meeting.hosts = tuple(trainer.name for trainer in sorted(trainer for trainer, _ in meeting.came.values()))
        waiting = [(future, meeting.hosts) for _, future in meeting.came.values()]
        meeting.came.clear()
        return waiting

    def _on_gone(self, gone: Gone) -> None:
        complete = []
        with self._lock:
            for meeting in self._meetings.values():
                meeting.came.pop(gone.session, None)
                complete += self._complete(meeting) if meeting.came else []
        for future, hosts in complete:
            future.set_result(hosts)


_meetings = PerLife(_Meetings)


@rpc.functions.async_execution
def _meet(key: str, trainer: Trainer, expected: int, names: tuple[str, ...]) -> Future[_Hosts]:
    return _meetings().meet(key, trainer, expected, names)


def trainers_as_hosts(key: str, expected: int, expected_names: tuple[str, ...], life: Life) -> _Hosts:
    """The trainers of a server in the order of ranks; waits for all of them if none has begun yet."""
    if hosts := hosts_of(key):
        return hosts
    # One that trains already knows.
    own = Trainer.of(life)
    others = [info for info in life.living() if info.name != own.name]
    for answer in [rpc.rpc_async(info, hosts_of, args=(key,)) for info in others]:
        try:
            if hosts := answer.wait():
                return tuple(hosts)
        except RuntimeError as error:
            if not was_lost(error):
                raise
    while True:
        leader = life.living()[0]
        try:
            if leader.name == own.name:
                return _meetings().meet(key, own, expected, expected_names).wait()
            return tuple(rpc.rpc_sync(leader, _meet, args=(key, own, expected, expected_names)))
        except RuntimeError as error:
            if timed_out(error):
                raise RuntimeError(
                    f"not all trainers have called reduction.serve(): it waits for {expected}"
                    f"{' (' + ', '.join(expected_names) + ')' if expected_names else ''}. Where fewer train, "
                    f"serve(trainers=N) says how many ({error})"
                ) from error
            if not was_lost(error):
                raise
