"""The epochs of a group among real workers: deaths, silence, cuts, newcomers."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed.rpc as rpc

from tests.support import workers
from tests.support.labs import Fate, VirtualHosts
from tests.support.workers import Steps, backend_options, eventually, init_rpc
from torch_ucx_rpc._workers import members
from torch_ucx_rpc._workers.epochs import BEAT
from torch_ucx_rpc._workers.life import Life
from torch_ucx_rpc._workers.members import LIMIT_S, Epoch, Group, Member

from ._jobs import KILLED, PATIENCE_S

RunWorkers = Callable[..., list]

LIMIT = 2.0


def present(group: Group) -> tuple[Member, ...]:
    """The members of the epoch in force; none if this worker is not one of them."""
    epoch = group.epoch
    return epoch.members if epoch is not None and group.is_current(epoch.number) else ()


def names(group: Group) -> list[str]:
    return [one.name for one in present(group)]


def epoch_after(group: Group, number: int) -> Epoch:
    """Return the next epoch in force."""
    eventually(lambda: present(group) and group.epoch.number > number, f"an epoch after {number}", timeout=60)
    return group.epoch


def make(steps: Steps, rank: int, of: int) -> Group:
    """Return the group of all workers, once all are in its current epoch."""
    group = members.group("test", LIMIT)
    eventually(lambda: len(present(group)) == of, "all are members")
    steps.meet("member", rank, of)
    return group


def test_workers_of_a_fixed_group_are_its_first_epoch(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, meet_in_the_first_epoch, Steps(tmp_path))


def meet_in_the_first_epoch(rank: int, steps: Steps) -> None:
    group = make(steps, rank, 3)
    epoch = group.epoch
    assert (epoch.number, epoch.decider.name) == (1, "worker0")
    assert members.group("test") is group
    eventually(lambda: group.is_current(1), "it is in force")
    assert not group.is_current(7)
    steps.meet("checked", rank, 3)


def test_a_group_that_takes_long_to_make_stays_current(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, make_it_slowly, Steps(tmp_path))


def make_it_slowly(rank: int, steps: Steps) -> None:
    make_groups = members._groups._make

    def make_slowly(life: Life) -> object:
        made = make_groups(life)
        time.sleep(LIMIT_S * BEAT)
        return made

    with mock.patch.object(members._groups, "_make", make_slowly):
        group = members.group("test", LIMIT)
    steps.meet("made", rank, 2)
    time.sleep(LIMIT)
    assert group.is_current()
    steps.meet("over", rank, 2)


def test_one_call_makes_the_group_everywhere(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, make_it_for_all, Steps(tmp_path))


def make_it_for_all(rank: int, steps: Steps) -> None:
    if rank == 1:
        group = members.group("test", LIMIT)
        eventually(lambda: names(group) == ["worker0", "worker1", "worker2"], "all are members")
        time.sleep(1.5 * LIMIT)
        eventually(lambda: names(group) == ["worker0", "worker1", "worker2"], "all stay")
        assert group.epoch.number == 1
    steps.meet("over", rank, 3)


@pytest.mark.parametrize("dying", [0, 2])
def test_a_death_begins_an_epoch_before_silence_does(run_on_ucx: RunWorkers, tmp_path: Path, dying: int) -> None:
    run_on_ucx(4, outlive, Steps(tmp_path), dying, shutdown=False, exit_codes={dying: KILLED})


def outlive(rank: int, steps: Steps, dying: int) -> None:
    group = make(steps, rank, 4)
    began: dict[int, float] = {}
    group.subscribe(lambda epoch: began.setdefault(epoch.number, time.monotonic()))
    steps.meet("subscribed", rank, 4)
    if rank == dying:
        (steps.directory / "died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    with workers.Stalls() as stalls:
        epoch = epoch_after(group, 1)
        eventually(lambda: 2 in began, "the callback")
        took = began[2] - float((steps.directory / "died").read_text())
        assert took < LIMIT / 2 + stalls.seconds(), f"{took:.3f} s"
    assert dying not in [one.rank for one in epoch.members]
    assert epoch.decider.rank == (1 if dying == 0 else 0)
    assert not group.is_current(1)
    steps.done(f"over {rank}")
    steps.wait_for(*(f"over {other}" for other in range(4) if other != dying))
    rpc.shutdown(graceful=False)


def test_the_last_two_of_four_go_on_one_by_one(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(3, die_in_turn, Steps(tmp_path), shutdown=False, exit_codes={0: KILLED, 1: KILLED})


def die_in_turn(rank: int, steps: Steps) -> None:
    group = make(steps, rank, 3)
    for dying in (0, 1):
        if rank == dying:
            os.kill(os.getpid(), signal.SIGKILL)
        epoch = epoch_after(group, 1 + dying)
        assert epoch.decider.rank == dying + 1
        # The next member dies when all living members have seen this epoch.
        steps.done(f"{rank} in {epoch.number}")
        steps.wait_for(*(f"{other} in {epoch.number}" for other in range(dying + 1, 3)))
    rpc.shutdown(graceful=False)


@pytest.mark.parametrize("hung", [0, 2])
def test_a_stopped_worker_is_out_and_joins_again(run_on_ucx: RunWorkers, tmp_path: Path, hung: int) -> None:
    run_on_ucx(3, be_stopped, Steps(tmp_path), hung)


def be_stopped(rank: int, steps: Steps, hung: int) -> None:
    group = make(steps, rank, 3)
    (steps.directory / f"pid {rank}").write_text(str(os.getpid()))
    steps.meet("known", rank, 3)
    helper = 1
    if rank == helper:
        pid = int((steps.directory / f"pid {hung}").read_text())
        began = time.monotonic()
        workers.stop(pid)
        epoch = epoch_after(group, 1)
        assert hung not in [one.rank for one in epoch.members]
        assert time.monotonic() - began > 0.4 * LIMIT
        os.kill(pid, signal.SIGCONT)
        come_back = epoch_after(group, epoch.number)
        assert (hung, 1) in [(one.rank, one.joined) for one in come_back.members]
    elif rank == hung:
        eventually(lambda: group.is_left_out, "it is out", timeout=60)
        assert "is not a member of group 'test' any more" in group.why_not_current()
        group.rejoin()
        assert epoch_after(group, 1).number >= 3
    eventually(lambda: (hung, 1) in [(one.rank, one.joined) for one in present(group)], "it is back")
    steps.meet("back", rank, 3)


def test_a_worker_that_holds_the_gil_is_out_and_joins_again(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(3, hold_the_gil, Steps(tmp_path))


def hold_the_gil(rank: int, steps: Steps) -> None:
    import ctypes

    group = make(steps, rank, 3)
    if rank == 1:
        ctypes.PyDLL(None).usleep(int(3 * LIMIT * 1e6))
        eventually(lambda: group.is_left_out, "it is out", timeout=60)
        group.rejoin()
    eventually(lambda: [one.joined for one in present(group)] == [0, 1, 0], "it is back", timeout=60)
    steps.meet("back", rank, 3)


def test_a_worker_that_left_is_not_a_member(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, leave, Steps(tmp_path))


def leave(rank: int, steps: Steps) -> None:
    group = make(steps, rank, 3)
    if rank == 0:
        group.leave()
        assert not group.is_current()
        assert "it has left" in group.why_not_current()
    else:
        epoch = epoch_after(group, 1)
        assert [one.rank for one in epoch.members] == [1, 2]
        assert epoch.decider.rank == 1
    steps.meet("left", rank, 3)


def test_a_suspected_member_is_left_out(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(4, suspect, Steps(tmp_path))


def suspect(rank: int, steps: Steps) -> None:
    group = make(steps, rank, 4)
    if rank == 1:
        group.suspect("worker3")
    if rank != 3:
        assert [one.rank for one in epoch_after(group, 1).members] == [0, 1, 2]
    steps.meet("out", rank, 4)
    if rank == 2:
        group.suspect("worker0")
    if rank < 2:
        assert [one.rank for one in epoch_after(group, 2).members] == [0, 1]
    steps.meet("over", rank, 4)


def test_workers_that_come_at_once_make_one_group(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(4, come_at_once, Steps(tmp_path), init=False)


def come_at_once(rank: int, steps: Steps) -> None:
    url = (steps.directory / "store").as_uri()
    init_rpc(rank, world_size=None, rpc_backend_options=backend_options(init_method=url))
    steps.meet("there", rank, 4)
    make(steps, rank, 4)
    steps.meet("over", rank, 4)
    rpc.shutdown()


def test_a_killed_worker_of_another_host_is_certainly_dead(hosts: VirtualHosts, tmp_path: Path) -> None:
    options = {"expendable": {0}, "shutdown": False, "silent": False, "timeout": PATIENCE_S}
    workers.run_workers(2, lose_the_decider_of_another_host, Steps(tmp_path), hosts=hosts, **options)


def lose_the_decider_of_another_host(rank: int, steps: Steps) -> None:
    group = make(steps, rank, 2)
    time.sleep(LIMIT / 4)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with workers.Stalls() as stalls:
        assert [one.rank for one in epoch_after(group, 1).members] == [1]
        assert time.monotonic() - began < LIMIT + stalls.seconds()
    rpc.shutdown(graceful=False)


@pytest.mark.parametrize(("of", "cut"), [(2, "b"), (2, "a"), (3, "c"), (3, "a"), (5, "b")])
def test_one_side_of_a_cut_goes_on(hosts: VirtualHosts, fate: Fate, tmp_path: Path, of: int, cut: str) -> None:
    # Workers 0 and 3 are on a, 1 and 4 on b, 2 on c.
    arguments = {"shutdown": False, "silent": False, "timeout": PATIENCE_S}
    workers.run_workers(of, be_cut_off, Steps(tmp_path), fate, cut, hosts=hosts, **arguments)


def be_cut_off(rank: int, steps: Steps, fate: Fate, cut: str) -> None:
    of = len(rpc.api._get_current_rpc_agent().get_worker_infos())
    group = make(steps, rank, of)
    sides = {host: [other for other in range(of) if "abc"[other % 3] == host] for host in "abc"}
    away = sides[cut]
    staying = [other for other in range(of) if other not in away]
    # On a tie the decider's side goes on.
    wins = away if 2 * len(away) > of or (2 * len(away) == of and 0 in away) else staying
    progress: list[tuple[float, int]] = []
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            number = group.epoch.number
            if group.is_current(number):
                at = time.monotonic()
                # The thread may have been preempted since.
                if group.is_current(number):
                    progress.append((at, number))
            time.sleep(0.005)

    worker = threading.Thread(target=work)
    worker.start()
    if rank == staying[0]:
        fate.of(cut, "cut")
        steps.done("cut")
    steps.wait_for("cut")
    if rank in wins:
        # Members may fall silent one by one.
        eventually(lambda: [one.rank for one in present(group)] == wins, "the others are out", timeout=60)
        steps.done(f"goes on {rank}")
    else:
        eventually(lambda: not group.is_current(), "it is cut off", timeout=60)
        why = f"worker 'worker{rank}' is (cut off from 'worker|not a member)"
        eventually(lambda: re.match(why, group.why_not_current()), "it says why")
    steps.wait_for(*(f"goes on {other}" for other in wins), timeout=90)
    if rank == staying[0]:
        fate.of(cut, "heal")
        steps.done("healed")
    steps.wait_for("healed", timeout=90)
    if rank not in wins:
        eventually(lambda: group.is_left_out, "it is out", timeout=60)
        group.rejoin()
    eventually(lambda: len(present(group)) == of, "all are back", timeout=60)
    over.set()
    worker.join()
    (steps.directory / f"progress {rank}").write_text("\n".join(f"{at} {number}" for at, number in progress))
    steps.meet("over", rank, of)
    # All these hosts share one clock.
    seen = [line.split() for other in range(of) for line in (steps.directory / f"progress {other}").open()]
    numbers = [int(number) for _, number in sorted((float(at), number) for at, number in seen)]
    assert numbers == sorted(numbers), "two epochs were in force at one moment"
    assert numbers[0] == 1
    rpc.shutdown(graceful=False)


def test_a_member_learns_of_a_death_that_its_agent_missed(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(3, outlive_a_stranger, Steps(tmp_path), init=False, exit_codes={0: KILLED, 2: KILLED}, silent=False)


def outlive_a_stranger(rank: int, steps: Steps) -> None:
    send, on_gone = Group._call, members._Groups._on_gone
    # Only worker0 tells worker1 of worker2.
    if rank == 2:
        send_to_worker0 = lambda group, to, messages: to.name == "worker1" or send(group, to, messages)  # noqa: E731
        mock.patch.object(Group, "_call", send_to_worker0).start()
    if rank == 1:
        forget = lambda known, gone: gone.name == "worker2" or on_gone(known, gone)  # noqa: E731
        mock.patch.object(members._Groups, "_on_gone", forget).start()
    # The workers come one after the other, so worker0 decides.
    if rank:
        steps.wait_for(f"{rank} are members")
    url = (steps.directory / "store").as_uri()
    init_rpc(rank, world_size=None, rpc_backend_options=backend_options(init_method=url))
    group = members.group("test", LIMIT)
    eventually(lambda: len(present(group)) == rank + 1, f"{rank + 1} are members")
    steps.done(f"{rank + 1} are members")
    eventually(lambda: len(present(group)) == 3, "all are members")
    (steps.directory / f"pid {rank}").write_text(str(os.getpid()))
    steps.meet("in", rank, 3)
    if rank == 1:
        for other in (2, 0):
            os.kill(int((steps.directory / f"pid {other}").read_text()), signal.SIGKILL)
        eventually(lambda: names(group) == ["worker1"], "the survivor goes on", PATIENCE_S)
    else:
        time.sleep(PATIENCE_S)
    rpc.shutdown(graceful=False)
