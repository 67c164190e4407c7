"""Rank 0 opens the Store at once. Without a Store, the error names its place."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore, TCPStore
from torch.distributed import rendezvous as torchs_rendezvous

from tests.support.workers import reserved_port
from torch_ucx_rpc._bootstrap import rendezvous
from torch_ucx_rpc._bootstrap.deadline import Deadline
from torch_ucx_rpc._bootstrap.listener import await_listener, is_this_host
from torch_ucx_rpc._bootstrap.rendezvous import check_rank, create_store
from torch_ucx_rpc.errors import JoinFailed, JoinTimedOut


@pytest.fixture(autouse=True)
def no_store_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the Store of an earlier test, which would still hold a port."""
    monkeypatch.setattr(rendezvous, "_kept", None)


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch, port: int) -> int:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    return port


# ---- The Store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["env", "tcp"])
def test_rank_0_does_not_wait_for_the_others(scheme: str, master: int) -> None:
    store = create_store("env://" if scheme == "env" else f"tcp://127.0.0.1:{master}", 0, 1000, 0)
    store.set("key", "value")
    assert TCPStore("127.0.0.1", master, wait_for_workers=False).get("key") == b"value"


@pytest.mark.parametrize("use_libuv", [0, 1])
def test_the_store_is_of_the_kind_that_the_url_asks_for(use_libuv: int, port: int) -> None:
    store = create_store(f"tcp://127.0.0.1:{port}?use_libuv={use_libuv}", 0, 1, 10)
    assert store.libuvBackend == bool(use_libuv)


def test_other_urls_go_to_torch(tmp_path: Path) -> None:
    store = create_store(f"file://{tmp_path}/store", 0, 2, 10)
    assert isinstance(store, FileStore)
    assert store.path == f"{tmp_path}/store"


def test_a_file_in_a_folder_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"there is no folder {tmp_path}/nowhere on"):
        create_store(f"file://{tmp_path}/nowhere/store", 1, 2, 0)


def test_a_folder_in_place_of_the_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder"):
        create_store(f"file://{tmp_path}", 1, 2, 0)


@pytest.mark.parametrize("query", ["rank=0&world_size=2", "rank=0", "world_size=2"])
@pytest.mark.parametrize("place", ["env://", "tcp://127.0.0.1:1", "file:///tmp/store"])
@pytest.mark.parametrize("world_size", [2, None])
def test_a_url_that_gives_rank_or_size_is_refused(place: str, query: str, world_size: int | None) -> None:
    # torch's own RPC refuses such a URL in the same way, with an AssertionError.
    with pytest.raises(ValueError, match=r"rank or world_size"):
        create_store(f"{place}?{query}", 0, world_size, 10)


def test_restarted_job_finds_nothing_of_its_last_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"file://{tmp_path}/store"
    for attempt in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        stores = [create_store(place, rank, 2, 10) for rank in range(2)]
        assert not stores[1].check(["key"])
        stores[0].set("key", attempt)
        assert stores[1].get("key").decode() == attempt


def test_workers_of_other_launchers_meet_a_job_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"file://{tmp_path}/store"
    for attempt, world_size in {"0": 2, "1": None}.items():
        outside = create_store(place, 1, world_size, 10)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        create_store(place, 0, world_size, 10).set(attempt, "of a job")
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
        assert outside.get(attempt) == b"of a job"


def test_the_store_has_the_timeout_of_the_calls(port: int) -> None:
    assert create_store(f"tcp://127.0.0.1:{port}", 0, 1, 7).timeout == timedelta(seconds=7)


