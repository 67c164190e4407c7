"""Workers find each other in a Store, or all learn why not."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore, PrefixStore, Store

from tests.support.workers import run_workers
from tests.unit.test_members import outcome, record
from torch_ucx_rpc._bootstrap import members, relay
from torch_ucx_rpc._bootstrap.members import gather_members
from torch_ucx_rpc._bootstrap.record import Record, process_facts, start_time
from torch_ucx_rpc._bootstrap.relay import Relay
from torch_ucx_rpc._bootstrap.rendezvous import create_store


def meet(rank: int, world_size: int, timeout: float = 30.0, **changed: Any) -> list[Record]:
    """Return the members that this worker of a `run_workers` job finds in the Store of the job's port."""
    store = create_store("env://", rank, world_size, timeout)
    return gather_members(store, record(rank, world_size, **changed), timeout)


# ---- A group forms ---------------------------------------------------------------------------------------------------


def meet_and_return(rank: int) -> list[Record]:
    return meet(rank, 4, device_maps={"worker0": {torch.device("cpu"): torch.device("cpu")}})


def test_every_worker_learns_of_all_by_rank() -> None:
    first, *others = run_workers(4, meet_and_return, init=False)
    assert [member.rank for member in first] == [0, 1, 2, 3]
    assert [member.name for member in first] == ["worker0", "worker1", "worker2", "worker3"]
    assert len({member.pid for member in first}) == len({member.session for member in first}) == 4
    assert first[3].address == bytes(range(256))
    assert first[3].device_maps == {"worker0": {torch.device("cpu"): torch.device("cpu")}}
    assert others == [first] * 3


def meet_in_parts(rank: int) -> list[Record]:
    members._PART = 3
    members._PART_BYTES = 100
    return meet(rank, 8)


def test_members_and_arrivals_are_read_in_parts() -> None:
    first, *others = run_workers(8, meet_in_parts, init=False)
    assert [member.rank for member in first] == list(range(8))
    assert others == [first] * 7


def die_above_others(rank: int) -> list[int]:
    """Let rank 1 die when it has the records. Ranks 3 and 4 wait for the records from rank 1."""
    relay.FAN_OUT = 2
    # Only the end of rank 1 ends their wait.
    relay._PATIENCE_S = 1000
    members._FAREWELL_S = 0.1
    store = create_store("env://", rank, 7, 30)
    if rank == 1:
        Relay.serve = lambda *_: os._exit(0)  # type: ignore[method-assign]
    found = [member.rank for member in gather_members(store, record(rank, 7), 30)]
    # Rank 0 hosts the Store, so it ends last.
    store.add("met", 1)
    while rank == 0 and store.add("met", 0) < 6:
        time.sleep(0.01)
    return found


def test_the_death_of_a_relay_delays_no_member() -> None:
    everybody = list(range(7))
    assert run_workers(7, die_above_others, init=False, exit_codes={1: 0}) == [everybody, None, *[everybody] * 5]


def test_a_forked_child_does_not_keep_a_relay_open() -> None:
    own = Relay(HashStore(), 1)
    parent, child = socket.socketpair()
    if os.fork() == 0:
        parent.close()
        child.sendall(b"!")
        child.recv(1)
        os._exit(0)
    parent.recv(1)
    own.close()
    with parent, child, socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect("\0" + str(own.places[0]))
    os.wait()


def meet_in_a_file(rank: int, file: Path) -> list[int]:
    return [member.rank for member in gather_members(FileStore(str(file), 3), record(rank, 3), 30)]


def test_workers_meet_in_a_file_too(tmp_path: Path) -> None:
    assert run_workers(3, meet_in_a_file, tmp_path / "store", init=False) == [[0, 1, 2]] * 3


def meet_twice(rank: int) -> list[list[int]]:
    store = create_store("env://", rank, 2, 30)
    groups = [gather_members(PrefixStore(str(turn), store), record(rank, 2), 30) for turn in range(2)]
    return [[member.rank for member in group] for group in groups]


