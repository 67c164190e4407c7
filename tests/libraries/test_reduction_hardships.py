"""Averages of gradients where trainers and servers are slow, or die."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.workers import Steps, backend_options, eventually, init_rpc
from torch_ucx_rpc import reduction

from ._jobs import KILLED, Stalls, die
from ._training import SGD, are_equal, make_model, parameters_of, process_group, step_of, train

RunWorkers = Callable[..., list]


# ------------------------------------------------------------------------------------------------- trainers that die


@pytest.mark.parametrize("way", ["hook", "DataParallel"])
def test_the_others_lose_no_step_when_a_trainer_is_killed(run_on_ucx: RunWorkers, tmp_path: Path, way: str) -> None:
    results = run_on_ucx(4, lose_a_trainer, Steps(tmp_path), way, shutdown=False, exit_codes={2: KILLED, 1: 0, 3: 0})
    del results


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
    if rank == 2:
        # In the middle of a step, whose gradients the others have pushed.
        threading.Timer(0.2, die).start()
        steps.wait_for("never")
    losses = train(copy, optimizer, rank, 20)
    assert len(losses) == 20
    torch.save(parameters_of(model), steps.directory / f"{rank}.pt")
    steps.done(f"over {rank}")
    steps.wait_for("over 1", "over 3")
    assert are_equal(torch.load(steps.directory / "1.pt"), torch.load(steps.directory / "3.pt"))
    # gloo's process group waits for the dead one.
    os._exit(0)


# ----------------------------------------------------------------------------------------------------------- quorum


def test_with_a_quorum_nobody_waits_for_the_slow_who_catches_up(run_on_both: RunWorkers, tmp_path: Path) -> None:
    results = run_on_both(4, train_with_a_slow_one, Steps(tmp_path))
    # Of plain SGD, the sum of what it has missed is what it has missed.
    for other in results[1:]:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(results[0], other, strict=True))


def train_with_a_slow_one(rank: int, steps: Steps) -> list[torch.Tensor]:
    server = reduction.serve()
    model = make_model()
    copy = reduction.DataParallel(model, server, quorum=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if rank == 3:
        # It comes to its second step when the others have done all of theirs.
        train(copy, optimizer, rank, 1)
        steps.done("first")
        steps.wait_for("trained 0", "trained 1", "trained 2")
        train(copy, optimizer, rank, 1)
    else:
        train(copy, optimizer, rank, 1)
        steps.wait_for("first")
        train(copy, optimizer, rank, 11)
    steps.meet("trained", rank, 4)
    return parameters_of(model)


def test_with_a_quorum_the_slow_one_catches_up_in_ddp_too(run_on_both: RunWorkers, tmp_path: Path) -> None:
    results = run_on_both(3, train_with_a_slow_one_in_ddp, Steps(tmp_path))
    for other in results[1:]:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(results[0], other, strict=True))


def train_with_a_slow_one_in_ddp(rank: int, steps: Steps) -> list[torch.Tensor]:
    with process_group(rank, 3, steps.directory):
        server = reduction.serve()
        # Of other buckets from the second step on.
        model = make_model(600)
        copy = DistributedDataParallel(model, bucket_cap_mb=0.2)
        copy.register_comm_hook(reduction.state(server, quorum=2), reduction.hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
        train(copy, optimizer, rank, 1)
        if rank == 2:
            optimizer.zero_grad()
            loss = copy(torch.ones(4, 8)).sum()
            steps.wait_for("trained 0", "trained 1")
            loss.backward()
            optimizer.step()
            # Its second step gets what it has missed of the first buckets, and its third what it has missed of those
            # of all later steps.
            train(copy, optimizer, rank, 1)
        else:
            train(copy, optimizer, rank, 11)
        steps.meet("trained", rank, 3)
        return parameters_of(model)


def test_two_late_trainers_do_not_wait_for_each_other(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, catch_up_two_at_once, Steps(tmp_path))


def catch_up_two_at_once(rank: int, steps: Steps) -> None:
    server = reduction.serve()
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    copy = reduction.DataParallel(model, server, quorum=1, optimizer=optimizer)
    train(copy, optimizer, rank, 1)
    steps.meet("first", rank, 3)
    if rank == 2:
        train(copy, optimizer, rank, 12)
        steps.done("far")
        while not (steps.is_done("caught up 0") and steps.is_done("caught up 1")):
            train(copy, optimizer, rank, 1)
    else:
        steps.wait_for("far")
        train(copy, optimizer, rank, 1)
        assert copy._copy.is_behind
        steps.done(f"behind {rank}")
        steps.wait_for("behind 0", "behind 1")
        take_over = copy._copy._take_over

        def take_over_together() -> bool:
            # As in the search for a host, which tells the models which one it is; and none asks before both have.
            copy._copy.on_other_host("worker0")
            steps.done(f"asks {rank}")
            steps.wait_for("asks 0", "asks 1")
            return take_over()

        copy._copy._take_over = take_over_together  # type: ignore[method-assign]
        with Stalls() as stalls:
            began = time.monotonic()
            train(copy, optimizer, rank, 1)
            assert time.monotonic() - began < 10 + stalls.seconds()
        server.leave()
        steps.done(f"caught up {rank}")
    steps.meet("done", rank, 3)


def test_trainer_waiting_for_the_last_ones_state_blocks_no_step(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, catch_up_with_the_last_one, Steps(tmp_path))


def catch_up_with_the_last_one(rank: int, steps: Steps) -> None:
    server = reduction.serve("worker0", trainers=3)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    copy = reduction.DataParallel(model, server, optimizer=optimizer)
    train(copy, optimizer, rank, 1)
    copy._quorum = 2  # in the first step nobody is late
    if rank == 2:
        steps.wait_for("far 0", "far 1")
        train(copy, optimizer, rank, 1)
        assert copy._copy.is_behind
        steps.done("behind")
        steps.wait_for("in step")
        with Stalls() as stalls:
            began = time.monotonic()
            train(copy, optimizer, rank, 3)
            assert time.monotonic() - began < 10 + stalls.seconds()
        server.leave()
        steps.done("caught up")
    else:
        train(copy, optimizer, rank, 4)
        steps.done(f"far {rank}")
        steps.wait_for("behind")
        if rank == 1:
            server.leave()
            steps.done("left")
        else:
            steps.wait_for("left")
            # Two are no more than the quorum, and one of them waits for this one, which is in a step.
            loss = copy(torch.ones(4, 8)).sum()
            steps.done("in step")
            loss.backward()
            while not steps.is_done("caught up"):
                train(copy, optimizer, rank, 1)
    steps.meet("done", rank, 3)


def test_late_trainer_with_an_optimizer_gets_anothers_state(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(4, catch_up_with_adam, Steps(tmp_path))


def catch_up_with_adam(rank: int, steps: Steps) -> None:
    server = reduction.serve()
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    copy = reduction.DataParallel(model, server, quorum=3, optimizer=optimizer)
    # By step, the parameters and the first moment that it begins with.
    begun: dict[int, list[torch.Tensor]] = {}

    def note(*_: object) -> None:
        moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
        begun[step_of(server)] = parameters_of(model) + moments

    model.register_forward_pre_hook(note)
    train(copy, optimizer, rank, 1)
    if rank == 3:
        steps.wait_for("trained 0", "trained 1", "trained 2", timeout=120)
        if not copy._copy.is_behind:  # the others may have done their first step without it, too
            train(copy, optimizer, rank, 1)
        assert copy._copy.is_behind
        train(copy, optimizer, rank, 1)  # begins with the state of another
        # The others see that at different steps. Two of them are no quorum: they would wait for this one.
        server.leave()
        steps.done("caught up")
    else:
        train(copy, optimizer, rank, 12)
        steps.done(f"trained {rank}")
        while not steps.is_done("caught up"):
            train(copy, optimizer, rank, 1)
            for old in list(begun)[:-500]:
                del begun[old]
        server.leave()
    torch.save(begun, steps.directory / f"{rank}.pt")
    steps.meet("saved", rank, 4)
    # Steps of the others overlap: the last one of worker3 is one of theirs.
    last = max(begun) if rank == 3 else None
    if last is not None:
        others = [torch.load(steps.directory / f"{other}.pt") for other in range(3)]
        assert any(last in other and are_equal(begun[last], other[last]) for other in others)
    steps.meet("done", rank, 4)


def test_the_divisor_is_how_many_came(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, push_with_quorum, Steps(tmp_path))


def push_with_quorum(rank: int, steps: Steps) -> None:
    server = reduction.serve()
    ones = torch.ones(4)
    if rank == 2:
        steps.wait_for("pushed 0", "pushed 1")
        # Late for two steps: it gets both, and what it pushed is dropped.
        assert torch.equal(reduction.push_pull(server, 100 * ones, quorum=2), (1.5 + 3) * ones)
    else:
        assert torch.equal(reduction.push_pull(server, (rank + 1) * ones, quorum=2), 1.5 * ones)
        assert torch.equal(reduction.push_pull(server, 2 * (rank + 1) * ones, quorum=2), 3 * ones)
        steps.done(f"pushed {rank}")
    steps.meet("again", rank, 3)
    # Then all are together again.
    assert torch.equal(reduction.push_pull(server, (rank + 1) * ones), 2 * ones)
    steps.meet("done", rank, 3)


def test_expected_trainer_after_the_first_steps_is_late_not_new(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, come_after_the_first_steps, Steps(tmp_path))


def come_after_the_first_steps(rank: int, steps: Steps) -> None:
    ones = torch.ones(4)
    if rank == 2:
        steps.wait_for("pushed")
        server = reduction.serve("worker0")
        # It is one of the two that the group has from the start: it gets the steps that the other has done alone.
        assert torch.equal(reduction.push_pull(server, 100 * ones, quorum=1), (1 + 2) * ones)
    elif rank == 1:
        server = reduction.serve("worker0")
        assert torch.equal(reduction.push_pull(server, ones, quorum=1), ones)
        assert torch.equal(reduction.push_pull(server, 2 * ones, quorum=1), 2 * ones)
        steps.done("pushed")
    steps.meet("caught up", rank, 3)
    if rank:
        assert torch.equal(reduction.push_pull(server, rank * ones), 1.5 * ones)
    steps.meet("done", rank, 3)


# -------------------------------------------------------------------------------------------------- servers that die


@pytest.mark.parametrize("is_on_trainers", [False, True], ids=["servers", "trainers"])
def test_steps_go_on_when_a_host_of_gradients_is_killed(
    run_on_ucx: RunWorkers, tmp_path: Path, is_on_trainers: bool
) -> None:
    workers = 3 if is_on_trainers else 4
    dies = 0
    results = run_on_ucx(
        workers,
        lose_a_host,
        Steps(tmp_path),
        is_on_trainers,
        shutdown=False,
        exit_codes={dies: KILLED},
    )
    assert are_equal(results[-1], results[-2])


def lose_a_host(rank: int, steps: Steps, is_on_trainers: bool) -> list[torch.Tensor] | None:
    result = None
    trains = rank > (0 if is_on_trainers else 1)
    if rank == 0 and not is_on_trainers:
        steps.wait_for("five 2", "five 3")
        time.sleep(0.02)  # somewhere in a step
        die()
    if trains or is_on_trainers:
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


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_replica_continues_with_all_updates_of_a_killed_host(
    run_on_ucx: RunWorkers, tmp_path: Path, asynchronous: bool
) -> None:
    run_on_ucx(
        4, lose_a_host_with_a_replica, Steps(tmp_path), asynchronous, shutdown=False, exit_codes={0: KILLED}, timeout=90
    )


UPDATES = 60


def lose_a_host_with_a_replica(rank: int, steps: Steps, asynchronous: bool) -> None:
    if rank == 0:
        steps.wait_for("ten 2", "ten 3")
        die()
    if rank > 1:
        server = reduction.serve(
            "worker0",
            "worker1",
            trainers=2,
            parameters=[torch.zeros(3), torch.zeros(4)],
            optimizer=SGD,
            asynchronous=asynchronous,
            replica=True,
        )
        for turn in range(UPDATES):
            parameters = reduction.push_pull(server, [torch.ones(3), torch.ones(4)])
            if turn == 10:
                steps.done(f"ten {rank}")
        steps.done(f"pushed {rank}")
        steps.wait_for("pushed 2", "pushed 3")
        # No update is lost, none is applied twice.
        if asynchronous:
            parameters = reduction.push_pull(server, [torch.zeros(3), torch.zeros(4)])
        expected = -0.1 * UPDATES * (2 if asynchronous else 1)
        for parameter in parameters:
            assert torch.allclose(parameter, torch.full_like(parameter, expected)), (parameter, expected)
        steps.done(f"over {rank}")
    steps.wait_for("over 2", "over 3")
    rpc.shutdown(graceful=False)


def test_restarted_server_continues_from_its_checkpoint(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    run_on_ucx(3, restart_the_server, Steps(tmp_path), url, init=False, exit_codes={0: KILLED})


def restart_the_server(rank: int, steps: Steps, url: str) -> None:

    def enter(as_rank: int) -> None:
        init_rpc(
            as_rank,
            name=f"worker{as_rank}",
            world_size=None,
            rpc_backend_options=backend_options(init_method=url),
        )

    if rank == 1:
        steps.wait_for("server")
        enter(1)
        server = reduction.serve(
            "worker0",
            parameters=[torch.zeros(3)],
            optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            checkpoint=str(steps.directory / "checkpoints"),
            checkpoint_every=5,
        )
        for _ in range(12):
            (parameter,) = reduction.push_pull(server, [torch.ones(3)])
        rpc.rpc_async("worker0", die)
        # A push before that may still be applied: the eleventh update of this test would be the thirteenth.
        steps.wait_for("dead")
        (parameter,) = reduction.push_pull(server, [torch.ones(3)])
        # Ten updates were saved; this is the eleventh, with the momentum of the ten.
        expected = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([expected], lr=0.1, momentum=0.9)
        for _ in range(11):
            expected.grad = torch.ones(3)
            optimizer.step()
        assert torch.equal(parameter, expected.detach())
        steps.done("over")
        rpc.shutdown()
        return
    if rank == 2:
        # The second life of the server.
        eventually(lambda: steps.is_done("dead"), "the first one is dead", timeout=60)
    enter(0)
    if rank == 0:
        steps.done("server")
        watcher = f"while kill -0 {os.getpid()} 2>/dev/null; do sleep 0.05; done; touch {steps.directory / 'dead'}"
        os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", watcher)
        steps.wait_for("never", timeout=60)
    steps.wait_for("over")
    rpc.shutdown()


def test_losing_the_only_host_of_parameters_is_an_error(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(3, lose_parameters, Steps(tmp_path), shutdown=False, exit_codes={0: KILLED})


def lose_parameters(rank: int, steps: Steps) -> None:
    if rank == 2:
        server = reduction.serve(
            "worker0", "worker1", trainers=1, parameters=[torch.zeros(3), torch.zeros(2)], optimizer=SGD
        )
        gradients = [torch.ones(3), torch.ones(2)]
        reduction.push_pull(server, gradients)
        rpc.rpc_async("worker0", die)
        eventually(lambda: "worker0" in server.lost_hosts(), "the host is lost")
        with pytest.raises(ValueError, match=r"has no parameters.*replica=True.*checkpoint="):
            reduction.push_pull(server, gradients)
        lonely = reduction.serve("worker1", trainers=1)
        assert reduction.push_pull(lonely, torch.ones(2)).sum() == 2
        steps.done("over")
    steps.wait_for("over")
    rpc.shutdown(graceful=False)
