"""The record of a worker: its description for the other workers, which the Store holds as JSON."""

from __future__ import annotations

import base64
import functools
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_ucx_rpc._devices.maps import DEVICE_FIELDS, DeviceMaps, convert_devices


class Record(NamedTuple):
    """The description of one worker for the others.

    A process id identifies a process only within a pid namespace, until the process ends or the machine reboots. So the
    record also has `pid_namespace`, `process_start_time` (in clock ticks since the boot) and `boot_id`.

    Workers share memory only if their `user` is the same: an id and its user namespace. `lifeline_port` is 0 for a
    worker without a lifeline (``lifeline``).

    The worker numbers its RRefs from `first_rref_id` on, and its contexts of distributed autograd from
    `first_context_id` on. In a group without a size another worker may take its rank, so these numbers are random.
    There, `in_doubt` means that another member has lost this worker, which may still be alive.
    """

    rank: int
    name: str
    world_size: int
    session: int
    first_rref_id: int
    first_context_id: int
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
    user: str
    lifeline_host: str
    lifeline_port: int
    in_doubt: bool

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name!r}, pid {self.pid} on {self.host})"

    def has_ended_beside(self, other: Record) -> bool:
        """Whether the process has ended, as ``other`` can see on the same machine; False for other machines."""
        if (self.boot_id, self.pid_namespace) != (other.boot_id, other.pid_namespace):
            return False
        try:
            # A process that has ended stays in the table, as a zombie, until its parent asks for its exit code.
            return process_stat(self.pid)[0] in "ZX" or start_time(self.pid) != self.process_start_time
        except (FileNotFoundError, ProcessLookupError):  # The latter: it ended during the read.
            return True

    def to_values(self) -> dict[str, Any]:
        """This record as values that JSON can write."""
        values = self._asdict()
        values["address"] = base64.b64encode(self.address).decode("ascii")
        return {**values, **convert_devices(values, str)}

    @classmethod
    def from_values(cls, values: Any) -> Record:
        """The record that `to_values` converted; ValueError for other values."""
        try:
            address = base64.b64decode(values["address"], validate=True)
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"that is not the record of a worker: {error}") from error
        return cls.of_columns({name: [value] for name, value in {**values, "address": address}.items()})[0]

    @classmethod
    def of_columns(cls, columns: dict[str, list[Any]]) -> list[Record]:
        """The records whose fields have these values, the address as bytes; ValueError for other values."""
        try:
            for name, kind in _plain_fields().items():
                if not set(map(type, columns[name])) <= {kind}:
                    raise TypeError(f"its {name} is not a {kind.__name__}")
            columns = {**columns, **_convert_device_columns(columns)}
            return [cls(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        # Wrong values may raise any of these; torch raises RuntimeError for an impossible device.
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"that is not the record of a worker: {error}") from error


def _convert_device_columns(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    # Workers whose device fields are the same objects share one conversion.
    known: dict[tuple[int, ...], dict[str, Any]] = {}
    rows = []
    for row in zip(*(columns[name] for name in DEVICE_FIELDS), strict=True):
        key = tuple(map(id, row))
        if key not in known:
            known[key] = convert_devices(dict(zip(DEVICE_FIELDS, row, strict=True)), _device)
        rows.append(known[key])
    return {name: [row[name] for row in rows] for name in DEVICE_FIELDS}


@functools.cache
def _plain_fields() -> dict[str, type]:
    """Types of the fields that JSON needs no conversion for."""
    kinds = {kind.__name__: kind for kind in (bool, int, str)}
    # typing.get_type_hints would take 2 ms, since it looks up all types.
    names = {name: annotation.__forward_arg__ for name, annotation in Record.__annotations__.items()}
    return {name: kinds[kind] for name, kind in names.items() if kind in kinds}


def _device(text: object) -> torch.device:
    # torch.device also accepts numbers, and treats them as GPUs of this machine.
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is not a device")
    return torch.device(text)


def process_facts() -> dict[str, Any]:
    """The fields of a `Record` that identify this process and its machine."""
    host = socket.gethostname()
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        # Some sandboxes hide the file.
        boot_id = host
    return {
        "host": host,
        "boot_id": boot_id,
        "pid_namespace": Path("/proc/self/ns/pid").stat().st_ino,
        "pid": os.getpid(),
        "process_start_time": start_time(os.getpid()),
        "user": f"{os.geteuid()} in {_user_namespace()}",
    }


def _user_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/user").readlink())
    except OSError:
        # A kernel without user namespaces.
        return "user:[]"


def process_stat(pid: int) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` after the name of the process: state, parent's pid, and so on."""
    # The name, in parentheses, may itself contain spaces and parentheses.
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def start_time(pid: int) -> int:
    # The 22nd field of the file. The name is the second.
    return int(process_stat(pid)[19])
