"""Workers of a large group take the records from each other, and from the Store if anything goes wrong."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, Store

from tests.unit.test_members import record
from torch_ucx_rpc._bootstrap import members, network, relay
from torch_ucx_rpc._bootstrap.members import gather_members
from torch_ucx_rpc._bootstrap.record import Record
from torch_ucx_rpc._bootstrap.relay import Relay, above, number_below, take
from torch_ucx_rpc._bootstrap.secret import Secret

WORKERS = 16
PACKED = bytes(range(256)) * 4096


@pytest.fixture(autouse=True)
def small_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 1 to 3 are below rank 0, ranks 4 to 6 below 1, and so on."""
    monkeypatch.setattr(relay, "FAN_OUT", 3)
    # No worker gives up early on a busy host.
    monkeypatch.setattr(relay, "_PATIENCE_S", 60)


def relay_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "torch_ucx_rpc-relay"]


@pytest.fixture(autouse=True)
def no_thread_is_left(small_trees: None) -> Iterator[None]:
    yield
    for thread in relay_threads():
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the names of the threads that read the records from the Store. The names are ranks."""
    found: list[int] = []
    read_parts = members._read_parts

    def note_and_read(*args: Any) -> bytes:
        found.append(int(threading.current_thread().name))
        return read_parts(*args)

    monkeypatch.setattr(members, "_read_parts", note_and_read)
    return found


def gather(store: Store, secret: Secret | None = None) -> list[list[Record]]:
    """Return what each worker finds. Each runs in a thread named by its rank."""

    def meet(rank: int) -> list[Record]:
        threading.current_thread().name = str(rank)
        return gather_members(store, record(rank, WORKERS), 30, secret)

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(meet, range(WORKERS)))


def assert_all_agree(found: list[list[Record]]) -> None:
    assert [member.rank for member in found[0]] == list(range(WORKERS))
    assert found == [found[0]] * WORKERS


# ---- A tree ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4, 5, 7, 100])
def test_each_rank_is_below_one_other(workers: int) -> None:
    below = {rank: [other for other in range(1, workers) if above(other) == rank] for rank in range(workers)}
    assert {rank: len(others) for rank, others in below.items()} == {
        rank: number_below(rank, workers) for rank in range(workers)
    }
    assert all(rank < other for rank, others in below.items() for other in others)


@pytest.mark.parametrize("secret", [None, Secret(b"a secret of more than 16 bytes")])
def test_only_workers_below_rank_0_read_the_store(readers: list[int], secret: Secret | None) -> None:
    assert_all_agree(gather(HashStore(), secret))
    assert sorted(readers) == [1, 2, 3]


def test_a_group_without_depth_has_no_relays() -> None:
    with contextlib.closing(Relay(HashStore(), number_below(1, 4))) as none:
        assert none.places == []
        none.serve(PACKED)
    assert not relay_threads()


# ---- Something goes wrong --------------------------------------------------------------------------------------------


def end(own: Relay, _packed: bytes) -> None:
    own.close()


def send_other_bytes(own: Relay, packed: bytes) -> None:
    serve(own, bytes(len(packed)))


def send_half(own: Relay, packed: bytes) -> None:
    serve(own, packed[: len(packed) // 2])


def keep_silent(own: Relay, _packed: bytes) -> None:
    silent.append(own._listeners)
    own._listeners = []


serve = Relay.serve
silent: list[list[socket.socket]] = []


@pytest.mark.parametrize("fault", [end, send_other_bytes, send_half, keep_silent])
def test_workers_read_the_store_if_a_relay_does_not_send(
    monkeypatch: pytest.MonkeyPatch, readers: list[int], fault: Any
) -> None:
    monkeypatch.setattr(relay, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(
        Relay, "serve", lambda own, packed: (fault if threading.current_thread().name == "1" else serve)(own, packed)
    )
    assert_all_agree(gather(HashStore()))
    assert {1, 2, 3, 4, 5, 6} <= set(readers)
    for listener in silent.pop() if silent else []:
        listener.close()


@pytest.mark.parametrize(
    "entry",
    [
        "no JSON",
        "{}",
        json.dumps({"places": "a name"}),
        json.dumps({"places": [None, 7, [], ["::1"], ["::1", 1 << 40], ["host.invalid", 1], ["::1", "1"]]}),
        json.dumps({"places": ["no/listener", "\ud800", "x" * 1000, ["127.0.0.1", 1], ["::1", -1]]}),
    ],
)
def test_workers_with_forged_places_read_the_store(
    monkeypatch: pytest.MonkeyPatch, readers: list[int], entry: str
) -> None:
    write = members.write_entry

    def write_or_forge(values: dict[str, Any], secret: Secret | None) -> str:
        return entry if "places" in values else write(values, secret)

    monkeypatch.setattr(members, "write_entry", write_or_forge)
    monkeypatch.setattr(relay, "_FAREWELL_S", 0.1)
    assert_all_agree(gather(HashStore()))
    assert sorted(readers) == list(range(1, WORKERS))


def test_a_place_without_the_secret_is_not_used(monkeypatch: pytest.MonkeyPatch, readers: list[int]) -> None:
    write = members.write_entry

    def write_without(values: dict[str, Any], secret: Secret | None) -> str:
        return write(values, None if "places" in values else secret)

    monkeypatch.setattr(members, "write_entry", write_without)
    monkeypatch.setattr(relay, "_FAREWELL_S", 0.1)
    assert_all_agree(gather(HashStore(), Secret(b"a secret of more than 16 bytes")))
    assert sorted(readers) == list(range(1, WORKERS))


def test_a_worker_listens_before_it_is_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = members._listed

    def look_and_list(store: Store, own: Record, secret: Secret | None) -> Any:
        assert own.rank == 0 or store.check([f"relay/{own.rank}"]) == (number_below(own.rank, WORKERS) > 0)
        return listed(store, own, secret)

    monkeypatch.setattr(members, "_listed", look_and_list)
    assert_all_agree(gather(HashStore()))


def test_a_worker_that_gives_up_ends_its_relay() -> None:
    store = HashStore()
    with pytest.raises(RuntimeError, match="have not come"):
        gather_members(store, record(1, WORKERS), 0.1)
    (place,) = json.loads(PrefixStore("torch_ucx_rpc", store).get("relay/1"))["places"]
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect("\0" + place)


# ---- One relay -------------------------------------------------------------------------------------------------------


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address of this host other than the loopback address."""
    if (address := network.address_towards(network.ELSEWHERE)) is None:
        pytest.skip("this host has no network")
    monkeypatch.setattr(relay, "meeting_address", lambda _store: address)
    return address


