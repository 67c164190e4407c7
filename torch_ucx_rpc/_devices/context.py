"""CUDA's contexts on the devices that this worker names for RPC, made before UCX starts.

UCX also starts without a context. But then it does not learn which device its CUDA transports belong to, and chooses
protocols without that knowledge. Its log says "set cuda sys_device to unknown as no context is currently active".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from torch_ucx_rpc._devices.maps import CPU, DeviceMaps


class DeviceOptions(Protocol):
    """The part of `UcxRpcBackendOptions` that names devices."""

    @property
    def device_maps(self) -> DeviceMaps: ...
    @property
    def reply_device_maps(self) -> DeviceMaps: ...
    @property
    def devices(self) -> Iterable[torch.device]: ...


def own_devices(options: DeviceOptions) -> list[torch.device]:
    """Return the local CUDA devices that the options name; other workers may name more in their maps."""
    named = set(options.devices)
    for requests in options.device_maps.values():
        named.update(requests)
    for replies in options.reply_device_maps.values():
        named.update(replies.values())
    return sorted(named - {CPU}, key=lambda device: device.index)


def make_contexts(options: DeviceOptions) -> None:
    """Make a context on each of these devices. The context of the first device becomes current, unless this thread's
    device has a context already.

    `maps.check` reports missing devices, with the worker and the cure.
    """
    devices = [device for device in own_devices(options) if device.index < torch.cuda.device_count()]
    for device in reversed(devices):
        torch.cuda.synchronize(device)
