"""The agent of this process: its Python class, the running agent, and its end. ``_start`` starts it."""

# mypy: allow-untyped-calls

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import Store
from torch._C._distributed_rpc import _cleanup_python_rpc_handler, _destroy_rref_context, _reset_current_rpc_agent

from torch_ucx_rpc._bootstrap.dynamic_group import DynamicGroup, StaticGroup
from torch_ucx_rpc._bootstrap.lifeline import Lifeline
from torch_ucx_rpc._bootstrap.network import default_devices
from torch_ucx_rpc._bootstrap.record import Record
from torch_ucx_rpc._bootstrap.secret import NO_FRAME_KEYS, Secret
from torch_ucx_rpc._devices import maps as device_maps
from torch_ucx_rpc._devices import pool as device_pool
from torch_ucx_rpc._native import _C
from torch_ucx_rpc._options import UcxRpcBackendOptions
from torch_ucx_rpc._threads import interrupt_all

# Seconds for which the end of the interpreter waits for interrupted threads.
_THREADS_END_S = 0.5

# The running agent. torch holds the C++ object. This reference keeps the Python object alive, with the attributes
# below, so that `_get_current_rpc_agent` returns it.
current: UcxRpcAgent | None = None


_Native = TypeVar("_Native", _C.AgentOptions, _C.Member)


_FIELDS = {
    structure: [name for name, field in vars(structure).items() if isinstance(field, property)]
    for structure in (_C.AgentOptions, _C.Member)
}


def _filled(native: _Native, source: object, **others: object) -> _Native:
    """Set each field of a C++ structure from ``others``, or else from the attribute of ``source`` with its name."""
    for name in _FIELDS[type(native)]:
        setattr(native, name, others[name] if name in others else getattr(source, name))
    return native


class UcxRpcAgent(_C.UcxRpcAgent):
    """The C++ agent, with the attributes of TensorPipe's agent that torch's Python code expects."""

    # The secret of the job; None in a job without one.
    secret: Secret | None = None
    # The group that this worker is a member of.
    group: StaticGroup | DynamicGroup | None = None
    # Devices of this worker that appear in device maps.
    devices: Collection[torch.device] = ()
    # The port where Prometheus reads this worker's statistics; None without one.
    prometheus_port: int | None = None

    def __init__(
        self, name: str, rank: int, expected_peers: int, store: Store, options: UcxRpcBackendOptions, **faults: Any
    ) -> None:
        super().__init__(
            name,
            rank,
            options=_filled(_C.AgentOptions(), options, waiting=getattr(_C.Waiting, options.waiting)),
            expected_peers=expected_peers,
            network_devices=default_devices(store, _C.ucx_library()["path"]),
            **faults,
        )
        self.store = store
        # The lifeline, and the servers that give out this worker's statistics. `shutdown` closes them after the agent's
        # end.
        self.endpoints = contextlib.ExitStack()
        self.lifeline: Lifeline | None = None
        # Called when this worker begins a graceful shutdown, while it still has RPC.
        self.before_leaving: list[Callable[[], None]] = []
        self._options = options
        self._owner = os.getpid()

    @property
    def is_static_group(self) -> bool:
        return self.group is None or self.group.is_static

    def _get_backend_options(self) -> UcxRpcBackendOptions:
        return self._options

    def add_records(self, records: Iterable[Record], members: Collection[Record]) -> None:
        """Make workers known to the agent. This worker itself is in the first call.

        Args:
            records: the workers to add.
            members: all workers known so far, ``records`` included.
        """
        self._add_members([_filled(_C.Member(), record, **self._frame_keys(record)) for record in records])
        own = next(member for member in members if member.session == self.session)
        replies = device_maps.maps_of_replies(own.name, members)
        self.devices = devices = device_maps.devices_in_use(own, replies)
        device_maps.check_ucx(devices, _C.ucx_library()["path"], os.environ)
        if devices:
            # A call with CUDA tensors may arrive before this process has used CUDA itself.
            torch.cuda.init()
            device_pool.choose(self._options, devices)
        self._set_device_maps(own.device_maps, replies, devices)

    def _frame_keys(self, record: Record) -> Mapping[str, bytes]:
        return NO_FRAME_KEYS if self.secret is None else self.secret.frame_keys(self.session, record.session)

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        self._check_process()
        # The libraries leave their groups now, while this worker still answers requests.
        for callback in self.before_leaving:
            callback()
        if self.group is not None and not self.group.is_static:
            # From now on, workers that join need not ask this one to admit them.
            self.group.leave()
        super().join(shutdown, timeout)

    def shutdown(self) -> None:
        self._check_process()
        with contextlib.ExitStack() as last:
            last.callback(self._forget)
            # Close the endpoints after the agent's end: an endpoint may be answering, and its answer may wait for
            # calls.
            last.callback(self.endpoints.close)
            last.callback(super().shutdown)
            if self.group is not None:
                self.group.leave()

    def _forget(self) -> None:
        global current
        if current is self:
            current = None

    def is_of_this_process(self) -> bool:
        """False in a forked child, which has the agent's memory but not its threads and connections."""
        return self._owner == os.getpid()


def destroy_rref_context(ignores_leaks: bool) -> None:
    """Shut the agent down, then call torch's function of this name.

    torch destroys its RRefs without a lock. Running requests and the handling of lost workers use RRefs, so the
    shutdown ends them first.
    """
    agent = current
    try:
        if agent is not None:
            agent.shutdown()
    finally:
        _destroy_rref_context(ignores_leaks)


@atexit.register
def _shut_down_at_exit() -> None:
    """End an agent that the program has not shut down: its threads must be gone before the interpreter is finalized."""
    agent = current
    if agent is not None and agent.is_of_this_process():
        # Like rpc.shutdown(graceful=False), but at exit torch's warning of remaining RRefs is not a failure.
        destroy_rref_context(True)
        _cleanup_python_rpc_handler()
        _reset_current_rpc_agent()
    _end_threads()


def _end_threads() -> None:
    """Raise SystemExit in the handlers that still run and in the libraries' threads. Then wait for both.

    The wait ends when no handler is left and no library's thread is in C++, or after `_THREADS_END_S`. `_threads` says
    why. A thread that stays in C++ for longer ends with the process.
    """
    deadline = time.monotonic() + _THREADS_END_S
    _C.interrupt_threads()
    interrupt_all(deadline)
    while _C.threads_left() and time.monotonic() < deadline:
        time.sleep(0.001)
