"""Servers with an optimizer: their parameters, before and after hosts die."""

from __future__ import annotations

import functools
import os
import time
import unittest
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc as rpc
from torch import nn

from tests.support.workers import Steps, eventually, stopped
from torch_ucx_rpc import reduction

from ._jobs import KILLED, Stalls, die
from ._training import SGD, are_equal, enter

RunWorkers = Callable[..., list]


def start_values() -> list[torch.Tensor]:
    return [torch.arange(6.0).reshape(2, 3), torch.ones(4), torch.zeros(2)]


@pytest.mark.parametrize("hosts", [("worker0",), ("worker0", "worker1")], ids=["one", "two"])
def test_a_server_with_an_optimizer_answers_with_the_parameters(
    run_on_both: RunWorkers, tmp_path: Path, hosts: tuple[str, ...]
) -> None:
    run_on_both(4, update_on_server, Steps(tmp_path), hosts)


def update_on_server(rank: int, steps: Steps, hosts: tuple[str, ...]) -> None:
    if rank >= 2:
        make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)
        server = reduction.serve(*hosts, trainers=2, parameters=start_values(), optimizer=make)
        expected = [nn.Parameter(tensor) for tensor in start_values()]
        optimizer = make(expected)
        for turn in range(5):
            gradients = [torch.full_like(tensor, turn + rank) for tensor in expected]
            parameters = reduction.push_pull(server, gradients)
            for parameter in expected:
                parameter.grad = torch.full_like(parameter, turn + 2.5)
            optimizer.step()
            assert are_equal(parameters, [parameter.detach() for parameter in expected])
    steps.meet("done", rank, 4)


def test_with_quorum_1_each_push_is_a_step(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, train_asynchronously, Steps(tmp_path))


def train_asynchronously(rank: int, steps: Steps) -> None:
    if rank:
        target = torch.arange(4.0)
        make = functools.partial(torch.optim.SGD, lr=0.05)
        server = reduction.serve("worker0", trainers=2, parameters=[torch.zeros(4)], optimizer=make)
        [stale] = start = [torch.zeros(4)]
        turns = 0
        # The first trainer does not wait for the second one.
        while rank == 1 and turns < 20:
            start = reduction.push_pull(server, [start[0] - target], quorum=1)
            turns += 1
        steps.done(f"begun {rank}")
        steps.wait_for("begun 1")
        if rank == 2:
            # The gradient of the initial parameters is late. It counts in the present step.
            [parameters] = reduction.push_pull(server, [stale - target], quorum=1)
            assert torch.allclose(parameters, target * (1 - 0.95**20 + 0.05))
            assert server.contributors == reduction.Contributors(("worker2",), 0, 1)
            start = [parameters]
            steps.done("pushed")
        steps.wait_for("pushed")
        [parameters] = start
        for _ in range(100):
            [parameters] = reduction.push_pull(server, [parameters - target], quorum=1)
            time.sleep(0.005 * (rank - 1))
        assert torch.allclose(parameters, target, atol=1e-2)
    steps.meet("done", rank, 3)


