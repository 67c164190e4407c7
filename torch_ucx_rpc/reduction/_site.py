"""What this process has of reduction, as long as one agent runs: hosts, and the servers that it uses."""

# mypy: allow-untyped-calls

from __future__ import annotations

import pickle
import secrets
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_rpc import WorkerInfo
from torch.distributed.rpc import api
from torch.futures import Future

from torch_ucx_rpc._observe.lost import Gone, current_agent, ended, subscribe
from torch_ucx_rpc.reduction._host import Host, Spec, Trainer

if TYPE_CHECKING:
    from torch_ucx_rpc.reduction._client import Server
    from torch_ucx_rpc.reduction._data_parallel import DataParallel


class Meeting:
    """The trainers of a server without hosts of its own, until all have come who will be the hosts."""

    def __init__(self, expected: int, expected_names: tuple[str, ...]) -> None:
        self.expected = expected
        self.expected_names = expected_names
        self.came: dict[int, tuple[Trainer, Future[tuple[str, ...]]]] = {}
        self.hosts: tuple[str, ...] | None = None


class Site:
    """Of one life of this worker."""

    def __init__(self, agent: Any) -> None:
        self.era = api._ALL_WORKER_NAMES
        # torch keeps the C++ object of TensorPipe's agent alive, but not the Python one, by which it is known here.
        self._agent = weakref.ref(agent) if hasattr(agent, "_statistics") else lambda: agent
        info: WorkerInfo = agent.get_worker_info()
        self.trainer = Trainer(info.id, info.name, int(getattr(agent, "session", 0)) or secrets.randbits(63))
        self.lock = threading.RLock()
        self.hosts: dict[str, Host] = {}
        self.servers: dict[str, Server] = {}
        self.meetings: dict[str, Meeting] = {}
        self.models: weakref.WeakValueDictionary[str, DataParallel] = weakref.WeakValueDictionary()
        self._gone: dict[int, str] = {}
        self._unsubscribe = subscribe(self._on_gone)
        for gone in ended():
            self._on_gone(gone)

    def is_of(self, agent: Any) -> bool:
        return self._agent() is agent

    def close(self) -> None:
        self._unsubscribe()

    @property
    def agent(self) -> Any:
        agent = self._agent()
        if agent is None:
            raise RuntimeError("RPC has been shut down")
        return agent

    @property
    def devices(self) -> list[int | str | torch.device]:
        """Those on which tensors may arrive, which futures have to know."""
        return sorted(getattr(self.agent, "devices", ()), key=str)

    @property
    def is_static(self) -> bool:
        return bool(getattr(self.agent, "is_static_group", True))

    def living(self) -> list[WorkerInfo]:
        """By rank."""
        infos = sorted(self.agent.get_worker_infos(), key=lambda info: info.id)
        if not self.is_static:
            return infos
        with self.lock:
            names = set(self._gone.values())
        return [info for info in infos if info.name not in names]

    def open(self, spec: Spec) -> str | None:
        with self.lock:
            host = self.hosts.get(spec.key)
            if host is None:
                host = self.hosts[spec.key] = Host(spec, self.trainer.name, self.living)
                for life, name in self._gone.items():
                    host.on_gone(life, name)
        if _facts(host.spec) != _facts(spec):
            return (
                f"the server {spec.key!r} was made with {_shown(host.spec)}, and worker is asked for it with "
                f"{_shown(spec)}: all trainers must call serve alike, or give the servers different names"
            )
        return None

    def meet(self, key: str, trainer: Trainer, expected: int, names: tuple[str, ...]) -> Future[tuple[str, ...]]:
        """The hosts of a server that is to be spread over its trainers, once they are all there."""
        future: Future[tuple[str, ...]] = Future()
        with self.lock:
            meeting = self.meetings.setdefault(key, Meeting(expected, names))
            meeting.came[trainer.life] = (trainer, future)
            complete = self._complete(meeting)
        for waiting, hosts in complete:
            waiting.set_result(hosts)
        return future

    def _complete(self, meeting: Meeting) -> list[tuple[Future[tuple[str, ...]], tuple[str, ...]]]:
        if meeting.hosts is None:
            came = {trainer.name for trainer, _ in meeting.came.values()} | set(self._gone.values())
            names = meeting.expected_names
            if not (came.issuperset(names) if names else len(meeting.came) >= meeting.expected):
                return []
            meeting.hosts = tuple(trainer.name for trainer in sorted(trainer for trainer, _ in meeting.came.values()))
        waiting = [(future, meeting.hosts) for _, future in meeting.came.values()]
        meeting.came.clear()
        return waiting

    def _on_gone(self, gone: Gone) -> None:
        with self.lock:
            self._gone[gone.session] = gone.name
            hosts, servers = list(self.hosts.values()), list(self.servers.values())
            complete = []
            for meeting in self.meetings.values():
                meeting.came.pop(gone.session, None)
                complete += self._complete(meeting) if meeting.came else []
        for future, names in complete:
            future.set_result(names)
        for server in servers:
            server.on_gone(gone.name)
        for host in hosts:
            host.on_gone(gone.session, gone.name)


def _facts(spec: Spec) -> Any:
    values = spec._replace(optimizer=None, expected=0, expected_names=())
    return (values, None if spec.optimizer is None else pickle.dumps(spec.optimizer))


def _shown(spec: Spec) -> str:
    optimizer = "no optimizer" if spec.optimizer is None else f"optimizer={spec.optimizer!r}"
    return (
        f"{optimizer}, asynchronous={spec.asynchronous}, replica={spec.replica}, checkpoint={spec.checkpoint!r}, "
        f"hosts {', '.join(spec.hosts)}"
    )


_site: Site | None = None
_making = threading.Lock()


def site() -> Site:
    """Of the agent that runs; RuntimeError without one."""
    global _site
    if (known := _site) is not None and known.era is api._ALL_WORKER_NAMES:
        return known
    agent = current_agent()
    with _making:
        known = _site
        if known is None or not known.is_of(agent):
            if known is not None:
                known.close()
            known = _site = Site(agent)
        known.era = api._ALL_WORKER_NAMES
        return known
