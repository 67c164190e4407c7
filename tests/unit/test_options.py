"""`UcxRpcBackendOptions`: accepted and refused values, errors, comparison and copies."""

from __future__ import annotations

import copy
import math
import pickle
import re
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.rpc as rpc

from torch_ucx_rpc import UcxRpcBackendOptions, _start

CHANGED = {
    "num_worker_threads": 5,
    "max_worker_threads": 50,
    "rpc_timeout": 0.1,
    "init_timeout": 600.5,
    "heartbeat_limit": 2.5,
    "init_method": "tcp://127.0.0.1:29500",
    "device_maps": {"ps": {"cuda:0": "cuda:1"}},
    "reply_device_maps": {"ps": {"cuda:0": "cpu"}},
    "devices": ["cuda:0", "cuda:2"],
    "receive_window_bytes": 1,
    "host_pool_bytes": 0,
    "device_pool": "rmm",
    "device_pool_bytes": 2**30,
    "stream_priority": -1,
    "waiting": "sleep",
    "prometheus_port": 9400,
    "secret_file": "/run/secrets/job",
}


def test_every_option_has_its_default() -> None:
    options = UcxRpcBackendOptions()
    assert options.num_worker_threads == rpc.constants.DEFAULT_NUM_WORKER_THREADS
    assert options.rpc_timeout == rpc.constants.DEFAULT_RPC_TIMEOUT_SEC
    assert options.init_timeout is None
    assert options.max_worker_threads == 512
    assert options.heartbeat_limit == 10
    assert options.init_method == rpc.constants.DEFAULT_INIT_METHOD
    assert options.device_maps == {}
    assert options.reply_device_maps == {}
    assert options.devices == []
    assert options.receive_window_bytes == 64 * 1024**2
    assert options.host_pool_bytes == 256 * 1024**2
    assert options.device_pool == "torch"
    assert options.device_pool_bytes is None
    assert options.stream_priority == 0
    assert options.waiting == "auto"
    assert options.prometheus_port is None
    assert options.secret_file is None


def test_every_option_is_an_argument_and_an_attribute() -> None:
    constructed = UcxRpcBackendOptions(**CHANGED)
    assigned = UcxRpcBackendOptions()
    for name, value in CHANGED.items():
        setattr(assigned, name, value)
    assert constructed == assigned
    assert constructed != UcxRpcBackendOptions()
    assert constructed.device_maps == {"ps": {torch.device("cuda:0"): torch.device("cuda:1")}}
    assert constructed.devices == [torch.device("cuda:0"), torch.device("cuda:2")]


@pytest.mark.parametrize("name", CHANGED)
def test_each_option_counts_in_comparison(name: str) -> None:
    assert UcxRpcBackendOptions(**{name: CHANGED[name]}) != UcxRpcBackendOptions()


def test_options_do_not_equal_other_objects() -> None:
    assert UcxRpcBackendOptions() != rpc.TensorPipeRpcBackendOptions()
    assert UcxRpcBackendOptions() != {}


def test_options_can_be_a_dict_key_as_torch_uses_them() -> None:
    options = UcxRpcBackendOptions()
    keyed = {options: "found"}
    options.rpc_timeout = 7
    assert keyed[options] == "found"


@pytest.mark.parametrize(
    "options", [UcxRpcBackendOptions(), UcxRpcBackendOptions(**CHANGED)], ids=["default", "changed"]
)
def test_repr_can_be_pasted_back(options: UcxRpcBackendOptions) -> None:
    assert eval(repr(options)) == options


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_are_equal_and_independent(duplicate) -> None:
    options = UcxRpcBackendOptions(**CHANGED)
    other = duplicate(options)
    assert other == options
    other.set_device_map("worker7", {"cuda:0": "cuda:0"})
    assert "worker7" not in options.device_maps


def test_torch_reads_the_same_timeout_and_init_method() -> None:
    options = UcxRpcBackendOptions(rpc_timeout=0.5, init_method="file:///somewhere")
    options.init_method += "_else"
    base = rpc.RpcBackendOptions
    assert base.rpc_timeout.__get__(options) == options.rpc_timeout == 0.5
    assert base.init_method.__get__(options) == options.init_method == "file:///somewhere_else"


def test_numbers_of_numpy_are_numbers() -> None:
    options = UcxRpcBackendOptions(num_worker_threads=np.int64(3), rpc_timeout=np.float32(2))
    assert repr(options) == repr(UcxRpcBackendOptions(num_worker_threads=3, rpc_timeout=2))


