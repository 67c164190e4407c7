"""The port by which workers on other hosts see that a process has ended."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore, TCPStore

from torch_ucx_rpc._bootstrap import lifeline
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


def test_the_lifeline_is_at_the_address_that_leads_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert open_lifeline(store) is None  # at a loopback address, there are no other hosts
    assert open_lifeline(HashStore()) is None
    monkeypatch.setattr(lifeline, "address_towards", lambda host: own_address())
    line = open_lifeline(store)
    assert line is not None
    with connected(line):
        assert line.host == own_address()
    line.close()


def test_an_address_of_another_machine_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # An address of the block for documentation.
    monkeypatch.setattr(lifeline, "address_towards", lambda host: "192.0.2.1")
    assert open_lifeline(TCPStore("localhost", 0, is_master=True, wait_for_workers=False)) is None


def own_address() -> str:
    """An address besides the loopback, if the machine has one; without it the test proves nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(asking.getsockname()[0])
