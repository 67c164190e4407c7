"""One life of this worker, from ``init_rpc`` to ``shutdown``: `life`, and `PerLife`, for objects that last as long.

A process may have several lives, one after the other. A library's knowledge of workers belongs to one life: in the next
one the same names are other workers.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch._C._distributed_rpc import WorkerInfo, _is_current_rpc_agent_set
from torch.distributed.rpc import api

from torch_ucx_rpc._workers.lost import Gone, current_agent, ended, subscribe
from torch_ucx_rpc.errors import ShutDown

T = TypeVar("T")


class Life:
    """The agent of one life of this worker, and the workers that are alive. Any thread may use it.

    Attributes:
        info (WorkerInfo): rank and name of this worker.
        number (int): distinguishes the lives of workers of this name; the agent's session, if it has one.
        tells_ends (bool): the agent reports the end of a worker, as UCX's does. Elsewhere a failed call shows it.
        is_static (bool): the group has a fixed size, and its list of workers keeps the dead.
    """

    def __init__(self, agent: Any) -> None:
        self.tells_ends = hasattr(agent, "_statistics")
        # torch keeps the C++ object of TensorPipe's agent alive, but not the Python one, which is used here.
        self._agent = weakref.ref(agent) if self.tells_ends else lambda: agent
        # torch's object of worker names, as it was when `lasts` last saw that RPC still runs in this life.
        self._names: object = None
        self.info: WorkerInfo = agent.get_worker_info()
        self.number = int(getattr(agent, "session", 0)) or secrets.randbits(63)
        self.is_static = bool(getattr(agent, "is_static_group", True))
        self._devices: list[int | str | torch.device] | None = None
        self._lock = threading.Lock()
        self._gone_names: set[str] = set()
        self._subscriptions: list[Callable[[], None]] = []
        # This callback hears of an end first, so later ones may ask for the living workers.
        self.watch(lambda gone: self.lose(gone.name))

    def is_of(self, agent: Any) -> bool:
        return agent is not None and self._agent() is agent

    def lasts(self) -> bool:
        """Tell whether RPC still runs in this life."""
        # torch makes new names in each life. Comparing these costs less than asking for the agent. torch also makes new
        # names within init_rpc, when requests may already have come.
        names = api._ALL_WORKER_NAMES
        if self._names is names:
            return bool(_is_current_rpc_agent_set())
        try:
            lasts = self.is_of(current_agent())
        except RuntimeError:
            return False
        if lasts:
            self._names = names
        return lasts

    @property
    def agent(self) -> Any:
        """Return the agent of this life. Raises ShutDown after the shutdown."""
        agent = self._agent()
        if agent is None:
            raise ShutDown("RPC has been shut down")
        return agent

    @property
    def devices(self) -> list[int | str | torch.device]:
        """Return the devices on which tensors may arrive, for futures. Raises ShutDown after the shutdown."""
        agent = self.agent
        if self._devices is None:
            self._devices = sorted(getattr(agent, "devices", ()) or _devices_in_options(agent), key=str)
        return self._devices

    def living(self) -> list[WorkerInfo]:
        """Return all workers that this one takes to be alive, by rank."""
        infos = sorted(self.agent.get_worker_infos(), key=lambda info: info.id)
        gone = self.gone_names() if self.is_static else set()
        return [info for info in infos if info.name not in gone]

    def gone_names(self) -> set[str]:
        """Return names of all workers that have ended; a new worker may have taken such a name since."""
        with self._lock:
            return set(self._gone_names)

    def lose(self, name: str) -> None:
        """Count a worker as dead."""
        with self._lock:
            self._gone_names.add(name)

    def watch(self, callback: Callable[[Gone], None]) -> None:
        """Have a function called at the end of each worker as long as this life lasts, also for workers that have ended
        already. It may be called twice for a worker that ends during this call."""
        self._subscriptions.append(subscribe(callback))
        for gone in ended():
            callback(gone)

    def before_leaving(self, callback: Callable[[], None]) -> None:
        """Have this called when this worker begins a graceful shutdown, while it still has RPC.

        The worker answers all requests before it leaves. Other backends do not call back.
        """
        if self.tells_ends:
            self.agent.before_leaving.append(callback)

    def close(self) -> None:
        for unsubscribe in self._subscriptions:
            unsubscribe()


def _devices_in_options(agent: Any) -> Sequence[torch.device]:
    return getattr(agent._get_backend_options(), "devices", ()) if torch.cuda.is_available() else ()


_life: Life | None = None
_making = threading.Lock()


def life() -> Life:
    """Return the present life of this worker. Raises NotRunning if RPC is not running."""
    global _life
    if (known := _life) is not None and known.lasts():
        return known
    agent = current_agent()
    with _making:
        known = _life
        if known is None or not known.is_of(agent):
            if known is not None:
                known.close()
            known = _life = Life(agent)
        return known


class PerLife(Generic[T]):
    """One `T` in each life of this worker: a call returns it, and the first call makes it.

    Example::

        >>> directory = PerLife(Directory)
        >>> directory().look_up("score")
    """

    def __init__(self, make: Callable[[Life], T]) -> None:
        self._make = make
        self._known: tuple[Life, T] | None = None
        self._making = threading.Lock()

    def __call__(self) -> T:
        """Return the `T` of the present life. Raises NotRunning if RPC is not running."""
        if (known := self._known) is not None and known[0].lasts():
            return known[1]
        lasting = life()
        with self._making:
            known = self._known
            if known is None or known[0] is not lasting:
                known = self._known = (lasting, self._make(lasting))
            return known[1]

    def is_made(self) -> bool:
        """True if RPC is running, and this life has its `T`."""
        return (known := self._known) is not None and known[0].lasts()

    def last(self) -> T | None:
        """Return the latest `T`, whose life may be over."""
        return None if (known := self._known) is None else known[1]