def test_a_timeout_of_zero_is_accepted() -> None:
    assert UcxRpcBackendOptions(rpc_timeout=0).rpc_timeout == 0


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({}, 60),
        ({"rpc_timeout": 0.5}, 60),
        ({"rpc_timeout": 600}, 600),
        ({"rpc_timeout": 0}, 0),
        ({"rpc_timeout": 600, "init_timeout": 0.5}, 0.5),
        ({"rpc_timeout": 600, "init_timeout": 0}, 0),
    ],
)
def test_init_timeout_is_at_least_a_minute_by_default(given: dict[str, float], seconds: float) -> None:
    assert _start._init_timeout(UcxRpcBackendOptions(**given)) == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({}, 80),
        ({"rpc_timeout": 600}, 600),
        ({"rpc_timeout": 0}, 0),
        ({"heartbeat_limit": 0}, 60),
        ({"heartbeat_limit": 60, "reconnect_limit": 0}, 70),
        ({"init_timeout": 5}, 5),
    ],
)
def test_a_worker_that_joins_waits_until_the_dead_are_lost(given: dict[str, float], seconds: float) -> None:
    assert _start._init_timeout(UcxRpcBackendOptions(**given), is_joining=True) == seconds  # type: ignore[arg-type]


def test_arguments_are_keywords() -> None:
    with pytest.raises(TypeError):
        UcxRpcBackendOptions(16)  # type: ignore[misc]


def test_unknown_name_is_refused_with_the_nearest_and_all() -> None:
    with pytest.raises(TypeError) as refused:
        UcxRpcBackendOptions(recieve_window_bytes=1)
    message = str(refused.value)
    assert "'recieve_window_bytes'" in message
    assert "did you mean receive_window_bytes?" in message
    assert all(name in message for name in CHANGED)


def test_an_unknown_name_unlike_all_others_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'_transports'.*device_maps, "):
        UcxRpcBackendOptions(_transports=["shm"])


def test_an_unknown_attribute_is_refused() -> None:
    with pytest.raises(AttributeError, match="recieve_window_bytes"):
        UcxRpcBackendOptions().recieve_window_bytes = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_worker_threads", True),
        ("num_worker_threads", "16"),
        ("num_worker_threads", 16.0),
        ("num_worker_threads", None),
        ("rpc_timeout", False),
        ("rpc_timeout", "60"),
        ("rpc_timeout", None),
        ("rpc_timeout", timedelta(seconds=60)),
        ("init_timeout", "60"),
        ("init_timeout", True),
        ("init_method", b"env://"),
        ("init_method", None),
        ("device_maps", ["ps"]),
        ("device_maps", {"ps": [0]}),
        ("device_maps", {1: {"cuda:0": "cuda:0"}}),
        ("reply_device_maps", {"ps": [0]}),
        ("devices", "cuda:0"),
        ("devices", 0),
        ("receive_window_bytes", 64e6),
        ("receive_window_bytes", True),
        ("host_pool_bytes", "1GiB"),
        ("waiting", None),
        ("device_pool", None),
        ("device_pool_bytes", "1GiB"),
        ("stream_priority", -1.0),
        ("stream_priority", "high"),
        ("stream_priority", None),
        ("prometheus_port", "9400"),
        ("prometheus_port", True),
        ("secret_file", b"/run/secrets/job"),
        ("secret_file", 3),
    ],
)
def test_a_wrong_type_is_refused_and_the_right_one_named(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=r"must be|is set for") as when_constructed:
        UcxRpcBackendOptions(**{name: value})
    options = UcxRpcBackendOptions()
    with pytest.raises(TypeError) as when_assigned:
        setattr(options, name, value)
    assert str(when_constructed.value) == str(when_assigned.value)
    assert options == UcxRpcBackendOptions()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_worker_threads", 0),
        ("max_worker_threads", 0),
        ("heartbeat_limit", -1),
        ("num_worker_threads", -1),
        ("num_worker_threads", 2**40),
        ("rpc_timeout", -1),
        ("rpc_timeout", math.nan),
        ("rpc_timeout", math.inf),
        ("rpc_timeout", 1e30),
        ("init_timeout", -1),
        ("init_timeout", math.nan),
        ("init_method", ""),
        ("init_method", "localhost:29500"),
        ("receive_window_bytes", 0),
        ("receive_window_bytes", 2**80),
        ("host_pool_bytes", -1),
        ("waiting", "spin"),
        ("device_pool", "cuda"),
        ("device_pool_bytes", 2**20 - 1),
        ("stream_priority", 1),
        ("stream_priority", -4),
        ("prometheus_port", -1),
        ("prometheus_port", 65_536),
        ("secret_file", ""),
        ("secret_file", "nul\0"),
    ],
)
def test_an_impossible_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be "):
        UcxRpcBackendOptions(**{name: value})
    options = UcxRpcBackendOptions()
    with pytest.raises(ValueError, match=f"^{name} must be "):
        setattr(options, name, value)
    assert options == UcxRpcBackendOptions()


def test_set_device_map_adds_entries() -> None:
    options = UcxRpcBackendOptions(device_maps={"ps": {"cuda:0": "cuda:1"}})
    options.set_device_map("ps", {"cuda:1": "cuda:0"})
    options.set_device_map("other", {"cuda:0": "cuda:0"})
    assert options == UcxRpcBackendOptions(
        device_maps={"ps": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}, "other": {"cuda:0": "cuda:0"}}
    )


