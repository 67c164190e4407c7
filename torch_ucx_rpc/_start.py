"""Starts the agent of this process, by ``init_rpc`` or through torch's registry of backends.

The steps are those of ``torch.distributed.rpc.init_rpc``, with the Store and the exchange of members of this package
(``_bootstrap``). If a step fails, this module undoes the steps before it, and the program can call ``init_rpc`` again.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import copy
import logging
import numbers
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed.rpc as rpc
from torch._C._distributed_c10d import PrefixStore, Store
from torch._C._distributed_rpc import (
    RpcBackendOptions,
    WorkerInfo,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_profiler_node_id,
)
from torch.distributed import DistError
from torch.distributed.rpc import api

from torch_ucx_rpc import _agent, _build_info
from torch_ucx_rpc._agent import UcxRpcAgent
from torch_ucx_rpc._arguments import wrong_type, wrong_value
from torch_ucx_rpc._bootstrap import site_settings
from torch_ucx_rpc._bootstrap.deadline import Deadline
from torch_ucx_rpc._bootstrap.dynamic_group import DynamicGroup, StaticGroup
from torch_ucx_rpc._bootstrap.lifeline import open_lifeline
from torch_ucx_rpc._bootstrap.members import gather_members
from torch_ucx_rpc._bootstrap.record import Record, process_facts
from torch_ucx_rpc._bootstrap.rendezvous import STORE_ENDS, check_rank, create_store
from torch_ucx_rpc._bootstrap.secret import Secret, load_secret
from torch_ucx_rpc._devices import context as device_context
from torch_ucx_rpc._devices import pool as device_pool
from torch_ucx_rpc._native import _C
from torch_ucx_rpc._observe import socket as observation
from torch_ucx_rpc._options import UcxRpcBackendOptions
from torch_ucx_rpc.errors import JoinFailed, RpcError

if TYPE_CHECKING:
    from torch_ucx_rpc._observe.statistics import Statistics

_logger = logging.getLogger(__name__)

# The type of agent for each type of options; ``testing`` adds one.
AGENT_TYPES: dict[type[UcxRpcBackendOptions], type[UcxRpcAgent]] = {UcxRpcBackendOptions: UcxRpcAgent}

# UCX chooses other transports for large groups. For a group without a size, UCX gets this number of peers.
_TYPICAL_PEERS = 8
# Seconds that a joining worker still has once it has lost a member whose host died.
_AFTER_A_LOSS_S = 10.0
# torch keeps a rank in 16 bits.
_HIGHEST_RANK = 2**15 - 1


# Arguments: init_method, rank, world_size (None for a group without a size), timeout.
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
    site_settings.raise_limit_of_files()
    site_settings.check(world_size)
    secret = _load_secret(options)
    # torch's Store looks up names as soon as it has a client, so turn these lookups off first.
    _C.spare_name_lookups()
    store = open_store(options.init_method, rank, world_size, _init_timeout(options))
    if world_size is None:
        _join_dynamic_group(store, name, rank, options, secret)
        return
    # torch counts the groups of a process, TensorPipe's included. The count is part of the prefix of a group's keys in
    # the Store. It grows only after all workers have met: a worker that gave up alone and tries again must find the
    # others.
    with rpc._init_counter_lock:
        counted = PrefixStore(f"rpc_prefix_{rpc._init_counter}", store)
    agent = _join_static_group(store, counted, name, rank, world_size, options, secret)
    with rpc._init_counter_lock:
        rpc._init_counter += 1
    _start(agent)


def init_backend(
    store: Store, name: str, rank: int, world_size: int | None, rpc_backend_options: UcxRpcBackendOptions
) -> UcxRpcAgent:
    """Handler of ``backend_registry.init_backend``: returns a running agent, which met the others at ``store``."""
    rank, world_size = _check_arguments(name, rank, world_size, rpc_backend_options)
    site_settings.raise_limit_of_files()
    site_settings.check(world_size)
    secret = _load_secret(rpc_backend_options)
    if not isinstance(store, Store):
        raise wrong_type("`store`", "a torch.distributed.Store", store)
    if world_size is None:
        return _join_dynamic_group(store, name, rank, rpc_backend_options, secret)
    agent = _join_static_group(store, store, name, rank, world_size, rpc_backend_options, secret)
    _start(agent)
    return agent


def _check_arguments(name: Any, rank: Any, world_size: Any, options: Any) -> tuple[int, int | None]:
    """Return rank and world_size as ints; world_size is None for a group without a size.

    Wrong arguments raise TypeError or ValueError before any other worker hears of this one.
    """
    # The errors about options, and the error about RPC that runs already, begin with torch's words.
    if not isinstance(options, RpcBackendOptions):
        raise wrong_type("Argument rpc_backend_options", "an instance of RpcBackendOptions", options)
    if not isinstance(options, UcxRpcBackendOptions):
        raise wrong_type("`rpc_backend_options`", "a `UcxRpcBackendOptions` for the backend UCX", options)
    if _agent.current is not None:
        _agent.current._check_process()
    if _is_current_rpc_agent_set():
        raise JoinFailed("RPC is already initialized: call rpc.shutdown() before init_rpc is called again")
    for argument, value in {"name": name, "rank": rank, "world_size": world_size}.items():
        type_ = str if argument == "name" else numbers.Integral
        if not isinstance(value, type_) and not (argument == "world_size" and value is None):
            raise wrong_type(argument, "a str" if type_ is str else "an int", value)
    if not world_size:
        world_size = None
        rank = check_rank(options.init_method, int(rank))
    elif world_size < 0:
        raise wrong_value("world_size", "the number of workers, or None for a group without a size", world_size)
    elif not 0 <= rank < world_size:
        raise ValueError(f"rank must be between 0 and world_size - 1, which is {world_size - 1}; it is {rank}")
    if rank > _HIGHEST_RANK:
        raise wrong_value("rank", f"at most {_HIGHEST_RANK}, as in torch", rank)
    # Raises for a name that breaks torch's rules.
    WorkerInfo(name, int(rank))
    device_pool.check(options, name)
    return int(rank), world_size and int(world_size)


def _init_timeout(options: UcxRpcBackendOptions, is_joining: bool = False) -> float:
    """Seconds that ``init_rpc`` waits for others; 0 is no limit. A worker that joins waits until dead members are
    lost."""
    if options.init_timeout is not None:
        return options.init_timeout
    if options.rpc_timeout == 0:
        return 0
    # A short rpc_timeout does not shorten this wait, since processes start seconds apart. TensorPipe's rendezvous
    # ignores it too.
    limit = max(options.rpc_timeout, rpc.constants.DEFAULT_RPC_TIMEOUT_SEC)
    if is_joining and options.heartbeat_limit:
        limit = max(limit, options.heartbeat_limit + options.reconnect_limit + _AFTER_A_LOSS_S)
    return limit


def _load_secret(options: UcxRpcBackendOptions) -> Secret | None:
    secret = load_secret(options.secret_file)
    if secret is not None:
        with _native_errors_named():
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
    """Return an agent that knows all workers of the group and their device maps, and is not started yet.

    The workers meet at ``counted``, the part of the Store that belongs to this group alone.
    """
    agent = _make_agent(name, rank, world_size, store, options, secret)
    with _undone_on_error(agent):
        own = _record_of(agent, world_size)
        group = StaticGroup(store, own, secret)
        group.refuse_mixture()
        members = gather_members(counted, own, _init_timeout(options), secret)
        agent.add_records(members, members)
        agent.group = group
        group.announce()
    return agent


def _join_dynamic_group(
    store: Store, name: str, rank: int, options: UcxRpcBackendOptions, secret: Secret | None
) -> UcxRpcAgent:
    """Return a running agent that all members of the group have admitted."""
    deadline = Deadline(_init_timeout(options, is_joining=True))
    agent = _make_agent(name, rank, _TYPICAL_PEERS, store, options, secret)
    with _undone_on_error(agent):
        agent.group = group = DynamicGroup(store, _record_of(agent, 0), agent, secret)
        try:
            group.enter()
        except DistError as error:
            raise JoinFailed(
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
    device_context.make_contexts(options)
    with _native_errors_named():
        agent = make(name, rank, expected_peers, store, copy.copy(options))
    agent.secret = secret
    with _undone_on_error(agent):
        agent.lifeline = open_lifeline(store)
        if agent.lifeline is not None:
            agent.endpoints.callback(agent.lifeline.close)
        # Open them before other workers hear of this one: a port in use must not make others wait.
        _open_endpoints(agent, options)
    return agent


def _open_endpoints(agent: UcxRpcAgent, options: UcxRpcBackendOptions) -> None:
    """Let ``python -m torch_ucx_rpc top`` read this worker's statistics, and Prometheus if the option is set."""
    info = agent.get_worker_info()

    def snapshot() -> Statistics:
        from torch_ucx_rpc._observe import statistics

        return statistics.of_agent(agent)

    # Load both modules on demand: every worker starts, but few have observers.
    if options.prometheus_port is not None:
        from torch_ucx_rpc._observe import prometheus

        endpoint = prometheus.serve(options.prometheus_port, info.id, snapshot)
        agent.endpoints.callback(endpoint.close)
        agent.prometheus_port = endpoint.port
    try:
        observed = observation.Observed(snapshot)
    # Some sandboxes have no such sockets. A job can run without observers.
    except OSError as error:
        _logger.info("top cannot watch worker %s: %s", info.name, error)
    else:
        agent.endpoints.callback(observed.close)


