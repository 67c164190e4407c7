"""The agent of this process: how it is started, by ``init_rpc`` or through torch's registry, and how it ends.

Starting takes the steps of ``torch.distributed.rpc.init_rpc``, with the Store and the exchange of members of this
package (``_rendezvous``, ``_members``). If one of them fails, what was begun is undone and ``init_rpc`` can be called
again.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import logging
import numbers
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed.rpc as rpc
from torch._C._distributed_c10d import PrefixStore, Store
from torch._C._distributed_rpc import (
    RpcBackendOptions,
    WorkerInfo,
    _cleanup_python_rpc_handler,
    _destroy_rref_context,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_profiler_node_id,
)
from torch.distributed import DistError
from torch.distributed.rpc import api

import torch_ucx_rpc
from torch_ucx_rpc import _conflicts, _device_maps, _device_pool
from torch_ucx_rpc._dynamic_group import DynamicGroup, StaticGroup
from torch_ucx_rpc._members import gather_members
from torch_ucx_rpc._native import _C
from torch_ucx_rpc._network import default_devices
from torch_ucx_rpc._options import UcxRpcBackendOptions
from torch_ucx_rpc._record import Record, process_facts
from torch_ucx_rpc._rendezvous import STORE_ENDS, Deadline, check_rank, create_store
from torch_ucx_rpc._secret import Secret, load_secret

_logger = logging.getLogger(__name__)

# The running agent. torch keeps the C++ object; this keeps the Python one, with the attributes below, and as long as it
# lives `_get_current_rpc_agent` returns that.
current: UcxRpcAgent | None = None


def _native_options(options: UcxRpcBackendOptions) -> _C.AgentOptions:
    native = _C.AgentOptions()
    native.rpc_timeout = options.rpc_timeout
    native.num_worker_threads = options.num_worker_threads
    native.max_worker_threads = options.max_worker_threads
    native.heartbeat_limit = options.heartbeat_limit
    native.receive_window_bytes = options.receive_window_bytes
    native.host_pool_bytes = options.host_pool_bytes
    native.waiting = getattr(_C.Waiting, options.waiting)
    return native


class UcxRpcAgent(_C.UcxRpcAgent):
    """What torch's Python code, written for TensorPipe's agent, expects of one besides calls."""

    # The job's; None for a job without one.
    secret: Secret | None = None
    # Which it is a member of.
    group: StaticGroup | DynamicGroup | None = None
    # Those of this worker that device maps name.
    devices: Collection[torch.device] = ()

    def __init__(
        self, name: str, rank: int, expected_peers: int, store: Store, options: UcxRpcBackendOptions, **faults: Any
    ) -> None:
        super().__init__(
            name,
            rank,
            options=_native_options(options),
            expected_peers=expected_peers,
            network_devices=default_devices(store, _C.ucx_library()["path"]),
            **faults,
        )
        self.store = store
        self._options = options
        self._owner = os.getpid()
        self._endpoints = contextlib.ExitStack()
        self.prometheus_port: int | None = None

    def open_endpoints(self) -> None:
        """Let Prometheus, if it was asked for, and ``python -m torch_ucx_rpc top`` read this worker's statistics."""
        # They need the agent's class, and are needed by its objects alone.
        from torch_ucx_rpc import _observation, _statistics

        snapshot = functools.partial(_statistics.of_agent, self)
        if self._options.prometheus_port is not None:
            from torch_ucx_rpc import _prometheus

            endpoint = _prometheus.serve(self._options.prometheus_port, self.get_worker_info().id, snapshot)
            self._endpoints.callback(endpoint.close)
            self.prometheus_port = endpoint.port
        try:
            observed = _observation.Observed(snapshot)
        # Some sandboxes have no such sockets. A job can do without being watched.
        except OSError as error:
            _logger.info("worker %s cannot be watched by top: %s", self.get_worker_info().name, error)
        else:
            self._endpoints.callback(observed.close)

    @property
    def is_static_group(self) -> bool:
        return self.group is None or self.group.is_static

    def _get_backend_options(self) -> UcxRpcBackendOptions:
        return self._options

    def add_records(self, records: Iterable[Record], members: Collection[Record]) -> None:
        """Make workers known to the agent, itself first; ``members`` are all that are known by then."""
        secret = self.secret
        self._add_members(
            [
                _C.Member(
                    rank=record.rank,
                    name=record.name,
                    host=record.host,
                    pid=record.pid,
                    boot_id=record.boot_id,
                    pid_namespace=record.pid_namespace,
                    process_start_time=record.process_start_time,
                    session=record.session,
                    first_rref_id=record.first_rref_id,
                    address=record.address,
                    **({} if secret is None else secret.frame_keys(self.session, record.session)),
                )
                for record in records
            ]
        )
        own = next(member for member in members if member.session == self.session)
        replies = _device_maps.maps_of_replies(own.name, members)
        self.devices = devices = _device_maps.devices_in_use(own, replies)
        _device_maps.check_ucx(devices, _C.ucx_library()["path"], os.environ)
        if devices:
            # A call with CUDA tensors may arrive before this process has used CUDA itself.
            torch.cuda.init()
            _device_pool.choose(self._options, devices)
        self._set_device_maps(own.device_maps, replies, devices)

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        self._check_process()
        if self.group is not None and not self.group.is_static:
            # Who joins from now on need not ask this worker.
            self.group.leave()
        super().join(shutdown, timeout)

    def shutdown(self) -> None:
        self._check_process()
        with contextlib.ExitStack() as last:
            last.callback(self._forget)
            # Whoever is being answered may wait for other workers, until the agent ends.
            last.callback(self._endpoints.close)
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


