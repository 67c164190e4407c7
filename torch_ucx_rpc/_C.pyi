# ruff: noqa: N999 - the name is that of the shared library
"""The extension, as Python sees it; written in ``csrc/bindings``."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, overload

import torch
from torch._C import Future
from torch._C._distributed_rpc import RpcAgent, WorkerInfo

UCP_API_VERSION: str
BUILT_FOR_TORCH: str
WIRE_VERSION: int
LATENCY_BUCKET_ENDS_NS: tuple[int, ...]
REQUEST_TYPES: list[str]

def ucx_library() -> dict[str, str]: ...
def spare_name_lookups() -> bool: ...
def name_lookups_spared() -> int: ...
def load_libcrypto() -> None: ...
def interrupt_threads() -> None: ...
def threads_left() -> int: ...
def take_back(pickled_rref: tuple[object, ...]) -> None: ...
def set_warning_receiver(receive: Callable[[str], None] | None) -> None: ...
def flush_warnings() -> None: ...

class DeviceMemorySource:
    torch: DeviceMemorySource
    replaced_torch: DeviceMemorySource
    entry_points: DeviceMemorySource

def set_device_pool(source: DeviceMemorySource, entry_points: tuple[int, int] | None) -> None: ...
def stop_device_pool() -> None: ...
def devices_of(future: Future[Any]) -> list[torch.device]: ...
def begin_rref_ids(are_random: bool) -> int: ...
def begin_context_ids(rank: int, are_random: bool) -> int: ...
def why_beyond_storage(tensor: torch.Tensor) -> str | None: ...

class OutsideModes:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

class SentValue:
    def wait(self) -> None: ...

class PostedValue:
    def wait(self, timeout: float | None = None) -> torch.Tensor | list[torch.Tensor]: ...

class ChannelOfAgent:
    def advance(self, group: str, epoch: int) -> None: ...
    def advance_all(self, prefix: str, epoch: int) -> None: ...
    def close(self, group: str) -> None: ...
    def put(
        self,
        group: str,
        epoch: int,
        to: str,
        tag: str,
        tensors: list[torch.Tensor],
        is_single: bool,
        timeout: float | None,
    ) -> SentValue: ...
    def post(
        self,
        group: str,
        epoch: int,
        source: str,
        tag: str,
        into: list[torch.Tensor] | None,
        is_single: bool,
    ) -> PostedValue: ...

def channel_of(agent: RpcAgent) -> ChannelOfAgent: ...
def define_native_op(
    schema: str,
    compile: Callable[[list[tuple[torch.dtype, int, bool]]], tuple[int, torch.dtype, int]],
    explain: Callable[[list[Any]], str],
    release: int,
) -> None: ...
def translate_runtime_errors(
    original: Callable[[str], BaseException | None],
    failure: Callable[[str, str, dict[str, object]], BaseException | None],
) -> None: ...

class Member:  # write only: a read would decode the last four, which are bytes, as text
    rank: int
    name: str
    host: str
    pid: int
    boot_id: str
    pid_namespace: int
    process_start_time: int
    user: str
    lifeline_host: str
    lifeline_port: int
    session: int
    first_rref_id: int
    first_context_id: int
    address: bytes
    send_key: bytes
    receive_key: bytes
    join_key: bytes

class Waiting(Enum):
    auto = ...
    poll = ...
    sleep = ...

class AgentOptions:
    rpc_timeout: float
    num_worker_threads: int
    max_worker_threads: int
    heartbeat_limit: float
    reconnect_limit: float
    receive_window_bytes: int
    host_pool_bytes: int
    waiting: Waiting
    stream_priority: int

class UcxRpcAgent(RpcAgent):
    def __init__(
        self,
        name: str,
        rank: int,
        *,
        options: AgentOptions,
        expected_peers: int,
        network_devices: str,
    ) -> None: ...
    @property
    def address(self) -> bytes: ...
    @property
    def session(self) -> int: ...
    def _add_members(self, members: list[Member]) -> None: ...
    def _set_membership(
        self, on_join: Callable[[str], None], on_lost: Callable[[int], None], join_key: bytes
    ) -> None: ...
    def _announce_join(self, record: str, members: Sequence[int]) -> None: ...
    def _set_on_gone(self, callback: Callable[[int, str, int, bool, str, bool], None] | None) -> None: ...
    def _unadmitted(self) -> list[WorkerInfo]: ...
    def _remove_member(self, session: int) -> None: ...
    def _set_device_maps(
        self,
        device_maps: dict[str, dict[torch.device, torch.device]],
        reverse_device_maps: dict[str, dict[torch.device, torch.device]],
        devices: list[torch.device],
    ) -> None: ...
    def _barrier(self, timeout: float) -> int: ...
    def _release_references(self) -> None: ...
    def _statistics(self) -> dict[str, Any]: ...
    def _check_process(self) -> None: ...
    def _wait(self, future: Future[Any]) -> None: ...
    def _await(self, future: Future[Any]) -> None: ...
    def join(self, shutdown: bool = False, timeout: float = 0) -> None: ...
    def shutdown(self) -> None: ...
    @overload
    def get_worker_info(self) -> WorkerInfo: ...
    @overload
    def get_worker_info(self, name: str) -> WorkerInfo: ...
    @overload
    def get_worker_info(self, id: int) -> WorkerInfo: ...

class FaultyUcxRpcAgent(UcxRpcAgent):
    def __init__(
        self,
        name: str,
        rank: int,
        *,
        options: AgentOptions,
        expected_peers: int,
        network_devices: str,
        messages_to_fail: list[str],
        messages_to_delay: dict[str, float],
        num_fail_sends: int,
    ) -> None: ...