def test_workers_of_other_hosts_connect_by_tcp(over_tcp: str) -> None:
    own = Relay(HashStore(), 2)
    unix, tcp = own.places
    assert tcp[0] == over_tcp
    own.serve(PACKED)
    places = json.loads(json.dumps(["torch_ucx_rpc_relay/of another host", tcp]))
    assert take(places, len(PACKED)) == PACKED
    assert take([unix], len(PACKED)) == PACKED


def test_a_worker_waits_until_the_one_above_has_the_records() -> None:
    own = Relay(HashStore(), 1)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(take, own.places, len(PACKED))
        time.sleep(0.1)
        assert not taken.done()
        own.serve(PACKED)
        assert taken.result(30) == PACKED


def test_a_relay_that_ends_keeps_no_worker_waiting() -> None:
    own = Relay(HashStore(), 1)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(take, own.places, len(PACKED))
        time.sleep(0.1)
        own.close()
        assert taken.result(30) == b""


def test_no_more_bytes_are_read_than_the_verdict_says() -> None:
    own = Relay(HashStore(), 1)
    own.serve(PACKED)
    assert take(own.places, 10) == PACKED[:10]


def test_a_relay_ends_when_no_worker_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_FAREWELL_S", 0.05)
    Relay(HashStore(), 1).serve(PACKED)
    (thread,) = relay_threads()
    thread.join(30)
    assert not thread.is_alive()


def test_a_stuck_worker_holds_up_others_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_PATIENCE_S", 0.2)
    own = Relay(HashStore(), 2)
    with socket.socket(socket.AF_UNIX) as stuck:
        stuck.connect("\0" + str(own.places[0]))
        own.serve(PACKED)
        stuck.recv(1)
        monkeypatch.setattr(relay, "_PATIENCE_S", 60)
        assert take(own.places, len(PACKED)) == PACKED
