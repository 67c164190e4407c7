"""`UcxRpcBackendOptions`: the user's choices for the agent of one worker."""

from __future__ import annotations

import copy
import difflib
import functools
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch._C._distributed_rpc import RpcBackendOptions

from torch_ucx_rpc._arguments import wrong_type, wrong_value
from torch_ucx_rpc._devices.maps import convert_devices

Device: TypeAlias = int | str | torch.device
T = TypeVar("T")

# Linux's default limit of thread ids.
_MOST_THREADS = 32_767
# 31 years. Longer times would overflow clocks that count nanoseconds.
_MOST_SECONDS = 1e9
_MOST_BYTES = 2**62
_LAST_PORT = 65_535
# The most urgent priority of torch's streams (c10's max_compile_time_stream_priorities).
_MOST_URGENT = -3


class Option(Generic[T]):
    """An attribute of the options, which checks each value that is set."""

    def __init__(self, check: Callable[[str, Any], T]) -> None:
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, options: UcxRpcBackendOptions, owner: type) -> T:
        # Return a copy, since a change in place would escape the check.
        value: T = copy.deepcopy(options._values[self._name])
        return value

    def __set__(self, options: UcxRpcBackendOptions, value: Any) -> None:
        checked = self._check(self._name, value)
        options._values[self._name] = checked
        # rpc_timeout and init_method are fields of torch's C++ object too, and torch reads them there. There the
        # timeout has single precision (0.1 is 0.10000000149), so Python reads the values of this class instead.
        inherited = vars(RpcBackendOptions).get(self._name)
        if inherited is not None:
            inherited.__set__(options, checked)


def _integer(least: int, most: int, meaning: str) -> Option[int]:
    return Option(_integer_check(least, most, meaning))


def _integer_or_none(least: int, most: int, meaning: str) -> Option[int | None]:
    check = _integer_check(least, most, meaning)
    return Option(lambda name, value: None if value is None else check(name, value))


def _integer_check(least: int, most: int, meaning: str) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        # Python treats True as an int, and a user may write 64e6 for an int, but neither is a clear request.
        if isinstance(value, bool) or not hasattr(type(value), "__index__"):
            raise wrong_type(name, f"an int, {meaning}", value)
        number = operator.index(value)
        if not least <= number <= most:
            raise wrong_value(name, f"between {least} and {most}, {meaning}", value)
        return number

    return check


def _one_of(*choices: str) -> Option[str]:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise wrong_type(name, f"a str, one of {', '.join(map(repr, choices))}", value)
        if value not in choices:
            raise wrong_value(name, f"one of {', '.join(map(repr, choices))}", value)
        return value

    return Option(check)


def check_seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong_type(name, "a number of seconds", value)
    seconds = float(value)
    if math.isnan(seconds) or not 0 <= seconds <= _MOST_SECONDS:
        raise wrong_value(name, f"between 0 and {_MOST_SECONDS:.0f} seconds", value)
    return seconds


def _check_seconds_or_none(name: str, value: Any) -> float | None:
    return None if value is None else check_seconds(name, value)


def check_url(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, "a str, the URL at which the workers meet", value)
    if "://" not in value:
        raise wrong_value(name, "a URL such as 'env://', 'tcp://host:port' or 'file:///path'", value)
    return value


def _check_device_maps(name: str, value: Any) -> dict[str, dict[torch.device, torch.device]]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong_type(name, "a dict from the callee's name to a device map", value)
    return {
        _check_callee(f"each key of {name}", callee): _check_device_map(f"{name}[{callee!r}]", device_map)
        for callee, device_map in value.items()
    }


def _check_callee(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, "a str, the callee's name", value)
    return value


def _check_device_map(name: str, device_map: Any) -> dict[torch.device, torch.device]:
    if not isinstance(device_map, Mapping):
        raise wrong_type(name, "a dict from device to device, one local and one the callee's", device_map)
    checked: dict[torch.device, torch.device] = {}
    for key, value in device_map.items():
        source, target = _check_device(name, key), _check_device(name, value)
        if checked.setdefault(source, target) != target:
            raise ValueError(f"{name} must map a device once; got {source} to {checked[source]} and to {target}")
    return checked