def test_gradients_of_an_older_step_count_only_with_a_quorum(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(3, come_back_with_gradients, Steps(tmp_path))


def come_back_with_gradients(rank: int, steps: Steps) -> None:
    if rank == 0:
        steps.wait_for("pid")
        with stopped(int((steps.directory / "number").read_text())):
            steps.done("stopped")
            steps.wait_for("alone", timeout=60)
        steps.wait_for("over 1", "over 2", timeout=60)
        return
    make = functools.partial(torch.optim.SGD, lr=1.0)
    quorums = {"between": None, "within": None, "quorum": 1, "present": None}
    servers = {
        name: reduction.serve("worker0", name=name, parameters=[torch.zeros(1)], optimizer=make) for name in quorums
    }

    def push(name: str, gradient: float) -> float:
        return reduction.push_pull(servers[name], torch.full((1,), gradient), quorum=quorums[name]).item()

    for name in servers:
        push(name, 0.0)
    if rank == 1:
        # The steps of these servers go on without worker2.
        steps.wait_for("stopped")
        assert [push(name, 1.0) for name in ("between", "within", "quorum") for _ in range(2)] == [-1.0, -2.0] * 3
        servers["quorum"].leave()
        steps.done("alone")
        for name in ("between", "within"):
            while not steps.is_done(f"over {name}"):
                push(name, 1.0)
        assert push("present", 1.0) == -5.0
        steps.done("over 1")
        return
    within = reduction.push_pull_async(servers["within"], torch.full((1,), 99.0))
    (steps.directory / "number").write_text(str(os.getpid()))
    steps.done("pid")
    # This process is stopped here.
    steps.wait_for("alone", timeout=60)
    both = reduction.Contributors(("worker1", "worker2"), 1, 2)
    for name in ("between", "within"):
        server = servers[name]
        parameter = push(name, 99.0) if name == "between" else within.wait().item()
        assert server.contributors == reduction.Contributors(("worker1",), None, 1)
        # All steps but the first one have a gradient of 1.
        assert parameter == 1 - server.positions["parameters"] <= -3
        # The next gradients count.
        assert push(name, 3.0) == parameter - 2
        assert server.contributors == both
        server.leave()
        steps.done(f"over {name}")
    # All trainers with a later state have left. Nothing is lost, since the host has the parameters.
    with unittest.TestCase().assertNoLogs("torch_ucx_rpc", "WARNING"):
        assert push("quorum", 99.0) == -2.0 - 99.0
    assert servers["quorum"].contributors == reduction.Contributors(("worker2",), 0, 1)
    # The others have waited with this step.
    assert push("present", 9.0) == -5.0
    assert servers["present"].contributors == both
    steps.done("over 2")


class SlowlySteppingSGD(torch.optim.SGD):
    """Waits, in the step with worker 2's gradients, until worker 2 is stopped."""

    def __init__(self, parameters: list[nn.Parameter], steps: Steps) -> None:
        super().__init__(parameters, lr=1.0)
        self.steps = steps

    def step(self) -> None:  # type: ignore[override]
        if self.param_groups[0]["params"][0].grad.item() == 99.0:
            self.steps.done("stepping")
            self.steps.wait_for("stopped", timeout=60)
        super().step()


def test_gradients_count_once_if_their_trainer_is_stopped(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(3, be_stopped_within_a_step, Steps(tmp_path))


def be_stopped_within_a_step(rank: int, steps: Steps) -> None:
    if rank == 0:
        steps.wait_for("stepping")
        with stopped(int((steps.directory / "number").read_text())):
            steps.done("stopped")
            steps.wait_for("alone", timeout=60)
        steps.wait_for("over 1", "over 2", timeout=60)
        return
    make = functools.partial(SlowlySteppingSGD, steps=steps)
    server = reduction.serve("worker0", parameters=[torch.zeros(1)], optimizer=make)

    def push(gradient: float) -> float:
        return reduction.push_pull(server, torch.full((1,), gradient), quorum=1).item()

    push(0.0)
    steps.meet("begun", rank - 1, 2)
    if rank == 2:
        (steps.directory / "number").write_text(str(os.getpid()))
        # This process is stopped while the host applies these gradients.
        assert push(99.0) == -99.0 - 2.0
        steps.done("over 2")
    else:
        steps.wait_for("stopped")
        assert [push(1.0), push(1.0)] == [-100.0, -101.0]
        steps.done("alone")
        steps.wait_for("over 2", timeout=60)
        steps.done("over 1")


class FailingSGD(torch.optim.SGD):
    """Fails in its second step."""

    def step(self) -> None:  # type: ignore[override]
        if self.param_groups[0]["params"][0].item() != 0:
            raise ValueError("no second step")
        super().step()


def test_an_optimizer_that_fails_is_an_error_of_the_push(run_on_both: RunWorkers) -> None:
    run_on_both(2, push_to_a_failing_optimizer)


def push_to_a_failing_optimizer(rank: int) -> None:
    if rank == 1:
        make = functools.partial(FailingSGD, lr=1.0)
        server = reduction.serve("worker0", trainers=1, parameters=[torch.zeros(1)], optimizer=make)
        assert reduction.push_pull(server, torch.ones(1)).item() == -1
        for _ in range(2):
            with pytest.raises(RuntimeError, match="cannot update the parameters: ValueError: no second step"):
                reduction.push_pull(server, torch.ones(1))
        with pytest.raises(ValueError, match="there are 1 for 2 hosts: give fewer hosts"):
            reduction.serve("worker0", "worker1", name="wide", parameters=[torch.zeros(1)], optimizer=SGD)


def test_a_server_that_is_made_again_goes_on(run_on_both: RunWorkers) -> None:
    run_on_both(2, make_a_server_again)


def make_a_server_again(rank: int) -> None:
    if rank == 1:
        make = functools.partial(torch.optim.SGD, lr=1.0)
        for start, expected in ((0.0, [-1.0, -2.0]), (-2.0, [-3.0, -4.0])):
            parameter = nn.Parameter(torch.zeros(1))
            with reduction.serve("worker0", trainers=1, parameters=[parameter], optimizer=make) as server:
                assert parameter.item() == start
                assert [reduction.push_pull(server, torch.ones(1)).item() for _ in expected] == expected
                with pytest.raises(ValueError, match="only push_pull trains with it"):
                    reduction.DataParallel(nn.Linear(1, 1), server)
                with pytest.raises(ValueError, match="only push_pull trains with it"):
                    reduction.DataParallel(nn.Linear(1, 1), server)


def test_a_push_after_the_server_was_left_fails(run_on_ucx: RunWorkers) -> None:
    run_on_ucx(2, push_after_leaving)


def push_after_leaving(rank: int) -> None:
    if rank == 1:
        server = reduction.serve("worker0", trainers=1)
        reduction.push_pull(server, torch.ones(1))
        steps = server.by_hand
        server.leave()
        # A push that began before is not a trainer any more.
        steps.put([torch.ones(1)])
        with pytest.raises(RuntimeError, match="this trainer has left the server"):
            steps.finish()
        again = reduction.serve("worker0", trainers=1)
        server.leave()
        assert reduction.push_pull(again, torch.ones(1)).item() == 1


def test_different_quorums_are_refused(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, push_with_other_quorums, Steps(tmp_path))


def waits_for_second(server: reduction.Server) -> bool:
    return server.office.ask(None, "missing", f"{server.name}/tensors") == ("worker2",)


def push_with_other_quorums(rank: int, steps: Steps) -> None:
    if rank:
        for kind, quorum, wrong, mean in (("all", None, 1, 1.5), ("one", 1, None, float(rank))):
            server = reduction.serve("worker0", trainers=["worker1", "worker2"], name=kind)
            push = functools.partial(reduction.push_pull_async, server, torch.full((4,), float(rank)))
            if rank == 1:
                future = push(quorum=quorum)
                if quorum is None:
                    eventually(functools.partial(waits_for_second, server), "the first trainer takes part")
                else:
                    future.wait()
                steps.done(kind)
            else:
                steps.wait_for(kind)
                with pytest.raises(ValueError, match=f"'worker2' gives quorum={wrong} for '{kind}/.*quorum={quorum}"):
                    push(quorum=wrong).wait()
                # The trainer may push again with the others' quorum.
                future = push(quorum=quorum)
            assert torch.equal(future.wait(), torch.full((4,), mean))
            with pytest.raises(ValueError, match=f"quorum={wrong} for {kind!r}.*quorum={quorum} before"):
                push(quorum=wrong)
    steps.meet("done", rank, 3)


def test_restarted_server_goes_on_from_its_checkpoint(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    run_on_ucx(3, restart_the_server, Steps(tmp_path), url, init=False, exit_codes={0: KILLED})


def restart_the_server(rank: int, steps: Steps, url: str) -> None:
    if rank == 1:
        steps.wait_for("server")
        enter(url, 1)
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
        # Wait for the death: the old server might still apply a push, as the thirteenth update.
        steps.wait_for("dead")
        (parameter,) = reduction.push_pull(server, [torch.ones(3)])
        # Ten updates were saved. This is the eleventh, with the momentum of the ten.
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
    enter(url, 0)
    if rank == 0:
        steps.done("server")
        watcher = f"while kill -0 {os.getpid()} 2>/dev/null; do sleep 0.05; done; touch {steps.directory / 'dead'}"
        os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", watcher)
        steps.wait_for("never", timeout=60)
    steps.wait_for("over")
    rpc.shutdown()


def test_without_a_checkpoint_the_loss_of_parameters_is_an_error(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
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
        with pytest.raises(RuntimeError, match=r"has no parameters.*checkpoint="):
            reduction.push_pull(server, gradients)
        lonely = reduction.serve("worker1", trainers=1)
        assert reduction.push_pull(lonely, torch.ones(2)).sum() == 2
        steps.done("over")
    steps.wait_for("over")
    rpc.shutdown(graceful=False)


def test_a_static_group_fails_without_its_only_host(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(2, lose_the_only_host, Steps(tmp_path), shutdown=False, exit_codes={0: KILLED})


def lose_the_only_host(rank: int, steps: Steps) -> None:
    if rank == 1:
        server = reduction.serve("worker0")
        reduction.push_pull(server, torch.ones(2))
        rpc.rpc_async("worker0", die)
        with Stalls() as stalls:
            began = time.monotonic()
            eventually(lambda: "worker0" in server.lost_hosts(), "the host is lost")
            with pytest.raises(RuntimeError, match=r"all hosts of the server 'worker0' are lost"):
                reduction.push_pull(server, torch.ones(2))
            assert time.monotonic() - began < 10 + stalls.seconds()
        steps.done("over")
    steps.wait_for("over")
    rpc.shutdown(graceful=False)