# The agent that is made for options of a type.
AGENT_TYPES: dict[type[UcxRpcBackendOptions], type[UcxRpcAgent]] = {UcxRpcBackendOptions: UcxRpcAgent}

# What UCX is told of a group whose size nobody knows; it chooses transports for large numbers differently.
_TYPICAL_PEERS = 8


# By init_method, rank, world_size (None for a group without a size) and timeout.
OpenStore: TypeAlias = Callable[[str, int, int | None, float], Store]


def init_rpc(
    name: str,
    rank: int,
    world_size: int | None,
    options: UcxRpcBackendOptions | None,
    open_store: OpenStore = create_store,
) -> None:
    """``torch.distributed.rpc.init_rpc`` for the backend UCX."""
    torch._C._log_api_usage_once("torch.distributed.init_rpc")
    if options is None:
        options = UcxRpcBackendOptions()
    rank, world_size = _check_arguments(name, rank, world_size, options)
    _conflicts.check(world_size)
    secret = _load_secret(options)
    store = open_store(options.init_method, rank, world_size, options.rpc_timeout)
    if world_size is None:
        _join_dynamic_group(store, name, rank, options, secret)
        return
    # Groups that follow each other on one Store are told apart by torch's count of them, TensorPipe's included. It goes
    # on only when all workers have met: who gave up alone, and tries again, must find the others where they are.
    with rpc._init_counter_lock:
        counted = PrefixStore(f"rpc_prefix_{rpc._init_counter}", store)
    agent = _join_static_group(store, counted, name, rank, world_size, options, secret)
    with rpc._init_counter_lock:
        rpc._init_counter += 1
    _start(agent)


def init_backend(
    store: Store, name: str, rank: int, world_size: int | None, rpc_backend_options: UcxRpcBackendOptions
) -> UcxRpcAgent:
    """Handler of ``backend_registry.init_backend``: a running agent, by way of a Store that the caller brings."""
    rank, world_size = _check_arguments(name, rank, world_size, rpc_backend_options)
    _conflicts.check(world_size)
    secret = _load_secret(rpc_backend_options)
    if not isinstance(store, Store):
        raise TypeError(f"`store` must be a torch.distributed.Store; {store!r} is none")
    if world_size is None:
        return _join_dynamic_group(store, name, rank, rpc_backend_options, secret)
    agent = _join_static_group(store, store, name, rank, world_size, rpc_backend_options, secret)
    _start(agent)
    return agent


def _check_arguments(name: Any, rank: Any, world_size: Any, options: Any) -> tuple[int, int | None]:
    """Rank and world_size as ints, the second None for a group without a size.

    What is wrong here is said before any other worker hears of this one.
    """
    # The beginnings of these two, and of the third, are torch's.
    if not isinstance(options, RpcBackendOptions):
        raise TypeError(
            f"Argument rpc_backend_options must be an instance of RpcBackendOptions, and {options!r} is none"
        )
    if not isinstance(options, UcxRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `UcxRpcBackendOptions` for the backend UCX, and {options!r} is none"
        )
    if current is not None:
        current._check_process()
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized: call rpc.shutdown() before init_rpc is called again")
    for argument, value in {"name": name, "rank": rank, "world_size": world_size}.items():
        type_ = str if argument == "name" else numbers.Integral
        if not isinstance(value, type_) and not (argument == "world_size" and value is None):
            raise TypeError(f"{argument} must be {'a str' if type_ is str else 'an int'}; {value!r} is none")
    if not world_size:
        world_size = None
        rank = check_rank(options.init_method, int(rank))
    elif not 0 <= rank < world_size:
        raise ValueError(f"rank must be between 0 and world_size - 1, which is {world_size - 1}; it is {rank}")
    # torch's rules for names.
    WorkerInfo(name, int(rank))
    _device_pool.check(options, name)
    return int(rank), world_size and int(world_size)


