"""Lifelines: workers on other hosts connect to a port of a process, and so see that the process has ended."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from torch_ucx_rpc._bootstrap import lifeline, network
from torch_ucx_rpc._bootstrap.lifeline import Lifeline, open_lifeline

_SOON_S = 30.0


@pytest.fixture
def line() -> Iterator[Lifeline]:
    line = Lifeline("127.0.0.1")
    yield line
    line.close()


def connected(line: Lifeline) -> socket.socket:
    return socket.create_connection((line.host, line.port), timeout=_SOON_S)


def ends(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_last_as_long_as_the_lifeline(line: Lifeline) -> None:
    with connected(line) as first, connected(line) as second:
        first.settimeout(0.05)
        with pytest.raises(TimeoutError):
            first.recv(1)
        line.close()
        first.settimeout(_SOON_S)
        assert ends(first)
        assert ends(second)
        with pytest.raises(ConnectionRefusedError):
            connected(line)


def test_workers_on_one_host_have_no_lifeline() -> None:
    assert open_lifeline(TCPStore("localhost", 0, is_master=True, wait_for_workers=False)) is None
    assert open_lifeline(HashStore()) is None


def test_the_lifeline_is_at_the_address_for_other_hosts(tmp_path: Path) -> None:
    address = network.address_towards(network.ELSEWHERE)
    if address is None:
        pytest.skip("this machine has no network")
    stores = [TCPStore(address, 0, is_master=True, wait_for_workers=False), FileStore(str(tmp_path / "store"), 1)]
    for store in stores:
        line = open_lifeline(PrefixStore("job", store))
        assert line is not None
        with connected(line):
            assert line.host == address
        line.close()


def test_no_lifeline_for_an_address_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "meeting_address", lambda store: network.ELSEWHERE)
    assert open_lifeline(HashStore()) is None