def _record_of(agent: UcxRpcAgent, world_size: int) -> Record:
    info = agent.get_worker_info()
    options = agent._get_backend_options()
    return Record(
        rank=info.id,
        name=info.name,
        world_size=world_size,
        session=agent.session,
        first_rref_id=_C.begin_rref_ids(are_random=world_size == 0),
        first_context_id=_C.begin_context_ids(info.id, are_random=world_size == 0),
        address=agent.address,
        package_version=f"{_build_info.VERSION} (wire version {_C.WIRE_VERSION})",
        torch_version=torch.__version__,
        device_maps=options.device_maps,
        reply_device_maps=options.reply_device_maps,
        devices=options.devices,
        device_count=torch.cuda.device_count(),
        in_doubt=False,
        lifeline_host=agent.lifeline.host if agent.lifeline is not None else "",
        lifeline_port=agent.lifeline.port if agent.lifeline is not None else 0,
        **process_facts(),
    )


def _start(agent: UcxRpcAgent) -> None:
    rank = agent.get_worker_info().id
    with _undone_on_error(agent):
        # Set these before the agent starts: the first request of another worker may already call back.
        _set_profiler_node_id(rank)
        _agent.current = agent
        with _native_errors_named():
            api._init_rpc_states(agent)


@contextlib.contextmanager
def _native_errors_named() -> Iterator[None]:
    """Let errors of C++ that keep the agent from starting, such as a full file table, become JoinFailed."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RpcError):
            raise
        raise JoinFailed(str(error)) from None


@contextlib.contextmanager
def _undone_on_error(agent: UcxRpcAgent) -> Iterator[None]:
    try:
        yield
    except BaseException:
        agent.shutdown()
        if _is_current_rpc_agent_set():
            _reset_current_rpc_agent()
        raise
