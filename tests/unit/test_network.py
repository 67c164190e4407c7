"""The network interface that UCX is told to use."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from torch_ucx_rpc._bootstrap import network


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)


@pytest.fixture(autouse=True)
def _no_choice_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


def leads_to(monkeypatch: pytest.MonkeyPatch, interface: str | None) -> None:
    monkeypatch.setattr(network, "interface_to", lambda host: interface)


def test_the_interface_that_leads_to_the_store_is_chosen(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    leads_to(monkeypatch, "eth7")
    monkeypatch.setattr(network, "infiniband_devices", lambda path: [])
    assert network.default_devices(store, "libucp.so") == "eth7,lo"
    assert network.default_devices(PrefixStore("a", PrefixStore("b", store)), "libucp.so") == "eth7,lo"


def test_the_users_choice_is_kept(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    leads_to(monkeypatch, "eth7")
    monkeypatch.setenv("UCX_NET_DEVICES", "eth1")
    assert network.default_devices(store, "libucp.so") == ""


@pytest.mark.parametrize("interface", [None, "lo"])
def test_without_a_helpful_route_ucx_chooses(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, interface: str | None
) -> None:
    leads_to(monkeypatch, interface)
    assert network.default_devices(store, "libucp.so") == ""


def test_without_an_address_ucx_chooses(tmp_path: Path) -> None:
    assert network.default_devices(FileStore(str(tmp_path / "store"), 1), "libucp.so") == ""
    assert network.default_devices(HashStore(), "libucp.so") == ""


def test_infiniband_is_never_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: TCPStore) -> None:
    leads_to(monkeypatch, "eth7")
    for name, state in {
        "mlx5_0/ports/1": "4: ACTIVE",
        "mlx5_1/ports/1": "1: DOWN",
        "mlx5_1/ports/2": "4: ACTIVE",
    }.items():
        (tmp_path / "infiniband" / name).mkdir(parents=True)
        (tmp_path / "infiniband" / name / "state").write_text(state + "\n")
    for name, kind in {"eth7": "1", "ib0": "32"}.items():
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "type").write_text(kind + "\n")
    monkeypatch.setattr(network, "_INFINIBAND", tmp_path / "infiniband")
    monkeypatch.setattr(network, "_INTERFACES", tmp_path / "net")
    (tmp_path / "ucx").mkdir()
    # A UCX without verbs would warn of such devices.
    assert network.default_devices(store, str(tmp_path / "libucp.so.0")) == "eth7,lo,ib0"
    (tmp_path / "ucx" / "libuct_ib.so.0").touch()
    assert network.default_devices(store, str(tmp_path / "libucp.so.0")) == "eth7,lo,ib0,mlx5_0:1,mlx5_1:2"


def test_this_host_is_reached_by_the_loopback_interface() -> None:
    assert network.interface_to("127.0.0.1") == network.interface_to("localhost") == "lo"
    assert network.interface_to("127.1.2.3") == "lo"
    assert network.address_towards("127.0.0.1") == "127.0.0.1"


def test_an_unknown_name_has_no_interface() -> None:
    assert network.interface_to("no-such-host.invalid") is None


def test_an_address_of_this_host_is_found_at_its_interface() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no route beyond itself")
        address = asking.getsockname()[0]
    interface = network.interface_to(address)
    assert interface in [name for _, name in socket.if_nameindex()]
    assert interface == network.interface_to("192.0.2.1")