def _load_secret(options: UcxRpcBackendOptions) -> Secret | None:
    secret = load_secret(options.secret_file)
    if secret is not None:
        _C.load_libcrypto()
    return secret


def _join_static_group(
    store: Store,
    counted: Store,
    name: str,
    rank: int,
    world_size: int,
    options: UcxRpcBackendOptions,
    secret: Secret | None,
) -> UcxRpcAgent:
    """An agent that knows all workers of the group and their device maps, not started yet.

    They meet at ``counted``, the part of the Store that is of this group alone.
    """
    agent = _make_agent(name, rank, world_size, store, options, secret)
    with _undone_on_error(agent):
        own = _record_of(agent, world_size)
        group = StaticGroup(store, own, secret)
        group.refuse_mixture()
        members = gather_members(counted, own, options.rpc_timeout, secret)
        agent.add_records(members, members)
        agent.group = group
        group.announce()
    return agent


def _join_dynamic_group(
    store: Store, name: str, rank: int, options: UcxRpcBackendOptions, secret: Secret | None
) -> UcxRpcAgent:
    """A running agent, which all members of the group have admitted."""
    deadline = Deadline(options.rpc_timeout)
    agent = _make_agent(name, rank, _TYPICAL_PEERS, store, options, secret)
    with _undone_on_error(agent):
        agent.group = group = DynamicGroup(store, _record_of(agent, 0), agent)
        try:
            group.enter()
        except DistError as error:
            raise RuntimeError(
                f"worker {name!r} (rank {rank}) lost the Store while it joined the group: {error}.{STORE_ENDS}"
            ) from error
    _start(agent)
    with _undone_on_error(agent):
        group.meet(deadline)
    return agent


def _make_agent(
    name: str, rank: int, expected_peers: int, store: Store, options: UcxRpcBackendOptions, secret: Secret | None
) -> UcxRpcAgent:
    make = next(AGENT_TYPES[type_] for type_ in type(options).__mro__ if type_ in AGENT_TYPES)
    agent = make(name, rank, expected_peers, store, copy.copy(options))
    agent.secret = secret
    with _undone_on_error(agent):
        # Before the others hear of this worker: a port that is taken is nothing that they should wait for.
        agent.open_endpoints()
    return agent


def _record_of(agent: UcxRpcAgent, world_size: int) -> Record:
    info = agent.get_worker_info()
    options = agent._get_backend_options()
    return Record(
        rank=info.id,
        name=info.name,
        world_size=world_size,
        session=agent.session,
        first_rref_id=_C.begin_rref_ids(are_random=world_size == 0),
        address=agent.address,
        package_version=f"{torch_ucx_rpc.__version__} (wire version {_C.WIRE_VERSION})",
        torch_version=torch.__version__,
        device_maps=options.device_maps,
        reply_device_maps=options.reply_device_maps,
        devices=options.devices,
        device_count=torch.cuda.device_count(),
        in_doubt=False,
        **process_facts(),
    )


def _start(agent: UcxRpcAgent) -> None:
    global current
    rank = agent.get_worker_info().id
    with _undone_on_error(agent):
        # Before it starts: others may call this worker, and their first request may call back.
        _C.init_autograd(rank, are_ids_random=not agent.is_static_group)
        _set_profiler_node_id(rank)
        current = agent
        api._init_rpc_states(agent)


@contextlib.contextmanager
def _undone_on_error(agent: UcxRpcAgent) -> Iterator[None]:
    try:
        yield
    except BaseException:
        agent.shutdown()
        if _is_current_rpc_agent_set():
            _reset_current_rpc_agent()
        raise


def destroy_rref_context(ignores_leaks: bool) -> None:
    """torch's, with the agent shut down before.

    torch takes its RRefs apart without the lock under which requests, and the end of a worker, make use of them.
    """
    agent = current
    try:
        if agent is not None:
            agent.shutdown()
    finally:
        _destroy_rref_context(ignores_leaks)


@atexit.register
def _shut_down_at_exit() -> None:
    """End the agent of a program that does not: its threads must be gone before the interpreter is finalized."""
    agent = current
    if agent is None or not agent.is_of_this_process():
        return
    # As rpc.shutdown(graceful=False); but RRefs that still exist, of which torch warns, are no error where all ends.
    destroy_rref_context(True)
    _cleanup_python_rpc_handler()
    _reset_current_rpc_agent()