def test_under_torchrun_rank_0_uses_torchruns_store(master: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torchruns = TCPStore("127.0.0.1", master, is_master=True, wait_for_workers=False)
    torchruns.set("key", "torchrun's")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert create_store("env://", 0, 2, 10).get("key") == b"torchrun's"


def test_a_store_of_torchs_own_at_the_same_port_is_shared(master: int) -> None:
    # The program may have called init_process_group before RPC.
    torchs, _, _ = next(torchs_rendezvous(f"tcp://127.0.0.1:{master}", rank=0, world_size=1))
    torchs.set("key", "value")
    assert create_store("env://", 0, 1, 10).get("key") == b"value"


# ---- The next Store --------------------------------------------------------------------------------------------------


def test_the_server_stays_until_the_next_store_takes_over(master: int) -> None:
    create_store("env://", 0, 2, 10)
    # The other worker has connected for the next group while rank 0 still has the Store of the last one.
    ahead = TCPStore("127.0.0.1", master, wait_for_workers=False)
    ahead.set("next", "of the one ahead")
    store = create_store("env://", 0, 2, 10)
    assert store.get("next") == b"of the one ahead"
    store.set("answer", "of rank 0")
    assert ahead.get("answer") == b"of rank 0"


def test_a_failure_to_open_the_next_store_leaves_the_last_one(master: int) -> None:
    create_store("env://", 0, 2, 10)
    with pytest.raises(ValueError, match="port number missing"):
        create_store("tcp://127.0.0.1", 0, 2, 10)
    TCPStore("127.0.0.1", master, wait_for_workers=False).set("key", "value")


def test_the_store_of_another_port_frees_the_last_one(master: int) -> None:
    create_store("env://", 0, 1, 10)
    with reserved_port() as other:
        create_store(f"tcp://127.0.0.1:{other}", 0, 1, 10)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", master))


# ---- No Store --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [("MASTER_ADDR",), ("MASTER_PORT",), ("MASTER_ADDR", "MASTER_PORT")])
def test_variables_that_are_not_set_are_named(
    missing: tuple[str, ...], master: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in missing:
        monkeypatch.delenv(variable)
    with pytest.raises(ValueError, match=f"environment variable {' and '.join(missing)} expected, but not set: set "):
        create_store("env://", 0, 2, 10)


@pytest.mark.parametrize("value", ["abc", "-1", "1.0", " 1"])
def test_an_impossible_rank_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", value)
    with pytest.raises(
        ValueError, match=f"RANK={value} is not a number from 0 on: set it to the number of this worker"
    ):
        check_rank("env://", -1)


@pytest.mark.parametrize("value", ["http", "-1", "65536", "29500.0"])
def test_an_impossible_port_is_refused(value: str, master: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", value)
    with pytest.raises(ValueError, match=f"MASTER_PORT={value} is not a port"):
        create_store("env://", 0, 2, 10)


@pytest.mark.parametrize(
    "url", ["tcp://localhost", "tcp://", "tcp://:29500", "tcp://localhost:99999", "tcp://localhost:x"]
)
def test_a_tcp_url_without_host_and_port_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must be like tcp://host:29500"):
        create_store(url, 0, 2, 10)


def test_rank_and_world_size_do_not_belong_in_the_url(port: int) -> None:
    with pytest.raises(ValueError, match="pass them to init_rpc"):
        create_store(f"tcp://127.0.0.1:{port}?rank=0&world_size=2", 0, 2, 10)


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid", "no..host"])
def test_address_without_a_listener_is_named_in_time(host: str, port: int, capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with pytest.raises(JoinFailed, match=f"{host}:{port} .*rank 0"):
        create_store(f"tcp://{host}:{port}", 1, 2, 0.5)
    assert time.monotonic() - began >= 0.5
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["no-such-host.invalid", "no..host"])
def test_rank_0_waits_for_its_name_in_time(host: str, port: int, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JoinTimedOut, match=f"'{host}' is not the name of any host, after 0.5 s"):
        create_store(f"tcp://{host}:{port}", 0, 2, 0.5)
    assert capfd.readouterr().err == ""


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"port {port} .*{socket.gethostname()}"):
            create_store(f"tcp://127.0.0.1:{port}", 0, 2, 10)


def test_a_listener_that_is_no_store_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.5)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(JoinFailed, match=f"rank 1 .*127.0.0.1:{port}"):
            create_store(f"tcp://127.0.0.1:{port}", 1, 2, 0.5)


# ---- This host -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "0.0.0.0", "::1", "localhost", socket.gethostname()])
def test_own_names_and_addresses_are_of_this_host(host: str) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("no IPv6 here")
    assert is_this_host(host)


# These addresses are reserved for documentation.
@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid", "no..host"])
def test_names_of_other_hosts_are_not_of_this_host(host: str) -> None:
    assert not is_this_host(host)


def has_ipv6() -> bool:
    return Path("/proc/net/if_inet6").exists() and "lo" in Path("/proc/net/if_inet6").read_text()


@pytest.mark.parametrize("bound_to", ["127.0.0.1", "0.0.0.0", "::", "::1"])
def test_a_server_is_awaited(bound_to: str) -> None:
    if ":" in bound_to and not has_ipv6():
        pytest.skip("no IPv6 here")
    family = socket.AF_INET6 if ":" in bound_to else socket.AF_INET
    host = "::1" if ":" in bound_to else "127.0.0.1"
    with socket.socket(family) as server:
        server.bind((bound_to, 0))
        port = server.getsockname()[1]
        with pytest.raises(JoinTimedOut, match="no server listens"):
            await_listener(host, port, "rank 0", Deadline(0.05), "")
        threading.Timer(0.2, server.listen).start()
        await_listener(host, port, "rank 0", Deadline(5), "")


class Slow:
    """Passes connections on to a Store, the first one late."""

    def __init__(self, port: int, after: float) -> None:
        self._port, self._after = port, after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.accepted = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        time.sleep(self._after)
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            store = socket.create_connection(("127.0.0.1", self._port))
            for source, target in ((client, store), (store, client)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError), source:
            while data := source.recv(4096):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_a_slow_store_is_awaited(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.2)
    served = create_store(f"tcp://127.0.0.1:{port}", 0, 2, 10)
    with contextlib.closing(Slow(port, 1.5)) as slow:
        store = create_store(f"tcp://127.0.0.1:{slow.port}", 1, 2, 10)
        served.set("key", "value")
        assert store.get("key") == b"value"
        # `await_listener` made one connection, and the client the other.
        assert slow.accepted == 2


def test_rank_0_is_refused_an_address_of_another_host(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.5)
    with pytest.raises(JoinFailed, match=f"rank 0 .*{socket.gethostname()}"):
        create_store(f"tcp://no-such-host.invalid:{port}", 0, 2, 0.5)
