"""Device maps: they say on which devices tensors arrive. This module checks and combines the maps of all workers.

docs/gpu.md has the rules. Errors begin with TensorPipe's words, which programs and PyTorch's tests look for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from torch_ucx_rpc.errors import JoinFailed

CPU = torch.device("cpu")

# From a device of the caller to a device of the callee, or back.
DeviceMap: TypeAlias = dict[torch.device, torch.device]
# Device maps by the name of the other worker.
DeviceMaps: TypeAlias = dict[str, DeviceMap]


class Worker(Protocol):
    """The part of a worker's record (``_bootstrap.record``) about devices."""

    @property
    def name(self) -> str: ...
    @property
    def torch_version(self) -> str: ...
    @property
    def device_maps(self) -> DeviceMaps: ...
    @property
    def reply_device_maps(self) -> DeviceMaps: ...
    @property
    def devices(self) -> list[torch.device]: ...
    @property
    def device_count(self) -> int: ...


# The fields of a worker that contain devices.
DEVICE_FIELDS = ("device_maps", "reply_device_maps", "devices")


def convert_devices(values: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Convert every device in the fields of a worker, or of its options, that contain devices; return these fields."""
    maps = {
        name: {
            callee: {convert(key): convert(value) for key, value in device_map.items()}
            for callee, device_map in values[name].items()
        }
        for name in ("device_maps", "reply_device_maps")
    }
    return {**maps, "devices": [convert(device) for device in values["devices"]]}


def reply_map(requests: DeviceMap, named: DeviceMap) -> DeviceMap:
    """Make the map for replies, from a callee's device to the caller's device where results arrive.

    Args:
        requests: the caller's device map for the callee.
        named: the caller's reply device map for the callee.
    """
    replies = {}
    for remote in requests.values():
        sources = [local for local, target in requests.items() if target == remote]
        if len(sources) > 1:
            # CPU tensors stay on the CPU unless a single device maps to it.
            sources = [local for local in sources if local.type == remote.type] or [CPU]
        replies[remote] = min(sources, key=lambda device: device.index or 0)
    return {**replies, **named}


def maps_of_replies(name: str, members: Iterable[Worker]) -> DeviceMaps:
    """Return the device maps for the replies of the worker ``name``, by caller."""
    maps = {
        caller.name: reply_map(caller.device_maps.get(name, {}), caller.reply_device_maps.get(name, {}))
        for caller in members
        if name in caller.device_maps or name in caller.reply_device_maps
    }
    return {caller: replies for caller, replies in maps.items() if replies}


def devices_in_use(own: Worker, replies: DeviceMaps) -> list[torch.device]:
    """Return the CUDA devices that RPC uses on a worker: its option ``devices``, or all its devices in any worker's
    maps.

    Args:
        replies: the result of `maps_of_replies` for this worker.
    """
    mentioned = set(own.devices)
    if not mentioned:
        for requests in own.device_maps.values():
            mentioned.update(requests)
        for named in own.reply_device_maps.values():
            mentioned.update(named.values())
        for returned in replies.values():
            mentioned.update(returned)
    return sorted(mentioned - {CPU}, key=lambda device: device.index)


def check(records: Sequence[Worker], is_static_group: bool = True) -> None:
    """Raise ValueError unless all device maps fit together. In a dynamic group, maps may name workers that have not
    joined yet."""
    members = {record.name: record for record in records}
    for record in records:
        if len(set(record.devices)) != len(record.devices):
            raise ValueError(f"Node {record.name} has duplicated devices: {_list(record.devices)}, on {record}")
        if absent := _absent(record.devices, record):
            raise ValueError(f"Node {record.name} has devices with invalid indices: {_list(absent)}. {_cure(record)}")
    for caller in records:
        names = {*caller.device_maps, *caller.reply_device_maps}
        if is_static_group and (unknown := sorted(name for name in names if name not in members)):
            raise ValueError(
                f"Node {caller.name} has invalid target node names in its device maps: "
                f"{', '.join(map(repr, unknown))}, on {caller}. The workers are {', '.join(map(repr, members))}."
            )
        for name in sorted(names):
            requests, replies = caller.device_maps.get(name, {}), caller.reply_device_maps.get(name, {})
            _check_side("source", [*requests, *replies.values()], caller, caller, name)
            if name in members:
                _check_side("target", [*requests.values(), *replies], members[name], caller, name)


def _check_side(side: str, devices: list[torch.device], owner: Worker, caller: Worker, callee: str) -> None:
    """Check one side of a caller's maps for a callee; ``owner`` is the worker of the devices on that side."""
    which = f"in its device map for {callee}"
    if owner.devices and (unexpected := sorted({*devices} - {*owner.devices, CPU}, key=str)):
        raise ValueError(
            f"Node {caller.name} has unexpected {side} devices {which}: {_list(unexpected)}, on {caller}. The option "
            f"devices of {owner} allows only {_list(owner.devices)}."
        )
    if absent := _absent(devices, owner):
        raise ValueError(
            f"Node {caller.name} has {side} devices with invalid indices {which}: {_list(absent)}, on {caller}. "
            f"{_cure(owner)}"
        )


def _absent(devices: Iterable[torch.device], record: Worker) -> list[torch.device]:
    """The devices among these that the worker does not have."""
    return sorted({device for device in devices if device != CPU and device.index >= record.device_count}, key=str)


def _cure(record: Worker) -> str:
    if record.device_count == 0:
        return (
            f"There is no CUDA device for {record}: it needs a GPU that CUDA_VISIBLE_DEVICES lets it see and a CUDA "
            f"build of torch (its is {record.torch_version}), or the maps must leave CUDA out."
        )
    return f"{record} has {record.device_count}, numbered from 0."


def _list(devices: Iterable[torch.device]) -> str:
    return ", ".join(map(str, devices))


# UCX_TLS names transports, or groups of them. These names include the transports for device memory.
_FOR_CUDA = {"all", "cuda", "cuda_copy"}


def check_ucx(devices: Collection[torch.device], ucx_path: str, environment: Mapping[str, str]) -> None:
    """Raise JoinFailed if UCX would treat pointers to these devices as host memory, and crash.

    Args:
        ucx_path: the file of the loaded libucp.
        environment: the environment of the process, with the user's settings of UCX.
    """
    if not devices:
        return
    asked = f"tensors on {_list(devices)} are to be sent by RPC (device_maps, devices)"
    if not any((Path(ucx_path).resolve().parent / "ucx").glob("libuct_cuda.so*")):
        raise JoinFailed(
            f"{asked}, and this UCX has no module for CUDA: {ucx_path}. Install libucx-cu12 or libucx-cu13, "
            f"or a UCX that is built with CUDA."
        )
    chosen = environment.get("UCX_TLS", "all")
    transports = {name.partition(":")[0] for name in chosen.removeprefix("^").split(",")}
    if bool(transports & _FOR_CUDA) == chosen.startswith("^"):
        raise JoinFailed(f"{asked}, and UCX_TLS={chosen} leaves out CUDA transports: add cuda to it, or unset it.")