def test_groups_of_different_prefixes_do_not_mix() -> None:
    assert run_workers(2, meet_twice, init=False) == [[[0, 1], [0, 1]]] * 2


# ---- No group forms --------------------------------------------------------------------------------------------------


def changed_in(rank: int, changes: dict[int, dict[str, Any]], world_size: int) -> str:
    return outcome(meet, rank, **{"world_size": world_size, **changes.get(rank, {})})


def refusal(world_size: int, changes: dict[int, dict[str, Any]]) -> str:
    """Return the error that all workers get when their records disagree."""
    errors = set(run_workers(world_size, changed_in, changes, world_size, init=False))
    assert len(errors) == 1, errors
    return errors.pop()


def test_a_name_used_twice_is_refused_everywhere_naming_both() -> None:
    error = refusal(3, {1: {"name": "twin"}, 2: {"name": "twin"}})
    assert error.startswith("JoinFailed: the worker name 'twin' is not unique: rank 1 ('twin', pid ")
    assert "and rank 2 ('twin', pid " in error


def test_different_versions_are_refused_everywhere_naming_both() -> None:
    error = refusal(3, {1: {"package_version": "9.9.9"}})
    assert "different versions of torch_ucx_rpc: rank 0 ('worker0', pid " in error
    assert "has 1.2.3 and rank 1 ('worker1', pid " in error
    assert "has 9.9.9; install the same everywhere" in error


@pytest.mark.parametrize(("odd", "said"), [(0, 2), (1, 2), (0, 4)])
def test_different_world_sizes_are_refused_naming_both(odd: int, said: int) -> None:
    error = refusal(3, {odd: {"world_size": said}})
    assert "the workers disagree on world_size: " in error
    assert f"says {min(said, 3)} and " in error
    assert f"says {max(said, 3)}; pass the same number" in error


def test_unfit_device_maps_are_refused_everywhere_as_by_torch() -> None:
    error = refusal(2, {1: {"device_maps": {"nobody": {torch.device("cpu"): torch.device("cpu")}}}})
    assert error.startswith("ValueError: Node worker1 has invalid target node names in its device maps")


def take_rank_1(process: int) -> str:
    return outcome(meet, min(process, 1), 3)


def test_a_rank_used_twice_is_refused_everywhere_naming_both() -> None:
    errors = set(run_workers(3, take_rank_1, init=False))
    assert len(errors) == 1
    error = errors.pop()
    assert error.startswith("JoinFailed: rank 1 is taken twice, by rank 1 ('worker1', pid ")
    assert error.count("pid ") == 2


def meet_in_vain(store: Store, rank: int, present: set[int], world_size: int, timeout: float) -> str:
    """Return the error of this worker. On a busy host processes start seconds apart, so the present workers begin
    together."""
    store.set(f"ready/{rank}", "")
    store.wait([f"ready/{peer}" for peer in present])
    return outcome(gather_members, store, record(rank, world_size), timeout)


def meet_unless_absent(rank: int, present: set[int]) -> str:
    if rank not in present:
        return "absent"
    # Rank 0 gives up first, and tells the others.
    return meet_in_vain(create_store("env://", rank, 6, 30), rank, present, 6, 3 if rank == 0 else 30)


def test_absent_and_present_ranks_are_named_everywhere() -> None:
    first, *others = run_workers(6, meet_unless_absent, {0, 1, 4}, init=False)
    assert "has waited 3 s (init_timeout) for all 6 workers" in first
    assert "these ranks have not come: 2-3, 5. Ranks that have come: 0-1, 4 on " in first
    assert others == [first, "absent", "absent", first, "absent"]


def meet_in_a_file_without_rank_0(process: int, file: Path) -> str:
    return meet_in_vain(FileStore(str(file)), process + 1, {1, 2}, 3, 3)


def test_an_absent_rank_0_is_named_too(tmp_path: Path) -> None:
    for error in run_workers(2, meet_in_a_file_without_rank_0, tmp_path / "store", init=False):
        # There is no verdict of rank 0, so the other worker may have given up just before.
        assert re.search(r"these ranks have not come, or have given up: 0(-1|, 2)?\. Ranks that have come: [12]", error)