def _check_device(name: str, value: Any) -> torch.device:
    expected = "the CPU or CUDA devices with a number, such as 'cuda:0'"
    if isinstance(value, bool) or not isinstance(value, (int, str, torch.device)):
        raise wrong_type(name, expected, value)
    # torch accepts a bare number as a device only on machines with GPUs.
    try:
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    except RuntimeError:
        raise wrong_value(name, expected, value) from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda" or device.index is None:
        raise wrong_value(name, expected, value)
    return device


def _check_devices(name: str, value: Any) -> list[torch.device]:
    if value is None:
        return []
    if isinstance(value, (str, torch.device)) or not isinstance(value, Iterable):
        raise wrong_type(name, "a list of CUDA devices", value)
    devices = [_check_device(name, device) for device in value]
    if torch.device("cpu") in devices:
        # The text is that of TensorPipeRpcBackendOptions.
        raise ValueError("`set_devices` expect a list of CUDA devices, but got device type cpu.")
    return devices


def _check_path(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not isinstance(path := os.fspath(value), str):
        raise wrong_type(name, "the path of a file, a str or Path", value)
    if not path or "\0" in path:
        raise wrong_value(name, "the path of a file", value)
    return path


class UcxRpcBackendOptions(RpcBackendOptions):
    """Options of ``init_rpc(backend="UCX", rpc_backend_options=...)``.

    Each option has a default, and is also an attribute that can be set. This class checks each value at once. An
    unknown argument or a wrong type raises TypeError, and an impossible value ValueError. An unknown attribute raises
    AttributeError. ``init_rpc`` takes a copy. Options can be compared, pickled, and pasted back from their ``repr``.

    Args:
        num_worker_threads (int): threads that run the calls other workers make here (default: 16). With more threads,
            more handlers can block at a time. With fewer, the worker uses less memory, and threads wait less for the
            GIL.
        max_worker_threads (int): limit of threads when handlers wait for calls of their own (default: 512, and never
            fewer than ``num_worker_threads``). Such handlers do not count among ``num_worker_threads``, so that the
            calls they wait for find a thread. A call that still gets none fails, and its error says so.
        rpc_timeout (float): seconds after which a call without its own timeout fails (default: 60). 0 is no limit.
        init_timeout (float | None): seconds after which ``init_rpc`` gives up on workers that do not come (default:
            None, the longer of 60 s and ``rpc_timeout``; in a group without a size also long enough to lose a dead
            member; no limit with ``rpc_timeout=0``). 0 is no limit.
        heartbeat_limit (float): seconds of silence after which a worker on another host, or in another pid namespace,
            is suspect, with a warning (default: 10). Calls to it wait. With 0, which is no limit, a worker notices only
            the end of a process. On the same host it notices that end at once.
        reconnect_limit (float): seconds for which a suspect worker may stay silent before it is lost and the calls to
            it fail (default: 60). A shorter cut delays calls, and loses none. With 0 the worker is lost at
            ``heartbeat_limit``.
        init_method (str): URL at which the workers find each other, as for ``init_process_group`` (default:
            ``"env://"``, which reads MASTER_ADDR and MASTER_PORT).
        device_maps (dict[str, dict]): for each callee, by name, a dict from local devices to the callee's devices where
            their tensors arrive (default: none, only CPU tensors can be sent). The CPU may be on either side, and
            several devices may map to one. Results come back the same way.
        reply_device_maps (dict[str, dict]): for each callee, by name, a dict from the callee's devices to local devices
            where their results arrive (default: none; devices that it does not name follow from ``device_maps``).
        devices (list): local CUDA devices used for RPC (default: those that the device maps of any worker mention).
        receive_window_bytes (int): bytes of large tensors that may be on their way into this worker at a time
            (default: 64 MiB); the rest waits at the senders. A larger window keeps long or fast networks busy; a
            smaller one bounds memory, and keeps the buffers in the processor's caches.
        host_pool_bytes (int): bytes of host memory kept for the next tensors when the last ones are released (default:
            256 MiB). Tensors are received several times faster into memory that was used before; 0 keeps none.
        device_pool (str): the allocator of tensors that arrive on CUDA devices (default: "torch"). "torch" is torch's
            allocator. "rmm" is RMM's memory resource for the device: the user's, or a pool if the user has set none.
        device_pool_bytes (int | None): bytes that RMM's pool may take of each device, at least 1 MiB (default: None,
            all that the device has). With ``device_pool="torch"``, ``init_rpc`` raises ValueError for a number.
        stream_priority (int): priority of the CUDA streams on which handlers run and received tensors are copied
            (default: 0). As for ``torch.cuda.Stream``, -3 is the most urgent, and 0 the least. A device that has fewer
            priorities takes its nearest. Callbacks of futures run on torch's own streams, of priority 0.
        prometheus_port (int | None): port for Prometheus, to which each worker adds its rank (default: None, no port).
            0 is any free port, which ``statistics().prometheus_port`` shows. Workers answer over HTTP, without
            encryption, on all interfaces. This needs the package prometheus_client.
        waiting (str): how threads wait for messages (default: "auto"). "sleep" costs a wake-up of some 20 us for each
            message. "poll" keeps a core busy. "auto" spins for up to 0.8 ms before it sleeps. It does so only while the
            last waits were that short, and each worker of the job on this machine has a core.
        secret_file (str or Path): file with the secret that all workers of the job share (default: the secret that
            TORCH_UCX_RPC_SECRET_FILE or TORCH_UCX_RPC_SECRET gives). Workers refuse frames that are not sealed with it.
            Without a secret, any program that reaches the workers' Store can run code in them. ``init_rpc`` reads the
            file. It must have 16 to 4096 bytes, belong to the user or to root, and be closed to other users. Otherwise
            ``init_rpc`` raises ValueError, or OSError if it cannot read the file.

    Devices are ints, strs or torch.devices. The attributes ``device_maps``, ``reply_device_maps`` and ``devices`` are
    copies: to change them, assign to them or call `set_device_map` and `set_devices`.

    Example::

        >>> options = UcxRpcBackendOptions(num_worker_threads=8, device_maps={"ps": {"cuda:0": "cuda:1"}})
        >>> options.rpc_timeout = 30
        >>> rpc.init_rpc("trainer", rank=0, world_size=2, rpc_backend_options=options)
    """

    # No __dict__, so that assigning to a misspelt name raises AttributeError.
    __slots__ = ("_values",)

    num_worker_threads = _integer(1, _MOST_THREADS, "how many threads run the calls of other workers")
    max_worker_threads = _integer(1, _MOST_THREADS, "how many threads there are at most when calls are nested")
    rpc_timeout = Option(check_seconds)
    init_timeout = Option(_check_seconds_or_none)
    heartbeat_limit = Option(check_seconds)
    reconnect_limit = Option(check_seconds)
    init_method = Option(check_url)
    device_maps = Option(_check_device_maps)
    reply_device_maps = Option(_check_device_maps)
    devices = Option(_check_devices)
    receive_window_bytes = _integer(1, _MOST_BYTES, "how many bytes of large tensors are received at a time")
    host_pool_bytes = _integer(0, _MOST_BYTES, "how many bytes of memory are kept for reuse")
    device_pool = _one_of("torch", "rmm")
    device_pool_bytes = _integer_or_none(1024**2, _MOST_BYTES, "how many bytes of a device RMM's pool may take")
    stream_priority = _integer(_MOST_URGENT, 0, "the priority of CUDA streams, of which lower numbers are more urgent")
    prometheus_port = _integer_or_none(0, _LAST_PORT, "the port of rank 0 for Prometheus, 0 for any that is free")
    waiting = _one_of("auto", "poll", "sleep")
    secret_file = Option(_check_path)

    def __init__(
        self,
        *,
        num_worker_threads: int = 16,
        max_worker_threads: int = 512,
        rpc_timeout: float = 60.0,
        init_timeout: float | None = None,
        heartbeat_limit: float = 10.0,
        reconnect_limit: float = 60.0,
        init_method: str = "env://",
        device_maps: Mapping[str, Mapping[Device, Device]] | None = None,
        reply_device_maps: Mapping[str, Mapping[Device, Device]] | None = None,
        devices: Iterable[Device] | None = None,
        receive_window_bytes: int = 64 * 1024**2,
        host_pool_bytes: int = 256 * 1024**2,
        device_pool: str = "torch",
        device_pool_bytes: int | None = None,
        stream_priority: int = 0,
        prometheus_port: int | None = None,
        waiting: str = "auto",
        secret_file: str | os.PathLike[str] | None = None,
        **unknown: object,
    ) -> None:
        super().__init__()
        self._values: dict[str, Any] = {}
        self.num_worker_threads = num_worker_threads
        self.max_worker_threads = max_worker_threads
        self.rpc_timeout = rpc_timeout
        self.init_timeout = init_timeout
        self.heartbeat_limit = heartbeat_limit
        self.reconnect_limit = reconnect_limit
        self.init_method = init_method
        self.device_maps = device_maps
        self.reply_device_maps = reply_device_maps
        self.devices = devices
        self.receive_window_bytes = receive_window_bytes
        self.host_pool_bytes = host_pool_bytes
        self.device_pool = device_pool
        self.device_pool_bytes = device_pool_bytes
        self.stream_priority = stream_priority
        self.prometheus_port = prometheus_port
        self.waiting = waiting
        self.secret_file = secret_file
        for name in unknown:
            known = sorted(k for base in type(self).__mro__ for k, v in vars(base).items() if isinstance(v, Option))
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else "."
            raise TypeError(f"there is no option {name!r}{meant} The options are {', '.join(known)}.")

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Add to the device map for one callee.

        Args:
            to (str): the callee's name.
            device_map (dict): from this worker's devices, the CPU included, to devices of the callee. Earlier entries
                stay.

        Raises:
            ValueError: a device is mapped already, to another device.

        Example::

            >>> options.set_device_map("ps", {"cuda:0": "cuda:1"})
            >>> options.set_device_map("ps", {"cuda:1": "cuda:0"})
        """
        to, added = _check_callee("to", to), _check_device_map("device_map", device_map)
        present = self._values["device_maps"].get(to, {})
        for local, remote in added.items():
            if present.get(local, remote) != remote:
                # Programs and tests may look for the first words, which TensorPipeRpcBackendOptions uses too.
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping: for {to!r} it has mapped {local} to "
                    f"{present[local]} and cannot map it to {remote} too"
                )
        self._values["device_maps"][to] = {**present, **added}

    def set_devices(self, devices: Iterable[Device]) -> None:
        """Set the local CUDA devices used for RPC, in place of those that device maps mention.

        Raises ValueError for the CPU, and for a CUDA device without a number.
        """
        self.devices = devices

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UcxRpcBackendOptions):
            return NotImplemented
        return self._values == other._values

    def __hash__(self) -> int:
        # torch uses options as a key of a dict, briefly. Values can change, so they must not enter the hash.
        return hash(type(self))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self._arguments().items())
        return f"{type(self).__name__}({arguments})"

    def __reduce__(self) -> tuple[functools.partial[UcxRpcBackendOptions], tuple[()]]:
        return functools.partial(type(self), **self._arguments()), ()

    def _arguments(self) -> dict[str, Any]:
        """Return arguments that make an equal object. Devices are strs, so the user can paste the arguments."""
        return {**self._values, **convert_devices(self._values, str)}


def construct_options(rpc_timeout: float, init_method: str, **options: Any) -> UcxRpcBackendOptions:
    """Handler of ``backend_registry.construct_rpc_backend_options``.

    Has no side effects: to find the backend of given options, torch constructs the options of every backend.
    """
    return UcxRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **options)
