"""Devices of arriving tensors and replies, and errors of device maps that do not fit together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc

from torch_ucx_rpc import UcxRpcBackendOptions
from torch_ucx_rpc._bootstrap.record import Record, process_facts
from torch_ucx_rpc._devices.maps import DeviceMap, check, check_ucx, devices_in_use, maps_of_replies, reply_map
from torch_ucx_rpc.errors import JoinFailed

CPU, CUDA0, CUDA1, CUDA2 = map(torch.device, ("cpu", "cuda:0", "cuda:1", "cuda:2"))


def record(name: str, **changed: Any) -> Record:
    fields = {
        "rank": ord(name[0]) - ord("a"),
        "world_size": 3,
        "session": 1,
        "first_rref_id": 0,
        "first_context_id": 0,
        "address": b"",
        "package_version": "1",
        "torch_version": "2.13.0+cpu",
        "device_maps": {},
        "reply_device_maps": {},
        "devices": [],
        "device_count": 2,
        "lifeline_host": "",
        "lifeline_port": 0,
        "in_doubt": False,
        **process_facts(),
        **changed,
    }
    return Record(name=name, **fields)


# ---- Replies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "replies"),
    [
        ({}, {}),
        ({CUDA0: CUDA1, CUDA1: CUDA0}, {CUDA1: CUDA0, CUDA0: CUDA1}),
        ({CPU: CUDA0}, {CUDA0: CPU}),
        ({CUDA1: CPU}, {CPU: CUDA1}),
        ({CPU: CUDA1, CUDA1: CUDA1}, {CUDA1: CUDA1}),
        ({CPU: CPU, CUDA0: CPU}, {CPU: CPU}),
        ({CUDA2: CUDA0, CUDA1: CUDA0}, {CUDA0: CUDA1}),
        ({CUDA0: CPU, CUDA1: CPU}, {CPU: CPU}),
    ],
    ids=str,
)
def test_replies_follow_from_the_map_of_requests(requests: DeviceMap, replies: DeviceMap) -> None:
    assert reply_map(requests, {}) == replies


def test_reply_maps_of_the_caller_come_first() -> None:
    assert reply_map({CUDA0: CPU}, {CPU: CPU, CUDA1: CUDA0}) == {CPU: CPU, CUDA1: CUDA0}


def test_worker_knows_its_callers_maps_and_devices() -> None:
    own = record("a", device_maps={"b": {CUDA2: CUDA0}}, reply_device_maps={"b": {CPU: CUDA1}})
    members = [
        own,
        record("b", device_maps={"a": {CPU: CUDA0}}),
        record("c", device_maps={"b": {CUDA1: CUDA1}}),
    ]
    replies = maps_of_replies("a", members)
    assert replies == {"b": {CUDA0: CPU}}
    assert devices_in_use(own, replies) == [CUDA0, CUDA1, CUDA2]
    assert maps_of_replies("b", members) == {"a": {CUDA0: CUDA2, CPU: CUDA1}, "c": {CUDA1: CUDA1}}
    assert devices_in_use(record("c"), maps_of_replies("c", members)) == []


def test_a_worker_uses_the_devices_that_it_names() -> None:
    assert devices_in_use(record("a", devices=[CUDA1, CUDA0]), {"b": {CUDA0: CPU}}) == [CUDA0, CUDA1]


# ---- Whether maps fit ------------------------------------------------------------------------------------------------


def test_several_devices_may_map_to_one_and_to_the_cpu() -> None:
    members = [
        record("a", device_maps={"b": {CPU: CUDA0, CUDA0: CUDA0, CUDA1: CPU}}),
        record("b", device_maps={"a": {CUDA0: CUDA1}}, reply_device_maps={"a": {CUDA0: CPU}}),
    ]
    check(members)
    # Each reply goes to one device. Of several candidates it is the GPU.
    assert maps_of_replies("b", members) == {"a": {CUDA0: CUDA0, CPU: CUDA1}}
    assert maps_of_replies("a", members) == {"b": {CUDA1: CUDA0, CUDA0: CPU}}


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({"devices": [CUDA0, CUDA0]}, {}, "Node a has duplicated devices: cuda:0, cuda:0, on rank 0 ('a'"),
        ({"devices": [CUDA2]}, {}, "Node a has devices with invalid indices: cuda:2. rank 0 ('a'"),
        (
            {"device_maps": {"x": {CPU: CPU}}},
            {},
            "Node a has invalid target node names in its device maps: 'x', on",
        ),
        (
            {"reply_device_maps": {"x": {}}},
            {},
            "Node a has invalid target node names in its device maps: 'x', on",
        ),
        (
            {"device_maps": {"b": {CUDA2: CUDA0}}},
            {},
            "Node a has source devices with invalid indices in its device map for b: cuda:2, on rank 0 ('a'",
        ),
        (
            {"device_maps": {"b": {CUDA0: CUDA2}}},
            {},
            "Node a has target devices with invalid indices in its device map for b: cuda:2, on rank 0 ('a'",
        ),
        (
            {"reply_device_maps": {"b": {CUDA2: CPU}}},
            {},
            "Node a has target devices with invalid indices in its device map for b: cuda:2, on rank 0 ('a'",
        ),
        (
            {"device_maps": {"b": {CUDA1: CUDA0}}, "devices": [CUDA0]},
            {},
            "Node a has unexpected source devices in its device map for b: cuda:1, on rank 0 ('a'",
        ),
        (
            {"device_maps": {"b": {CPU: CUDA1}}},
            {"devices": [CUDA0]},
            "Node a has unexpected target devices in its device map for b: cuda:1, on rank 0 ('a'",
        ),
    ],
)
def test_maps_that_do_not_fit_are_refused_with_torchs_words(a: dict[str, Any], b: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(said)) as refused:
        check([record("a", **a), record("b", **b)])
    if "for b" in said and "target" in said:
        assert "rank 1 ('b'" in str(refused.value)


def test_maps_of_an_unsized_group_may_name_later_workers() -> None:
    check([record("a", device_maps={"x": {CUDA0: CUDA2}})], is_static_group=False)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there are GPUs")
@pytest.mark.parametrize("asked", [{"device_maps": {"worker0": {"cpu": "cuda:0"}}}, {"devices": ["cuda:0"]}], ids=str)
def test_missing_cuda_is_refused_at_init_with_the_cure(asked: dict[str, Any], store_url: str) -> None:
    with pytest.raises(
        ValueError, match=r"There is no CUDA device for rank 0 \('worker0'.*CUDA_VISIBLE_DEVICES"
    ) as refused:
        rpc.init_rpc(
            "worker0",
            rank=0,
            world_size=1,
            rpc_backend_options=UcxRpcBackendOptions(init_method=store_url, **asked),
        )
    assert f"a CUDA build of torch (its is {torch.__version__})" in str(refused.value)
    assert not rpc.api._is_current_rpc_agent_set()


@pytest.mark.parametrize("tls", ["all", "tcp,cuda", "sm,cuda_copy,cuda_ipc", "^tcp", "sm:aux,cuda_copy"])
def test_a_choice_of_transports_with_cuda_is_accepted(tls: str, ucx: Path) -> None:
    check_ucx([CUDA0], str(ucx), {"UCX_TLS": tls})
    check_ucx([CUDA0], str(ucx), {})


@pytest.mark.parametrize("tls", ["tcp", "sm,self", "^cuda", "^tcp,cuda_copy"])
def test_devices_with_transports_without_cuda_are_refused(tls: str, ucx: Path) -> None:
    with pytest.raises(JoinFailed, match=rf"cuda:0.*UCX_TLS={re.escape(tls)} leaves out.*add cuda to it"):
        check_ucx([CUDA0], str(ucx), {"UCX_TLS": tls})
    check_ucx([], str(ucx), {"UCX_TLS": tls})


def test_a_ucx_without_cuda_is_refused_where_devices_are_used(tmp_path: Path) -> None:
    with pytest.raises(JoinFailed, match=r"has no module for CUDA: .*libucp\.so\.0.*libucx-cu12"):
        check_ucx([CUDA0], str(tmp_path / "libucp.so.0"), {})


@pytest.fixture
def ucx(tmp_path: Path) -> Path:
    """Return the libucp of a UCX with CUDA."""
    (tmp_path / "ucx").mkdir()
    (tmp_path / "ucx" / "libuct_cuda.so.0").touch()
    return tmp_path / "libucp.so.0"


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store'}"
