"""Servers whose hosts die and are started anew: they and the trainers agree on who has what."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc as rpc

from tests.support.workers import Steps
from torch_ucx_rpc import reduction

from ._jobs import KILLED, die, expect_death, kill
from ._restarts import Trainer, answer_only, are_equal, enter

RunWorkers = Callable[..., list]


def train_over_the_death_of_a_host(process: int, steps: Steps) -> list[torch.Tensor]:
    """Process 2 trains before and after worker0 dies. The other trainer joins it after that."""
    trainer = Trainer(reduction.serve("worker0", "worker1"), seed=process)
    if process == 2:
        trainer.train(5)
        death = rpc.rpc_async("worker0", die)
        trainer.train(5)
        expect_death(death)
        steps.done("without it")
    else:
        assert trainer.step >= 10
        trainer.say_until(steps, "last")
    return trainer.train_until(steps, "last")


def test_step_answered_in_part_before_a_restart_is_that_of_all(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    results = run_on_ucx(4, train_over_a_restart, Steps(tmp_path), url, init=False, exit_codes={0: KILLED})
    assert are_equal(*results[1:3])


def train_over_a_restart(process: int, steps: Steps, url: str) -> list[torch.Tensor] | None:
    """Worker 0 is the server, and process 3 its second life."""
    if process:
        steps.wait_for("answered" if process == 3 else "there 0")
    enter(url, process % 3)
    result = None
    if process in (1, 2):
        trainer = Trainer(reduction.serve("worker0", trainers=2), seed=process)
        trainer.train(5)
        if process == 1:
            rpc.rpc_sync("worker0", answer_only, args=("worker1",))
            steps.done("last step")
            trainer.train()
            kill("worker0")
            steps.done("answered")
            trainer.say_until(steps, "last")
        else:
            steps.wait_for("last step")
        result = trainer.train_until(steps, "last")
    else:
        steps.done(f"there {process}")
    steps.done(f"over {process}")
    steps.wait_for("over 1", "over 2")
    rpc.shutdown(graceful=False)
    return result


def test_trainer_joining_after_a_server_restart_follows_others(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    results = run_on_ucx(5, join_after_a_restart, Steps(tmp_path), url, init=False, exit_codes={0: KILLED})
    assert are_equal(results[2], results[4])


def join_after_a_restart(process: int, steps: Steps, url: str) -> list[torch.Tensor] | None:
    """Workers 0 and 1 are the server, and process 3 is the second life of the former."""
    result = None
    if process == 2:
        steps.wait_for("server 0", "server 1")
    elif process == 3:
        steps.wait_for("without it")
    elif process == 4:
        steps.wait_for("server 3")
    enter(url, 0 if process == 3 else process)
    if process in (2, 4):
        result = train_over_the_death_of_a_host(process, steps)
    else:
        steps.done(f"server {process}")
    steps.done(f"over {process}")
    steps.wait_for("over 2", "over 4")
    rpc.shutdown()
    return result


def test_restarted_server_keeps_the_replica_for_the_next_death(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    run_on_ucx(5, lose_one_host_after_the_other, Steps(tmp_path), url, init=False, exit_codes={0: KILLED, 1: KILLED})


def lose_one_host_after_the_other(process: int, steps: Steps, url: str) -> None:
    """Workers 0 and 1 are the server, and process 3 is the second life of the former; 2 and 4 push."""
    if process == 2:
        steps.wait_for("server 0", "server 1")
    elif process == 3:
        steps.wait_for("without it")
    elif process == 4:
        steps.wait_for("server 3")
    enter(url, 0 if process == 3 else process)
    if process not in (2, 4):
        steps.done(f"server {process}")
        steps.wait_for("over 2", "over 4")
        rpc.shutdown()
        return
    start = [torch.zeros(3), torch.zeros(4)]
    gradients = [torch.full((3,), -1.0), torch.full((4,), -1.0)]
    make = functools.partial(torch.optim.SGD, lr=1.0)
    server = reduction.serve(
        "worker0", "worker1", parameters=start, optimizer=make, asynchronous=True, replica=True
    )  # fmt: skip
    own = 0

    def push(count: int) -> list[torch.Tensor]:
        nonlocal own
        own += count
        return [reduction.push_pull(server, gradients) for _ in range(count)][-1]

    if process == 2:
        push(5)
        death = rpc.rpc_async("worker0", die)
        push(5)
        expect_death(death)
        steps.done("without it")
        steps.wait_for("pushed 4")
        parameters = push(5)
        assert all(torch.equal(p, torch.full_like(p, own + 5)) for p in parameters), parameters
        death = rpc.rpc_async("worker1", die)
        parameters = push(5)
        # No update is lost, and none is applied twice.
        assert all(torch.equal(p, torch.full_like(p, own + 5)) for p in parameters), parameters
        expect_death(death)
        steps.done("again without one")
        steps.wait_for("pushed again 4")
    else:
        parameters = push(5)
        assert all(torch.equal(p, torch.full_like(p, 10 + own)) for p in parameters), parameters
        steps.done("pushed 4")
        steps.wait_for("again without one")
        parameters = push(1)
        assert all(torch.equal(p, torch.full_like(p, 20 + own)) for p in parameters), parameters
        steps.done("pushed again 4")
    steps.done(f"over {process}")
    steps.wait_for("over 2", "over 4")
    rpc.shutdown()


def test_a_trainer_can_join_while_a_server_is_gone(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    results = run_on_ucx(4, join_without_a_host, Steps(tmp_path), url, init=False, exit_codes={0: KILLED})
    assert are_equal(results[2], results[3])


def join_without_a_host(process: int, steps: Steps, url: str) -> list[torch.Tensor] | None:
    """Workers 0 and 1 are the server."""
    if process == 2:
        steps.wait_for("server 0", "server 1")
    elif process == 3:
        steps.wait_for("without it")
    enter(url, process)
    result = None
    if process < 2:
        steps.done(f"server {process}")
    else:
        if process == 3:
            with pytest.raises(ValueError, match=r"'worker0' cannot be a host of a server: no living worker"):
                reduction.serve("worker0", "worker1", name="of which nobody knows")
        result = train_over_the_death_of_a_host(process, steps)
    steps.done(f"over {process}")
    steps.wait_for("over 2", "over 3")
    rpc.shutdown()
    return result
