"""Before UCX starts, the devices that a worker's options name have CUDA contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc

from torch_ucx_rpc import UcxRpcBackendOptions, _start
from torch_ucx_rpc._devices import context
from torch_ucx_rpc.errors import JoinFailed


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the calls to CUDA on a fake machine with two devices."""
    happened: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", happened.append)
    return happened


def test_named_devices_get_contexts_and_the_first_comes_last(events: list[Any]) -> None:
    context.make_contexts(
        UcxRpcBackendOptions(device_maps={"ps": {1: 0}, "cpu": {"cpu": 0}}, reply_device_maps={"ps": {"cpu": 0}})
    )
    assert events == [torch.device("cuda:1"), torch.device("cuda:0")]


def test_without_devices_cuda_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: pytest.fail("a device was asked"))
    context.make_contexts(UcxRpcBackendOptions())
    context.make_contexts(UcxRpcBackendOptions(device_maps={"ps": {"cpu": 0}}))


def test_check_of_maps_reports_missing_devices(events: list[Any]) -> None:
    context.make_contexts(UcxRpcBackendOptions(devices=[0, 2]))
    assert events == [torch.device("cuda:0")]


def test_ucx_starts_after_the_contexts(events: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()

    def start_ucx(*_: Any) -> Any:
        events.append("UCX")
        raise JoinFailed("far enough")

    monkeypatch.setitem(_start.AGENT_TYPES, UcxRpcBackendOptions, start_ucx)
    with pytest.raises(JoinFailed, match="far enough"):
        rpc.init_rpc(
            "worker0",
            backend="UCX",
            rank=0,
            world_size=1,
            rpc_backend_options=UcxRpcBackendOptions(init_method=store, device_maps={"worker0": {0: 0}}),
        )
    assert events == [torch.device("cuda:0"), "UCX"]