def test_set_device_map_keeps_earlier_entries() -> None:
    options = UcxRpcBackendOptions(device_maps={"ps": {"cuda:0": "cuda:1"}})
    with pytest.raises(ValueError, match="`set_device_map` only supports 1-to-1 mapping"):
        options.set_device_map("ps", {"cuda:2": "cuda:2", "cuda:0": "cuda:0"})
    assert options == UcxRpcBackendOptions(device_maps={"ps": {"cuda:0": "cuda:1"}})


def test_several_devices_can_be_mapped_to_one() -> None:
    device_map = {"cpu": "cuda:0", "cuda:0": "cuda:0", "cuda:1": "cuda:0"}
    options = UcxRpcBackendOptions(device_maps={"ps": device_map})
    assert len(options.device_maps["ps"]) == 3
    assert set(options.device_maps["ps"].values()) == {torch.device("cuda:0")}


def test_a_device_cannot_be_mapped_to_two() -> None:
    with pytest.raises(ValueError, match=r"device_maps\['ps'\] .*cuda:0 to cuda:0"):
        UcxRpcBackendOptions(device_maps={"ps": {"cuda:0": "cuda:0", torch.device("cuda:0"): "cuda:1"}})


@pytest.mark.parametrize("device", ["cuda", "meta", torch.device("xpu:0")])
def test_devices_are_the_cpu_and_cuda_devices_with_a_number(device: object) -> None:
    for options in ({"device_maps": {"ps": {device: "cpu"}}}, {"reply_device_maps": {"ps": {"cpu": device}}}):
        with pytest.raises(ValueError, match=r"such as 'cuda:0'; got "):
            UcxRpcBackendOptions(**options)


def test_the_cpu_is_one_device() -> None:
    assert UcxRpcBackendOptions(device_maps={"ps": {"cpu:0": 0}}).device_maps == {
        "ps": {torch.device("cpu"): torch.device("cuda:0")}
    }


def test_devices_are_cuda_devices() -> None:
    with pytest.raises(ValueError, match="CUDA devices"):
        UcxRpcBackendOptions(devices=["cpu"])


def test_set_devices_replaces_the_devices() -> None:
    options = UcxRpcBackendOptions(devices=["cuda:0"])
    options.set_devices(["cuda:1"])
    assert options.devices == [torch.device("cuda:1")]


def test_device_attributes_are_copies() -> None:
    options = UcxRpcBackendOptions(**CHANGED)
    options.devices.clear()
    options.device_maps["ps"].clear()
    assert options == UcxRpcBackendOptions(**CHANGED)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"device_maps": {"ps": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}}, "devices": ["cuda:0", "cuda:1"]},
        lambda: {"device_maps": {"ps": {torch.device("cuda:0"): "cpu"}}, "devices": (torch.device("cuda:3"),)},
        lambda: {"device_maps": {"ps": {"cpu": "cpu"}}, "devices": []},
    ],
)
def test_devices_are_understood_as_tensorpipe_does(make) -> None:
    ours, torchs = UcxRpcBackendOptions(**make()), rpc.TensorPipeRpcBackendOptions(**make())
    assert ours.device_maps == torchs.device_maps
    assert ours.devices == torchs.devices


def test_the_registry_constructs_the_same_options() -> None:
    backend = rpc.BackendType.UCX  # type: ignore[attr-defined]
    construct = rpc.backend_registry.construct_rpc_backend_options
    assert construct(backend) == UcxRpcBackendOptions()
    assert construct(backend, 7, "tcp://a:1", host_pool_bytes=5) == UcxRpcBackendOptions(
        rpc_timeout=7, init_method="tcp://a:1", host_pool_bytes=5
    )


def test_the_page_has_each_option_with_its_default() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "options.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|", page, re.MULTILINE))
    options = UcxRpcBackendOptions()
    shown = {
        **{name: repr(getattr(options, name)) for name in CHANGED},
        "rpc_timeout": f"{options.rpc_timeout:g}",
        "init_timeout": "60, or a longer `rpc_timeout`",
        "heartbeat_limit": f"{options.heartbeat_limit:g}",
        "reconnect_limit": f"{options.reconnect_limit:g}",
        "init_method": f'`"{options.init_method}"`',
        "waiting": f'`"{options.waiting}"`',
        "prometheus_port": "`None`",
        "device_pool": f'`"{options.device_pool}"`',
        "device_pool_bytes": "`None`",
        "device_maps": "none",
        "reply_device_maps": "none",
        "devices": "those in device maps",
        "receive_window_bytes": f"{options.receive_window_bytes / 1024**2:g} MiB",
        "host_pool_bytes": f"{options.host_pool_bytes / 1024**2:g} MiB",
    }
    assert rows == shown
