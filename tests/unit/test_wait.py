"""`wait`: the value of any future, and the streams that the thread waits for. test_cuda.py tests it on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_ucx_rpc
from torch_ucx_rpc._native import _C


def done(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


class Streams:
    """Replaces torch.cuda's streams, and lists the devices whose current stream was synchronized."""

    def __init__(self) -> None:
        self.synchronized: list[torch.device] = []

    def current_stream(self, device: torch.device) -> Any:
        streams = self

        class Stream:
            def synchronize(self) -> None:
                streams.synchronized.append(device)

        return Stream()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current_stream)
    return streams


@pytest.mark.parametrize("blocking", [False, True])
def test_wait_returns_the_value_of_the_future(blocking: bool) -> None:
    assert torch_ucx_rpc.wait(done(7), blocking=blocking) == 7
    assert torch_ucx_rpc.wait(done(7).then(lambda seven: seven.value() + 1), blocking=blocking) == 8


@pytest.mark.parametrize("blocking", [False, True])
def test_wait_raises_the_exception_of_the_future(blocking: bool) -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_exception(KeyError("lost"))
    with pytest.raises(KeyError, match="lost"):
        torch_ucx_rpc.wait(future, blocking=blocking)


def test_wait_synchronizes_the_stream_of_each_device_once(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [torch.device("cuda", 0), torch.device("cuda", 2)]
    monkeypatch.setattr(_C, "devices_of", lambda future: devices)
    assert torch_ucx_rpc.wait(done(7), blocking=True) == 7
    assert streams.synchronized == devices


def test_wait_synchronizes_no_stream_before_the_value_exists(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "devices_of", lambda future: [torch.device("cuda", 0)])
    future: torch.futures.Future[int] = torch.futures.Future()
    seen: list[list[torch.device]] = []
    monkeypatch.setattr(torch._C.Future, "wait", lambda future: seen.append(list(streams.synchronized)))
    torch_ucx_rpc.wait(future, blocking=True)
    assert seen == [[]]
    assert len(streams.synchronized) == 1


def test_wait_without_blocking_synchronizes_no_stream(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "devices_of", lambda future: [torch.device("cuda", 0)])
    assert torch_ucx_rpc.wait(done(7)) == 7
    assert not streams.synchronized


def test_the_result_has_the_devices_of_the_future(streams: Streams) -> None:
    # The future is not completed: torch cannot record events on this kind of device.
    devices = [torch.device("meta", 0), torch.device("meta", 1)]
    assert _C.devices_of(torch.futures.Future(devices=devices)) == devices
    assert _C.devices_of(done(7)) == []


@pytest.mark.parametrize("several", [[done(1), done(2)], None, 7], ids=["list", "None", "int"])
def test_anything_but_one_future_is_refused_by_name(several: Any) -> None:
    with pytest.raises(TypeError, match=r"future must be one torch.futures.Future; got "):
        torch_ucx_rpc.wait(several)