def lose_rank_0(rank: int) -> str:
    store = create_store("env://", rank, 3, 30)
    if rank == 0:
        PrefixStore("torch_ucx_rpc", store).wait(["arrival/0"])
        os._exit(0)
    return outcome(gather_members, store, record(rank, 3), 30)


def test_the_loss_of_the_store_is_explained() -> None:
    # torch itself reports the closed connection on stderr.
    _, *errors = run_workers(2, lose_rank_0, init=False, silent=False, exit_codes={0: 0})
    assert all("rank 0, or the process that hosts the Store, has ended or given up" in error for error in errors)


# ---- Again -----------------------------------------------------------------------------------------------------------


def give_up_then_meet(rank: int) -> tuple[str, list[int]]:
    store = create_store("env://", rank, 3, 30)
    given_up = meet_in_vain(store, rank, {0, 1}, 3, 2 if rank == 0 else 30)
    return given_up, [member.rank for member in gather_members(store, record(rank, 2), 30)]


def test_after_an_error_all_can_try_again_on_the_same_store() -> None:
    for given_up, ranks in run_workers(2, give_up_then_meet, init=False):
        assert "these ranks have not come: 2" in given_up
        assert ranks == [0, 1]


def meet_after_rank_0_gave_up(rank: int, file: Path) -> list[int]:
    store = FileStore(str(file))
    if rank == 0:
        assert "not come: 1" in outcome(gather_members, store, record(0, 2), 0.1)
        store.set("given up", "")
    store.wait(["given up"])
    return [member.rank for member in gather_members(store, record(rank, 2), 30)]


def test_a_late_worker_meets_workers_that_try_again(tmp_path: Path) -> None:
    assert run_workers(2, meet_after_rank_0_gave_up, tmp_path / "store", init=False) == [[0, 1]] * 2


def interrupted_then_there(process: int, file: Path) -> Any:
    """Run ranks 0 to 2 in processes 0 to 2. Process 1 gives up, and tries again."""
    store = FileStore(str(file))
    if process == 1:
        interrupt_when_listed(store, position=0)
        with pytest.raises(KeyboardInterrupt):
            gather_members(store, record(1, 3), 0)
        store.set("interrupted", "")
    store.wait(["interrupted"])
    return [member.session for member in gather_members(store, record(process, 3), 30)]


def interrupt_when_listed(store: Store, position: int) -> None:
    """Start a child that sends SIGINT to this process once it is in the list."""
    pid = os.getpid()
    if os.fork() == 0:
        PrefixStore("torch_ucx_rpc", store).wait([f"arrival/{position}"])
        os.kill(pid, signal.SIGINT)
        os._exit(0)


def test_ctrl_c_ends_the_wait_and_unlists_the_worker(tmp_path: Path) -> None:
    first, *others = run_workers(3, interrupted_then_there, tmp_path / "store", init=False)
    assert others == [first] * 2


def test_a_record_identifies_its_process() -> None:
    facts = process_facts()
    assert facts["pid"] == os.getpid()
    assert Path("/proc/self/ns/pid").readlink().name == f"pid:[{facts['pid_namespace']}]"
    assert facts["process_start_time"] == start_time(os.getpid())
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    with subprocess.Popen(["sleep", "infinity"]) as child:
        started = start_time(child.pid) / os.sysconf("SC_CLK_TCK")
        child.kill()
    assert before - 0.1 <= started <= time.clock_gettime(time.CLOCK_BOOTTIME) + 0.1


# ---- Processes -------------------------------------------------------------------------------------------------------


def test_a_zombie_counts_as_ended() -> None:
    process = subprocess.Popen(["sleep", "infinity"])
    other = record(1, 0, pid=process.pid, process_start_time=start_time(process.pid))
    assert not other.has_ended_beside(record(0, 0))
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert other.has_ended_beside(record(0, 0))
    process.wait()
    assert other.has_ended_beside(record(0, 0))
