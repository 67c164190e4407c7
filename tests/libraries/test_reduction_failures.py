"""Averages of gradients while trainers and hosts are slow, hang, are cut off, leave, join or die."""

from __future__ import annotations

import collections
import ctypes
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import workers
from tests.support.labs import Fate, VirtualHosts, needs_virtual_hosts
from tests.support.workers import Steps, eventually, stopped
from torch_ucx_rpc import reduction
from torch_ucx_rpc._workers import members
from torch_ucx_rpc.channel import Channel
from torch_ucx_rpc.reduction._office import office

from ._jobs import KILLED, die
from ._training import SGD, are_equal, batches, enter, make_model, parameters_of, process_group, step_of, train

RunWorkers = Callable[..., list]


# ------------------------------------------------------------------------------------------------- trainers that die


@pytest.mark.parametrize("way", ["hook", "DataParallel"])
def test_a_killed_trainer_costs_the_others_no_step(run_on_ucx: RunWorkers, tmp_path: Path, way: str) -> None:
    run_on_ucx(4, lose_a_trainer, Steps(tmp_path), way, shutdown=False, exit_codes={2: KILLED, 1: 0, 3: 0})


def lose_a_trainer(rank: int, steps: Steps, way: str) -> None:
    if rank == 0:
        steps.wait_for("over 1", "over 3", timeout=80)
        rpc.shutdown(graceful=False)
        return
    server = reduction.serve("worker0")
    model = make_model()
    if way == "hook":
        dist.init_process_group("gloo", init_method=(steps.directory / "group").as_uri(), rank=rank - 1, world_size=3)
        copy: nn.Module = DistributedDataParallel(model)
        copy.register_comm_hook(reduction.state(server), reduction.hook)
    else:
        copy = reduction.DataParallel(model, server)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(copy, optimizer, rank, 5)
    assert server.contributors == reduction.Contributors(("worker1", "worker2", "worker3"), rank - 1, 3)
    if rank == 2:
        # worker2 dies in the middle of a step, after the others have put their gradients.
        threading.Timer(0.2, die).start()
        steps.wait_for("never")
    assert len(train(copy, optimizer, rank, 20)) == 20
    assert server.contributors == reduction.Contributors(("worker1", "worker3"), 0 if rank == 1 else 1, 2)
    torch.save(parameters_of(model), steps.directory / f"{rank}.pt")
    steps.done(f"over {rank}")
    steps.wait_for("over 1", "over 3")
    assert are_equal(torch.load(steps.directory / "1.pt"), torch.load(steps.directory / "3.pt"))
    # End at once: gloo's process group would wait for the dead worker.
    os._exit(0)


