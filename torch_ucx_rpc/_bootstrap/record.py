"""What a worker tells the others of itself, and how that is written in the Store."""

from __future__ import annotations

import base64
import dataclasses
import os
import socket
from pathlib import Path
from typing import Any

import torch

from torch_ucx_rpc._devices.maps import DeviceMaps, convert_devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What a worker tells the others of itself.

    A process is known by its id only within a pid namespace, until it ends, and until the machine reboots: hence
    `pid_namespace`, `process_start_time` (in clock ticks since the boot) and `boot_id`.

    Its RRefs bear numbers from `first_rref_id` on. In a group without a size, where another worker may take its rank,
    that is a random one; and others may put it `in_doubt`: one of them has lost this worker, which may be alive.
    """

    rank: int
    name: str
    world_size: int
    session: int
    first_rref_id: int
    address: bytes
    package_version: str
    torch_version: str
    device_maps: DeviceMaps
    reply_device_maps: DeviceMaps
    devices: list[torch.device]
    device_count: int
    host: str
    boot_id: str
    pid_namespace: int
    pid: int
    process_start_time: int
    in_doubt: bool

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name!r}, pid {self.pid} on {self.host})"

    def has_ended_beside(self, other: Record) -> bool:
        """Whether the process has ended, as far as a process on the same machine can see; False for other machines."""
        if (self.boot_id, self.pid_namespace) != (other.boot_id, other.pid_namespace):
            return False
        try:
            # One that has ended stays there until its parent asks how.
            return process_stat(self.pid)[0] in "ZX" or start_time(self.pid) != self.process_start_time
        except FileNotFoundError:
            return True

    def to_values(self) -> dict[str, Any]:
        """What JSON can write."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["address"] = base64.b64encode(self.address).decode("ascii")
        return {**values, **convert_devices(values, str)}

    @classmethod
    def from_values(cls, values: Any) -> Record:
        """The record that `to_values` was called on; ValueError for what it cannot have returned."""
        try:
            address = base64.b64decode(values["address"], validate=True)
            record = cls(**{**values, "address": address, **convert_devices(values, _device)})
        # Whatever other values lead to; RuntimeError is torch's for a device that cannot be.
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"that is not the record of a worker: {error}") from error
        for field in dataclasses.fields(cls):
            if field.type in ("bool", "int", "str") and type(getattr(record, field.name)).__name__ != field.type:
                raise ValueError(f"that is not the record of a worker: its {field.name} is no {field.type}")
        return record


def _device(text: object) -> torch.device:
    # torch takes numbers too, for the GPUs of this machine.
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is no device")
    return torch.device(text)


def process_facts() -> dict[str, Any]:
    """The fields of a `Record` that tell where this process is and which one it is."""
    host = socket.gethostname()
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        # Hidden in some sandboxes.
        boot_id = host
    return {
        "host": host,
        "boot_id": boot_id,
        "pid_namespace": Path("/proc/self/ns/pid").stat().st_ino,
        "pid": os.getpid(),
        "process_start_time": start_time(os.getpid()),
    }


def process_stat(pid: int) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` that follow the process's name: the second is its parent's pid."""
    # The name, in parentheses, may contain anything, spaces and parentheses too.
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def start_time(pid: int) -> int:
    # The 22nd field of all, and the name is the second.
    return int(process_stat(pid)[19])
