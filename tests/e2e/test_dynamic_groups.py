"""Groups without a world_size: workers join and leave while others call."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

from tests.support import workers
from tests.support.labs import Fate, VirtualHosts, needs_virtual_hosts
from tests.support.workers import Steps, agent, backend_options, eventually, init_rpc, stop
from torch_ucx_rpc._bootstrap import dynamic_group
from torch_ucx_rpc.errors import JoinFailed, JoinTimedOut, RRefLost, WorkerLeft, WorkerLost

from ._failures import autograd_contexts

pytestmark = pytest.mark.ucx_only


def double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def name_of_callee() -> str:
    return rpc.get_worker_info().name


def assert_answers(peer: int) -> None:
    assert rpc.rpc_sync(f"worker{peer}", name_of_callee) == f"worker{peer}"
    for n in (3, 1 << 18):
        tensor = torch.full((n,), float(peer))
        assert torch.equal(rpc.rpc_sync(f"worker{peer}", double, args=(tensor,)), 2 * tensor)


def present() -> set[str]:
    return {info.name for info in agent().get_worker_infos()}


def join(rank: int, **overrides: object) -> None:
    init_rpc(rank, world_size=None, **overrides)


RunWorkers = Callable[..., list]


def test_workers_join_and_leave_one_after_the_other(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(3, join_and_leave_in_order, Steps(tmp_path), init=False)


def join_and_leave_in_order(rank: int, steps: Steps) -> None:
    if rank:
        steps.wait_for(f"joined {rank - 1}")
    join(rank)
    assert present() == {f"worker{earlier}" for earlier in range(rank + 1)}
    for earlier in range(rank + 1):
        assert_answers(earlier)
    steps.done(f"joined {rank}")
    steps.wait_for("joined 2")
    for peer in range(3):
        assert_answers(peer)
    steps.done(f"called {rank}")
    steps.wait_for("called 0", "called 1", "called 2")

    # Rank 0, whose process hosts the Store, is the first to leave.
    if rank:
        steps.wait_for(f"left {rank - 1}")
        eventually(lambda: f"worker{rank - 1}" not in present(), f"worker{rank - 1} has left")
        with pytest.raises(WorkerLeft) as raised:
            rpc.rpc_sync(f"worker{rank - 1}", name_of_callee)
        assert (raised.value.name, raised.value.rank) == (f"worker{rank - 1}", rank - 1)
        for later in range(rank, 3):
            assert_answers(later)
    rpc.shutdown()
    steps.done(f"left {rank}")
    steps.wait_for("left 2")


def test_workers_join_all_at_once(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(8, join_at_once, Steps(tmp_path), init=False)


def join_at_once(rank: int, steps: Steps) -> None:
    join(rank)
    steps.done(f"joined {rank}")
    steps.wait_for(*(f"joined {peer}" for peer in range(8)))
    assert len(present()) == 8
    for peer in range(8):
        assert_answers(peer)
    # Then all leave at once.
    steps.done(f"called {rank}")
    steps.wait_for(*(f"called {peer}" for peer in range(8)))
    rpc.shutdown()


ROUNDS = 4


def test_others_do_not_notice_joins_and_leaves(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(5, come_and_go, Steps(tmp_path), init=False)


def come_and_go(rank: int, steps: Steps) -> None:
    if rank < 2:
        join(rank)
        steps.done(f"joined {rank}")
        steps.wait_for("joined 0", "joined 1")
        over = [f"over {visitor}" for visitor in (2, 3, 4)]
        while not all(map(steps.is_done, over)):
            assert_answers(1 - rank)
        steps.done(f"stopped {rank}")
        steps.wait_for("stopped 0", "stopped 1")
        eventually(lambda: present() == {"worker0", "worker1"}, "only those two are left")
        steps.done(f"alone {rank}")
        steps.wait_for("alone 0", "alone 1")
        rpc.shutdown()
        return
    steps.wait_for("joined 0", "joined 1")
    for _ in range(ROUNDS):
        join(rank)
        assert_answers(0)
        assert_answers(1)
        rref = rpc.remote("worker0", double, args=(torch.ones(2),))
        assert rref.to_here().sum() == 4
        # The worker that stays calls the new worker too.
        assert rpc.rpc_sync("worker1", call_back, args=(rank,)) == f"worker{rank}"
        del rref
        rpc.shutdown()
    steps.done(f"over {rank}")
    steps.wait_for("over 2", "over 3", "over 4")


def call_back(rank: int) -> str:
    return rpc.rpc_sync(f"worker{rank}", name_of_callee)


def test_a_worker_leaves_although_others_go_on_calling_it(run_workers: RunWorkers, tmp_path: Path) -> None:
    [_, *answers] = run_workers(3, leave_while_called, Steps(tmp_path), init=False)
    assert all(count > 0 for count in answers)


def slow(tensor: torch.Tensor) -> torch.Tensor:
    time.sleep(0.005)
    return tensor + 1


def is_refused(call: torch.futures.Future) -> bool:
    try:
        call.wait()
    except WorkerLeft as error:
        return error.name == "worker0"
    return False


def leave_while_called(rank: int, steps: Steps) -> int:
    join(rank)
    steps.done(f"joined {rank}")
    steps.wait_for("joined 0", "joined 1", "joined 2")
    answered = 0
    if rank == 0:
        steps.wait_for("calling 1", "calling 2")
        rpc.shutdown()
    else:
        tensor = torch.ones(1 << 16)
        calls = []
        while True:
            calls.append(rpc.rpc_async("worker0", slow, args=(tensor,)))
            if len(calls) < 10:
                continue
            # Earlier calls get the right answers. Later calls are refused, with the reason.
            if is_refused(calls[0]):
                break
            assert torch.equal(calls.pop(0).wait(), tensor + 1)
            answered += 1
            steps.done(f"calling {rank}")
        assert all(is_refused(call) for call in calls)
        assert_answers(3 - rank)
        steps.done(f"called {rank}")
        steps.wait_for("called 1", "called 2")
        rpc.shutdown()
    return answered


# ---- Workers that die ------------------------------------------------------------------------------------------------


def test_a_worker_takes_the_place_of_one_that_was_killed(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(4, replace_the_killed, Steps(tmp_path), init=False, exit_codes={1: -signal.SIGKILL}, silent=False)


def replace_the_killed(rank: int, steps: Steps) -> None:
    if rank == 3:
        # The successor of worker 1, with its rank and name.
        steps.wait_for("noticed 0", "noticed 2")
        join(1)
        assert present() == {"worker0", "worker1", "worker2"}
    else:
        if rank:
            steps.wait_for("joined 0")
        join(rank)
        steps.done(f"joined {rank}")
        steps.wait_for("joined 0", "joined 1", "joined 2")
    if rank == 1:
        # The RRefs of worker 1 on workers 0 and 2 outlive it.
        kept = [rpc.remote(f"worker{owner}", torch.full, args=((2,), 1.0)) for owner in (0, 2) for _ in range(5)]
        assert all(rref.to_here().sum() == 2 for rref in kept)
        steps.done("created")
        steps.wait_for("never")
    if rank in (0, 2):
        steps.wait_for("created")
        theirs = rpc.remote("worker1", torch.full, args=((2,), 1.0))
        assert theirs.to_here().sum() == 2
        steps.done(f"holds {rank}")
        steps.wait_for("holds 0", "holds 2")
        if rank == 0:
            os.kill(rpc_pid_of(1), signal.SIGKILL)
        eventually(lambda: "worker1" not in present(), "the death of worker1 is noticed")
        with pytest.raises(WorkerLost) as raised:
            rpc.rpc_sync("worker1", name_of_callee)
        assert raised.value.name == "worker1"
        assert_answers(2 - rank)
        steps.done(f"noticed {rank}")
    steps.wait_for("noticed 0", "noticed 2")
    eventually(lambda: "worker1" in present(), "the successor is there")
    if rank in (0, 2):
        for use in (theirs.to_here, theirs.rpc_sync().sum, lambda: rpc.rpc_sync(f"worker{2 - rank}", repr, (theirs,))):
            with pytest.raises(RRefLost, match=r"does not exist.*owner is gone and another worker has its rank"):
                use()
    if rank == 2:
        # A reference from the dead worker. Its rpc.remote() never arrived.
        promised = rpc.PyRRef._deserialize((0, 1, 10**6, 1, 10**6 + 1, 0, "PyObject"))
        never = r"never have a value: the worker .* gone, and another has its rank, 1,"
        with pytest.raises(RRefLost, match=never):
            promised.rpc_sync(timeout=0).keys()
        with pytest.raises(RRefLost, match=never):
            promised.to_here(timeout=0)
    if rank == 3:
        for owner in (0, 2):
            # These are not the predecessor's RRefs, although torch numbers RRefs by rank, and from zero in each
            # process.
            rrefs = [rpc.remote(f"worker{owner}", torch.full, args=((2,), 5.0)) for _ in range(5)]
            assert [rref.to_here().sum().item() for rref in rrefs] == [10.0] * 5
            del rrefs
        with torch.distributed.autograd.context() as context:
            x = torch.ones(2, requires_grad=True)
            loss = rpc.rpc_sync("worker0", double, args=(x,)).sum()
            torch.distributed.autograd.backward(context, [loss])
            assert torch.equal(torch.distributed.autograd.get_gradients(context)[x], torch.full((2,), 2.0))
    for peer in range(3):
        assert_answers(peer)
    steps.done(f"called {rank}")
    steps.wait_for("called 0", "called 2", "called 3")
    # No worker can release the RRefs of the dead worker.
    rpc.api._ignore_rref_leak = True
    rpc.shutdown()


def rpc_pid_of(rank: int) -> int:
    return rpc.rpc_sync(f"worker{rank}", os.getpid)


def test_a_list_of_dead_members_does_not_hinder_a_join(run_workers: RunWorkers, tmp_path: Path) -> None:
    file = tmp_path / "store"
    run_workers(2, die_in_a_group, Steps(tmp_path), file, init=False, exit_codes={0: 3, 1: 3})
    # The second job uses the same file, with the same ranks and names.
    run_workers(2, live_in_a_group, Steps(tmp_path), file, init=False)


def die_in_a_group(rank: int, steps: Steps, file: Path) -> None:
    join(rank, rpc_backend_options=backend_options(init_method=file.as_uri()))
    steps.done(f"first {rank}")
    steps.wait_for("first 0", "first 1")
    os._exit(3)


def live_in_a_group(rank: int, steps: Steps, file: Path) -> None:
    join(rank, rpc_backend_options=backend_options(init_method=file.as_uri()))
    steps.done(f"second {rank}")
    steps.wait_for("second 0", "second 1")
    assert_answers(1 - rank)
    steps.done(f"third {rank}")
    steps.wait_for("third 0", "third 1")
    rpc.shutdown()


def test_a_cut_removes_no_member_from_the_list(tmp_path: Path) -> None:
    needs_virtual_hosts()
    with VirtualHosts(["a", "b", "c"]) as hosts, Fate(hosts) as fate:
        arguments = {"options": {"heartbeat_limit": 2, "reconnect_limit": 0}, "hosts": hosts, "init": False}
        workers.run_workers(4, join_after_a_cut, Steps(tmp_path), fate, **arguments)


def join_after_a_cut(rank: int, steps: Steps, fate: Fate) -> None:
    everybody = {f"worker{peer}" for peer in range(4)}
    if rank < 3:
        join(rank)
        steps.done(f"joined {rank}")
        steps.wait_for("joined 0", "joined 1", "joined 2")
        for peer in range(3):
            assert_answers(peer)
        steps.done(f"called {rank}")
        steps.wait_for("called 0", "called 1", "called 2")
        if rank == 0:
            fate.of("b", "cut")
        # Each side loses the other, and writes that to the Store. Worker 1 reaches the Store only after the cut.
        remaining = {"worker1"} if rank == 1 else {"worker0", "worker2"}
        eventually(lambda: present() == remaining, "the other side of the cut is lost")
        steps.done(f"lost {rank}")
        steps.wait_for("lost 0", "lost 1", "lost 2")
        if rank == 0:
            fate.of("b", "heal")
        # The Store answers after all earlier writes.
        agent().store.check(["anything"])
        steps.done(f"told {rank}")
    else:
        steps.wait_for("told 0", "told 1", "told 2")
        dynamic_group._DOUBTED_S = 10.0  # an answer may take a second on a busy machine
        join(3)
        assert present() == everybody
        for peer in range(4):
            assert_answers(peer)
        steps.done("joined 3")
    steps.wait_for("joined 3")
    if rank == 1:
        # Workers that have lost worker 1 send it nothing more. It must join again.
        rpc.shutdown(graceful=False)
        join(1)
        assert present() == everybody
        steps.done("joined again")
    steps.wait_for("joined again")
    eventually(lambda: present() == everybody, "all are there")
    for peer in range(4):
        assert_answers(peer)
    steps.done(f"over {rank}")
    steps.wait_for("over 0", "over 1", "over 2", "over 3")
    rpc.shutdown()


@pytest.mark.parametrize("options", [{}, {"reconnect_limit": 0}], ids=["default", "no_reconnect"])
@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "no_route"])
def test_a_join_outlasts_a_cut(tmp_path: Path, is_cut: bool, options: dict[str, Any]) -> None:
    needs_virtual_hosts()
    with VirtualHosts(["a", "b"]) as hosts, Fate(hosts) as fate:
        route = None if is_cut else ["unreachable", hosts[0].address]
        arguments = (Steps(tmp_path), tmp_path / "store", fate, route, options)
        workers.run_workers(2, join_in_a_cut, *arguments, hosts=hosts, init=False)


def join_in_a_cut(
    rank: int, steps: Steps, file: Path, fate: Fate, route: list[str] | None, options: dict[str, Any]
) -> None:
    if rank == 1:
        steps.wait_for("joined 0")
        if route is None:
            fate.of("a", "cut_for", 4)
        else:
            # Connections fail at once, as on a host whose network is just coming back.
            subprocess.run(["ip", "route", "add", *route], check=True)
            threading.Timer(4, subprocess.run, [["ip", "route", "del", *route]]).start()
    join(rank, rpc_backend_options=backend_options(init_method=file.as_uri(), **options))
    assert rank == 0 or present() == {"worker0", "worker1"}, "a join waits as a call does"
    steps.done(f"joined {rank}")
    steps.wait_for("joined 0", "joined 1")
    assert present() == {"worker0", "worker1"}
    assert_answers(1 - rank)
    steps.done(f"called {rank}")
    steps.wait_for("called 0", "called 1")
    rpc.shutdown()


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "no_route"])
def test_a_join_ends_when_a_silent_member_is_lost(tmp_path: Path, is_cut: bool) -> None:
    needs_virtual_hosts()
    with VirtualHosts(["a", "b"]) as hosts, Fate(hosts) as fate:
        route = None if is_cut else ["unreachable", hosts[0].address]
        arguments = (Steps(tmp_path), tmp_path / "store", fate, route)
        workers.run_workers(2, join_beside_a_silent_one, *arguments, hosts=hosts, init=False)


def join_beside_a_silent_one(rank: int, steps: Steps, file: Path, fate: Fate, route: list[str] | None) -> None:
    if rank == 1:
        steps.wait_for("joined 0")
        if route is None:
            fate.of("a", "cut")
        else:
            subprocess.run(["ip", "route", "add", *route], check=True)
    began = time.monotonic()
    options = {"init_method": file.as_uri(), "heartbeat_limit": 1, "reconnect_limit": 2}
    join(rank, rpc_backend_options=backend_options(**options))
    assert rank == 0 or 2 < time.monotonic() - began < 30
    assert present() == {f"worker{rank}"}
    if rank == 1:
        with pytest.raises(WorkerLost, match=r"no sign of life .*reconnect_limit 2\.0 s"):
            rpc.rpc_sync("worker0", os.getpid)
    steps.done(f"joined {rank}")
    steps.wait_for("joined 0", "joined 1")
    rpc.shutdown(graceful=False)


def test_a_worker_that_joins_again_has_no_contexts_from_before(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(2, join_again_with_an_open_context, Steps(tmp_path), tmp_path / "store", init=False)


def join_again_with_an_open_context(rank: int, steps: Steps, file: Path) -> None:
    at_store = {"rpc_backend_options": backend_options(init_method=file.as_uri())}
    join(rank, **at_store)
    steps.done(f"joined {rank}")
    steps.wait_for("joined 0", "joined 1")
    if rank == 0:
        with dist_autograd.context():
            rpc.rpc_sync("worker1", double, args=(torch.ones(3, requires_grad=True),))
            steps.done("called")
            steps.wait_for("left")
        steps.done("closed")
    else:
        with dist_autograd.context():
            steps.wait_for("called")
            assert autograd_contexts() == 2
            rpc.shutdown(graceful=False)
            steps.done("left")
            steps.wait_for("closed")
            join(rank, **at_store)
            # Worker 0 could not tell worker 1 that it closed its context. Worker 1 still has its own context.
            assert autograd_contexts() == 1
        assert autograd_contexts() == 0
        steps.done("joined again")
    steps.wait_for("joined again")
    rpc.shutdown()


# ---- Refusals --------------------------------------------------------------------------------------------------------


def test_a_rank_and_a_name_can_be_taken_only_once(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(2, take_what_is_taken, Steps(tmp_path), tmp_path / "store", init=False)


def take_what_is_taken(rank: int, steps: Steps, file: Path) -> None:
    options = backend_options(init_method=file.as_uri())
    if rank == 0:
        join(0, rpc_backend_options=options)
        steps.done("joined 0")
        steps.wait_for("joined 1")
    else:
        steps.wait_for("joined 0")
        with pytest.raises(JoinFailed, match=r"'worker0' .*rank 5 .*rank 0 "):
            join(5, name="worker0", rpc_backend_options=options)
        with pytest.raises(JoinFailed, match=r"worker rank 0 is not unique: rank 0 .* and rank 0 "):
            join(0, name="other", rpc_backend_options=options)
        # The attempts leave no trace.
        join(1, rpc_backend_options=options)
        assert_answers(0)
        assert present() == {"worker0", "worker1"}
        steps.done("joined 1")
    rpc.shutdown()


@pytest.mark.parametrize("first", [2, None], ids=["static first", "dynamic first"])
def test_groups_with_and_without_a_size_do_not_mix(run_workers: RunWorkers, tmp_path: Path, first: int | None) -> None:
    run_workers(3, mix, Steps(tmp_path), tmp_path / "store", first, init=False)


def mix(rank: int, steps: Steps, file: Path, first: int | None) -> None:
    options = backend_options(init_method=file.as_uri())
    if rank < 2:
        init_rpc(rank, world_size=first, rpc_backend_options=options)
        steps.done(f"joined {rank}")
        steps.wait_for("refused")
        rpc.shutdown()
        steps.done(f"left {rank}")
        steps.wait_for("tried again")
    else:
        steps.wait_for("joined 0", "joined 1")
        second = None if first else 3
        with pytest.raises(JoinFailed, match="mixes statically and dynamically initialized members"):
            init_rpc(2, world_size=second, rpc_backend_options=options)
        steps.done("refused")
        steps.wait_for("left 0", "left 1")
        # The Store is free again.
        init_rpc(0 if second else 2, world_size=second and 1, rpc_backend_options=options)
        rpc.shutdown()
        steps.done("tried again")


def test_a_worker_that_does_not_answer_is_named(run_workers: RunWorkers, tmp_path: Path) -> None:
    file = tmp_path / "store"
    run_workers(2, join_beside_one_that_hangs, Steps(tmp_path), file, init=False, exit_codes={0: -signal.SIGKILL})


def join_beside_one_that_hangs(rank: int, steps: Steps, file: Path) -> None:
    if rank == 0:
        join(0, rpc_backend_options=backend_options(init_method=file.as_uri()))
        steps.done(f"joined {os.getpid()}")
        steps.wait_for("never")
    eventually(lambda: any(steps.directory.glob("joined *")), "worker0 has joined")
    [step] = steps.directory.glob("joined *")
    pid = int(step.name.split()[1])
    stop(pid)
    try:
        with pytest.raises(JoinTimedOut, match=r"1 s .*rank 0 \('worker0'"):
            join(1, rpc_backend_options=backend_options(init_method=file.as_uri(), init_timeout=1))
    finally:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)


def test_a_join_does_not_wait_for_handlers(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(2, join_one_that_is_busy, Steps(tmp_path), tmp_path / "store", init=False)


def join_one_that_is_busy(rank: int, steps: Steps, file: Path) -> None:
    if rank == 1:
        steps.wait_for("busy")
    options = backend_options(init_method=file.as_uri(), num_worker_threads=1, init_timeout=10)
    join(rank, rpc_backend_options=options)
    if rank == 0:
        handler = rpc.rpc_async("worker0", wait_in_a_handler, args=(steps, "busy", "joined 1"))
        handler.wait()
    steps.done(f"joined {rank}")
    rpc.shutdown()


def wait_in_a_handler(steps: Steps, begun: str, last: str) -> None:
    steps.done(begun)
    steps.wait_for(last)


def test_the_rank_comes_from_the_environment(run_workers: RunWorkers) -> None:
    run_workers(1, join_without_rank, init=False)


def join_without_rank(rank: int) -> None:
    with pytest.raises(ValueError, match="environment variable RANK expected"):
        join(-1)
    with pytest.raises(ValueError, match="rank parameter missing"):
        join(-1, rpc_backend_options=backend_options(init_method="tcp://127.0.0.1:29500"))
    os.environ["RANK"] = "0"
    join(-1)
    assert rpc.get_worker_info().id == 0
    rpc.shutdown()