def test_a_member_makes_an_office_when_it_decides(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(2, found_without_an_office, Steps(tmp_path), (tmp_path / "store").as_uri(), init=False)


def found_without_an_office(rank: int, steps: Steps, url: str) -> None:
    enter(url, rank)
    if rank == 0:
        # Another worker's message would also make the group. Here this worker founds it.
        group = members.group("reduction")
        eventually(group.is_current, "it is a member")
        steps.done("founded")
    else:
        steps.wait_for("founded")
        own = office()
        eventually(lambda: own.epoch is not None and len(own.epoch.members) == 2, "two members")
        eventually(lambda: rpc.rpc_sync("worker0", has_office), "an office of the decider")
    steps.meet("over", rank, 2)


def has_office() -> bool:
    return office.is_made()


# ------------------------------------------------------------------------------------------ trainers that come and go


def test_a_trainer_that_waits_in_shutdown_has_left(run_on_ucx: RunWorkers) -> None:
    run_on_ucx(3, train_for_different_times)


def train_for_different_times(rank: int) -> None:
    # worker0 serves in rpc.shutdown() from the start, as in every tutorial.
    if rank:
        model = make_model()
        copy = reduction.DataParallel(model, reduction.serve("worker0"))
        assert len(train(copy, torch.optim.SGD(model.parameters(), lr=0.05), rank, 5 * rank)) == 5 * rank


def test_a_trainer_leaves_at_the_end_of_its_with_block(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, leave_with_a_block, Steps(tmp_path))


def leave_with_a_block(rank: int, steps: Steps) -> None:
    if rank:
        with reduction.serve("worker0") as server:
            for _ in range(3 * rank):
                mean = reduction.push_pull(server, torch.full((2,), float(rank)))
        assert mean[0] == (1.5 if rank == 1 else 2)
        with pytest.raises(RuntimeError, match="this trainer has left"):
            reduction.push_pull(server, torch.ones(2))
        with reduction.serve("worker0", trainers=[f"worker{rank}"], name=f"of {rank}") as other:
            assert reduction.push_pull(other, torch.ones(2)).sum() == 2
    steps.meet("done", rank, 3)


def test_newcomer_without_a_lease_waits_for_its_donor(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(3, join_without_a_lease, Steps(tmp_path), options={"rpc_timeout": 10})


def join_without_a_lease(rank: int, steps: Steps) -> None:
    if rank:
        server = reduction.serve("worker0", trainers=1)
    if rank == 1:
        model = make_model()
        copy = reduction.DataParallel(model, server)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(copy, optimizer, rank, 1)
        steps.done("alone")
        eventually(lambda: copy._steps._requests, "another asks for the model")
        steps.done("asked")
        # A trainer sends its state when it begins a step.
        steps.wait_for("leased again")
        train(copy, optimizer, rank, 1)
    elif rank == 2:
        steps.wait_for("alone")
        group = server.office.group

        def lose_the_lease() -> None:
            steps.wait_for("asked")
            is_current, group.is_current = group.is_current, lambda: False
            time.sleep(0.5)
            group.is_current = is_current
            steps.done("leased again")

        threading.Thread(target=lose_the_lease).start()
        model = make_model()
        copy = reduction.DataParallel(model, server)
        train(copy, torch.optim.SGD(model.parameters(), lr=0.05), rank, 1)
    steps.meet("done", rank, 3)


def test_a_new_trainer_takes_the_name_of_a_killed_one(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    first, _, third, again = run_on_ucx(4, restart_a_trainer, Steps(tmp_path), url, init=False, exit_codes={1: KILLED})
    assert are_equal(first, third)
    assert are_equal(first, again)


def restart_a_trainer(process: int, steps: Steps, url: str) -> list[torch.Tensor]:
    if process == 3:
        steps.wait_for("gone 0", "gone 2")
    rank = 1 if process == 3 else process
    enter(url, rank)
    server = reduction.serve(trainers=3)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    copy = reduction.DataParallel(model, server, optimizer=optimizer, bucket_bytes=1 << 10)
    if process == 3:
        assert step_of(server) >= 10
        (steps.directory / "last").write_text(str(step_of(server) + 20))
        steps.done("named")
    else:
        train(copy, optimizer, process, 10)
        if process == 1:
            die()
        train(copy, optimizer, process, 10)
        steps.done(f"gone {process}")
    last = None
    while last is None or step_of(server) < last:
        train(copy, optimizer, process, 1)
        if last is None and steps.is_done("named"):
            last = int((steps.directory / "last").read_text())
    trained = parameters_of(model)
    steps.done(f"over {process}")
    steps.wait_for("over 0", "over 2", "over 3")
    rpc.shutdown()
    return trained


def test_a_trainer_continues_after_a_failed_backward(run_on_both: RunWorkers, tmp_path: Path) -> None:
    first, second, _ = run_on_both(3, fail_in_backward, Steps(tmp_path))
    assert are_equal(first, second)


def fail_in_backward(rank: int, steps: Steps) -> list[torch.Tensor]:
    model = make_model(160)
    if rank < 2:
        copy = reduction.DataParallel(model, reduction.serve("worker2"), bucket_bytes=1 << 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(copy, optimizer, rank, 1)
        if rank == 0:
            failing = next(model.parameters()).register_hook(fail_by_design)
            with pytest.raises(RuntimeError, match="by design"):
                train(copy, optimizer, rank, 1)
            failing.remove()
        train(copy, optimizer, rank, 3)
    steps.meet("done", rank, 3)
    return parameters_of(model)


def fail_by_design(_: torch.Tensor) -> None:
    raise RuntimeError("by design")


# ----------------------------------------------------------------------------------------------------------- quorum


@pytest.mark.parametrize("way", ["hook", "DataParallel"])
def test_with_a_quorum_a_slow_trainer_takes_the_state_of_another(
    run_on_both: RunWorkers, tmp_path: Path, way: str
) -> None:
    first, second, late = run_on_both(3, train_with_a_slow_one, Steps(tmp_path), way)
    [(step, parameters)] = late.items()
    assert step >= 5
    assert any(step in other and are_equal(other[step], parameters) for other in (first, second))


def train_with_a_slow_one(rank: int, steps: Steps, way: str) -> dict[int, list[torch.Tensor]]:
    with process_group(rank, 3, steps.directory):
        server = reduction.serve()
        model = make_model(160)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if way == "hook":
            copy: nn.Module = DistributedDataParallel(model, bucket_cap_mb=0.07)
            made = reduction.state(server, quorum=2, model=model, optimizer=optimizer)
            copy.register_comm_hook(made, reduction.hook)
        else:
            copy = reduction.DataParallel(model, server, quorum=2, optimizer=optimizer, bucket_bytes=1 << 16)
        # The parameters at the beginning of each step.
        begun = {}
        if way == "hook":
            # DDP builds its buckets in these steps.
            train(copy, optimizer, rank, 2)
        steps.meet("begun", rank, 3)
        if rank == 2:
            # This trainer hangs for longer than the step that the others do without it.
            [x] = batches(rank, 1)
            optimizer.zero_grad()
            loss = F.mse_loss(copy(x), x.sum(1, keepdim=True))
            steps.wait_for("far 0", "far 1")
            loss.backward()
            optimizer.step()
            assert server.contributors == reduction.Contributors(("worker0", "worker1"), None, 2)
            begun[max(server.positions.values())] = parameters_of(model)
            server.leave()
            steps.done("caught up")
        else:
            turns = 0
            while not steps.is_done("caught up"):
                train(copy, optimizer, rank, 1)
                begun[max(server.positions.values())] = parameters_of(model)
                if (turns := turns + 1) == 5:
                    steps.done(f"far {rank}")
            server.leave()
        steps.meet("trained", rank, 3)
        return begun


def test_a_late_push_by_hand_is_an_error(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, push_with_quorum, Steps(tmp_path))


def push_with_quorum(rank: int, steps: Steps) -> None:
    if rank:
        server = reduction.serve("worker0", trainers=2)
        push = functools.partial(reduction.push_pull, server, quorum=1)
        if rank == 2:
            steps.wait_for("pushed")
        # The second trainer joins later, and has not missed a step.
        assert torch.equal(push(torch.full((4,), float(rank))), torch.full((4,), float(rank)))
        assert server.contributors == reduction.Contributors((f"worker{rank}",), 0, 1)
        steps.done("pushed" if rank == 1 else "pushed alone")
        if rank == 1:
            steps.wait_for("pushed alone")
            with pytest.raises(RuntimeError, match=r"'worker1' is behind: the others have closed step 1 of"):
                push(torch.ones(4))
            assert torch.equal(push(torch.ones(4)), torch.ones(4))
    steps.meet("done", rank, 3)


# ---------------------------------------------------------------------------------------------------- hosts that die


@pytest.mark.parametrize("is_on_trainers", [False, True], ids=["servers", "trainers"])
def test_steps_go_on_when_a_host_of_gradients_is_killed(
    run_on_ucx: RunWorkers, tmp_path: Path, is_on_trainers: bool
) -> None:
    size = 3 if is_on_trainers else 4
    results = run_on_ucx(size, lose_a_host, Steps(tmp_path), is_on_trainers, shutdown=False, exit_codes={0: KILLED})
    assert are_equal(results[-1], results[-2])


def lose_a_host(rank: int, steps: Steps, is_on_trainers: bool) -> list[torch.Tensor] | None:
    result = None
    if rank == 0 and not is_on_trainers:
        steps.wait_for("five 2", "five 3")
        time.sleep(0.02)  # at any moment of a step
        die()
    if rank > 1 or is_on_trainers:
        server = reduction.serve(*(() if is_on_trainers else ("worker0", "worker1")))
        model = make_model(160)
        copy = reduction.DataParallel(model, server, bucket_bytes=1 << 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(copy, optimizer, rank, 5)
        steps.done(f"five {rank}")
        if rank == 0:
            threading.Timer(0.02, die).start()
        losses = train(copy, optimizer, rank, 60 if rank else 10_000)
        assert len(losses) == 60
        result = parameters_of(model)
        steps.done(f"over {rank}")
    steps.wait_for(*(f"over {peer}" for peer in ((1, 2) if is_on_trainers else (2, 3))))
    rpc.shutdown(graceful=False)
    return result


def test_models_stay_equal_if_a_host_dies_between_two_answers(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    # When the host dies, only worker2 has the means of the step, and it holds the GIL.
    results = run_on_ucx(5, answer_one_and_die, Steps(tmp_path), shutdown=False, exit_codes={0: KILLED})
    assert are_equal(results[2], results[3])
    assert are_equal(results[2], results[4])


BROKEN_STEP = 5


def answer_one_and_die(rank: int, steps: Steps) -> list[torch.Tensor] | None:
    if rank == 0:
        put = Channel.put
        means = collections.Counter[str]()

        def put_one(channel: Channel, to: str, tag: str, *args: Any, **options: Any) -> Any:
            means[to] += tag.startswith("mean")
            if means[to] <= BROKEN_STEP:
                return put(channel, to, tag, *args, **options)
            if to == "worker2":
                put(channel, to, tag, *args, **options).wait()
                time.sleep(0.15)
                die()
            return None

        Channel.put = put_one  # type: ignore[method-assign]
    if rank < 2:
        steps.wait_for("over 2", "over 3", "over 4")
        rpc.shutdown(graceful=False)
        return None
    server = reduction.serve("worker0", "worker1", trainers=3)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    copy = reduction.DataParallel(model, server, quorum=3, optimizer=optimizer)
    train(copy, optimizer, rank, BROKEN_STEP)
    if rank == 2:
        threading.Timer(0.1, lambda: ctypes.PyDLL(None).usleep(2_000_000)).start()
    train(copy, optimizer, rank, 15)
    steps.done(f"over {rank}")
    steps.wait_for("over 2", "over 3", "over 4")
    rpc.shutdown(graceful=False)
    return parameters_of(model)


def test_a_stopped_trainer_is_left_out_and_comes_back(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    results = run_on_ucx(3, stop_a_trainer, Steps(tmp_path), shutdown=False)
    assert are_equal(results[1], results[2])


def stop_a_trainer(rank: int, steps: Steps) -> list[torch.Tensor] | None:
    if rank == 0:
        steps.wait_for("pid")
        pid = int((steps.directory / "number").read_text())
        os.kill(pid, signal.SIGSTOP)
        steps.wait_for("alone")
        os.kill(pid, signal.SIGCONT)
        steps.wait_for("over 1", "over 2", timeout=90)
        rpc.shutdown(graceful=False)
        return None
    server = reduction.serve("worker0")
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    copy = reduction.DataParallel(model, server, optimizer=optimizer)
    train(copy, optimizer, rank, 5)
    if rank == 2:
        (steps.directory / "number").write_text(str(os.getpid()))
        steps.done("pid")
    else:
        while len(server.contributors.names) == 2:
            train(copy, optimizer, rank, 1)
        train(copy, optimizer, rank, 5)
        steps.done("alone")
    # Go on until both trainers are in the same step.
    while not steps.is_done("back"):
        train(copy, optimizer, rank, 1)
        if rank == 2 and steps.is_done("alone") and len(server.contributors.names) == 2:
            (steps.directory / "last").write_text(str(step_of(server) + 50))
            steps.done("back")
    last = int((steps.directory / "last").read_text())
    while step_of(server) < last:
        train(copy, optimizer, rank, 1)
    assert step_of(server) == last
    steps.done(f"over {rank}")
    steps.wait_for("over 1", "over 2")
    rpc.shutdown(graceful=False)
    return parameters_of(model)


def test_newcomers_wait_for_a_stopped_trainer_with_a_state(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(3, begin_beside_a_stopped_trainer, Steps(tmp_path), (tmp_path / "store").as_uri(), init=False)


def begin_beside_a_stopped_trainer(rank: int, steps: Steps, url: str) -> None:
    enter(url, rank)
    steps.meet("joined", rank, 3)
    server = reduction.serve("worker0", trainers=1)
    if rank == 0:
        steps.wait_for("pushed")
        with stopped(int((steps.directory / "pid").read_text())):
            eventually(lambda: is_out(server, "worker1"), "it is left out", timeout=30)
            steps.done("left out")
            # Newcomers could begin within milliseconds.
            time.sleep(1)
            assert not steps.is_done("pushed by the newcomer")
        steps.wait_for("over 1", "over 2", timeout=60)
    elif rank == 1:
        for _ in range(3):
            reduction.push_pull(server, torch.ones(2))
        (steps.directory / "pid").write_text(str(os.getpid()))
        steps.done("pushed")
        steps.wait_for("left out", timeout=60)
        while not steps.is_done("pushed by the newcomer"):
            reduction.push_pull(server, torch.ones(2))
    else:
        steps.wait_for("left out", timeout=60)
        reduction.push_pull(server, torch.ones(2))
        steps.done("pushed by the newcomer")
        assert max(server.positions.values()) > 3, "it has taken the state"
    if rank:
        server.leave()
        steps.done(f"over {rank}")
    steps.wait_for("over 1", "over 2", timeout=60)
    rpc.shutdown()


def is_out(server: reduction.Server, name: str) -> bool:
    epoch = server.office.epoch
    return epoch is not None and all(one.name != name for one in epoch.members)


# ----------------------------------------------------------------------------------------------------------------- cuts


@pytest.mark.ucx_only
def test_models_stay_equal_despite_one_broken_link(tmp_path: Path) -> None:
    needs_virtual_hosts()
    names = ["ps0", "ps1", "t0", "t1"]
    with VirtualHosts(names) as hosts:
        steps = Steps(tmp_path)
        of = {host.name: host for host in hosts}

        def break_the_link() -> None:
            steps.wait_for("ten 2", "ten 3", timeout=60)
            # The isolated ports of a bridge reach all other ports, but not each other.
            for name in ("ps0", "t0"):
                hosts.head._on_network(f"ip link set dev {of[name]._port} type bridge_slave isolated on")
            steps.done("broken")
            time.sleep(3 * 2.0)  # three times heartbeat_limit
            for name in ("ps0", "t0"):
                hosts.head._on_network(f"ip link set dev {of[name]._port} type bridge_slave isolated off")
            steps.done("healed")

        thread = threading.Thread(target=break_the_link)
        thread.start()
        try:
            options = {"heartbeat_limit": 2.0, "rpc_timeout": 40}
            results = workers.run_workers(
                4,
                train_over_a_broken_link,
                steps,
                hosts=hosts,
                options=options,
                timeout=120,
                silent=False,
                shutdown=False,
            )
        finally:
            thread.join()
    first, second = results[2:]
    common = first.keys() & second.keys()
    assert max(common) > 10
    assert not (differ := sorted(step for step in common if first[step] != second[step])), f"copies differ in {differ}"


@pytest.mark.ucx_only
def test_a_cut_of_the_only_host_costs_only_time(tmp_path: Path) -> None:
    needs_virtual_hosts()
    with VirtualHosts(["ps0", "t0", "t1"]) as hosts, Fate(hosts) as fate:
        options = {"heartbeat_limit": 2.0, "rpc_timeout": 40}
        workers.run_workers(3, push_over_a_cut, Steps(tmp_path), fate, hosts=hosts, options=options)


def push_over_a_cut(rank: int, steps: Steps, fate: Fate) -> None:
    if rank != 0:
        server = reduction.serve("worker0")
        reduction.push_pull(server, torch.ones(2))
        steps.meet("pushed", rank - 1, 2)
        if rank == 1:
            fate.of("ps0", "cut_for", 7)
            steps.done("cut")
        steps.wait_for("cut")
        # The trainers form a group without the host, and no host is left.
        assert reduction.push_pull(server, torch.full((2,), float(rank))).tolist() == [1.5, 1.5]
    steps.meet("over", rank, 3)


@pytest.mark.ucx_only
def test_a_cut_of_a_host_with_parameters_costs_only_time(tmp_path: Path) -> None:
    needs_virtual_hosts()
    with VirtualHosts(["ps0", "ps1", "t0", "t1"]) as hosts, Fate(hosts) as fate:
        options = {"heartbeat_limit": 2.0, "rpc_timeout": 40}
        workers.run_workers(4, update_over_a_cut, Steps(tmp_path), fate, hosts=hosts, options=options)


def update_over_a_cut(rank: int, steps: Steps, fate: Fate) -> None:
    if rank >= 2:
        server = reduction.serve("worker0", "worker1", parameters=[torch.zeros(3), torch.zeros(3)], optimizer=SGD)
        reduction.push_pull(server, [torch.ones(3), torch.ones(3)])
        steps.meet("pushed", rank - 2, 2)
        if rank == 2:
            fate.of("ps0", "cut_for", 7)
            steps.done("cut")
        steps.wait_for("cut")
        expected = [torch.full((3,), value).tolist() for value in (-0.2, -0.2)]
        assert [one.tolist() for one in reduction.push_pull(server, [torch.ones(3), torch.ones(3)])] == expected
    steps.meet("over", rank, 4)


def train_over_a_broken_link(rank: int, steps: Steps) -> dict[int, float]:
    if rank < 2:
        steps.wait_for("over 2", "over 3", timeout=110)
        return {}
    server = reduction.serve("worker0", "worker1", trainers=2)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    copy = reduction.DataParallel(model, server, optimizer=optimizer)
    sums: dict[int, float] = {}
    last = None
    while last is None or step_of(server) < last:
        train(copy, optimizer, rank, 1)
        if rank == 2 and steps.is_done("healed") and last is None and len(server.contributors.names) == 2:
            (steps.directory / "last").write_text(str(step_of(server) + 20))
            steps.done("named")
        if last is None and steps.is_done("named"):
            last = int((steps.directory / "last").read_text())
        sums[step_of(server)] = sum(p.double().sum().item() for p in parameters_of(model))
        if step_of(server) >= 10:
            steps.done(f"ten {rank}")
        time.sleep(0.02)
    server.leave()
    steps.done(f"over {rank}")
    steps.wait_for("over 2", "over 3", timeout=110)
    return sums
