"""Trainers that are started anew, give each other what they have, and become hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc

from tests.support.workers import Steps, eventually
from torch_ucx_rpc import reduction
from torch_ucx_rpc._workers.lost import Gone
from torch_ucx_rpc.reduction import _copy, _hosts, _messages

from ._jobs import KILLED, die
from ._restarts import Trainer, answer_only, are_equal, enter

RunWorkers = Callable[..., list]


def test_next_hosts_expect_a_restarted_trainer() -> None:
    names = ("worker0", "worker1")
    life: Any = SimpleNamespace(
        info=SimpleNamespace(name="worker0"),
        living=lambda: [SimpleNamespace(name=name) for name in names],
        watch=lambda _: None,
        before_leaving=lambda _: None,
    )
    hosts = _hosts.Hosts(life)
    hosts._on_gone(Gone(11, "worker1", 1, True, "killed"))
    spec = _messages.Spec("s", names, 2, names, on_trainers=True, shards=1, generation=1)
    assert hosts.open(spec).refusal is None

    def push(rank: int, session: int) -> Any:
        trainer = _messages.Trainer(rank, f"worker{rank}", session)
        tensors = [torch.full((2,), float(rank))]
        return hosts[spec.key].push(
            _messages.Push(spec.key, "model0/0/0", 0, trainer, 7, None, 0, False, tensors), True
        )

    first = push(0, 10)
    assert not first.done()
    for answer in (push(1, 12), first):
        assert torch.equal(answer.value().tensors[0], torch.full((2,), 0.5))


def test_killed_trainer_comes_back_under_its_name(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    first, _, third, again = run_on_ucx(4, restart_a_trainer, Steps(tmp_path), url, init=False, exit_codes={1: KILLED})
    assert are_equal(first, third, again)


def restart_a_trainer(process: int, steps: Steps, url: str) -> list[torch.Tensor]:
    if process == 3:
        steps.wait_for("gone 0", "gone 2")
        enter(url, 1)
        trainer = Trainer(reduction.serve(trainers=3), seed=3)
        assert trainer.step >= 10
        trainer.say_until(steps, "last")
    else:
        enter(url, process)
        trainer = Trainer(reduction.serve(trainers=3), seed=process)
        trainer.train(10)
        if process == 1:
            die()
        trainer.train(10)
        steps.done(f"gone {process}")
    result = trainer.train_until(steps, "last")
    steps.done(f"over {process}")
    steps.wait_for("over 0", "over 2", "over 3")
    rpc.shutdown()
    return result


def test_trainer_with_a_dead_donor_gets_state_from_another(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    _, *results = run_on_ucx(3, die_as_a_donor, Steps(tmp_path), url, init=False, exit_codes={0: KILLED})
    assert are_equal(*results)


def die_as_a_donor(process: int, steps: Steps, url: str) -> list[torch.Tensor]:
    if process == 2:
        steps.wait_for("begun 0", "begun 1")
    enter(url, process)
    trainer = Trainer(reduction.serve(trainers=2), seed=process)
    if process == 2:
        trainer.say_until(steps, "last")
    else:
        trainer.train(5)
        steps.done(f"begun {process}")
    if process == 0:
        tell = trainer.server.ring.call_all

        def die_after_the_admission(function: Callable[..., Any], *arguments: Any) -> list[Any]:
            answers = tell(function, *arguments)
            if function is _hosts.admit:
                # The others wait for whom this one would give the state now.
                die()
            return answers

        trainer.server.ring.call_all = die_after_the_admission  # type: ignore[method-assign]
    result = trainer.train_until(steps, "last")
    steps.done(f"over {process}")
    steps.wait_for("over 1", "over 2")
    rpc.shutdown()
    return result


@pytest.mark.parametrize("is_under_way", [False, True])
def test_step_answered_to_one_host_and_given_on_is_that_of_all(
    run_on_ucx: RunWorkers, tmp_path: Path, is_under_way: bool
) -> None:
    url = (tmp_path / "store").as_uri()
    _, *results = run_on_ucx(
        3, give_on_what_others_lack, Steps(tmp_path), url, is_under_way, init=False, exit_codes={0: KILLED}
    )
    assert are_equal(*results)


def give_on_what_others_lack(process: int, steps: Steps, url: str, is_under_way: bool) -> list[torch.Tensor]:
    if process == 2:
        steps.wait_for("answered")
        load = _copy.Copy._load

        def load_and_say(model: _copy.Copy, state: dict[str, Any]) -> None:
            if is_under_way:
                steps.done("given")
                # The donor dies, and the other one asks what the result was.
                time.sleep(1)
            load(model, state)
            steps.done("given")

        _copy.Copy._load = load_and_say  # type: ignore[method-assign]
    enter(url, process)
    trainer = Trainer(reduction.serve(trainers=2), seed=process)
    if process < 2:
        trainer.train(5)
    if process == 0:
        answer_only("worker0")
        trainer.train()
        steps.done("answered")
        eventually(lambda: len(trainer.model._copy.asking) == 1, "the third asks for the state")
        trainer.model(torch.ones(16, 8))
        steps.wait_for("given")
        die()
    if process == 1:
        trainer.train()
        steps.wait_for("begun")
    else:
        steps.done("begun")
        trainer.say_until(steps, "last")
    result = trainer.train_until(steps, "last")
    steps.done(f"over {process}")
    steps.wait_for("over 1", "over 2")
    rpc.shutdown()
    return result


def test_trainer_waiting_for_state_does_not_block_the_next_hosts(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    run_on_ucx(4, lose_all_hosts, Steps(tmp_path), url, False, init=False, exit_codes={0: KILLED, 1: KILLED})


def test_next_hosts_expect_a_trainer_that_just_got_the_state(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    results = run_on_ucx(4, lose_all_hosts, Steps(tmp_path), url, True, init=False, exit_codes={0: KILLED, 1: KILLED})
    assert are_equal(*results[2:])


def lose_all_hosts(process: int, steps: Steps, url: str, is_given: bool) -> list[torch.Tensor] | None:
    """The first two are the hosts. The fourth comes while the third is in a step, in which both hosts are killed."""
    if process == 2:
        steps.wait_for("begun 0", "begun 1")
    elif process == 3:
        steps.wait_for("trained 2")
    # The one with the lowest rank is asked for the state.
    enter(url, (2, 3, 0, 1)[process])
    if process == 3:
        load = _copy.Copy._load

        def load_later(model: _copy.Copy, state: dict[str, Any]) -> None:
            steps.done("given")
            steps.wait_for("lost")
            # The third is in its step by now, by way of the next hosts.
            time.sleep(0.5)
            load(model, state)

        if is_given:
            _copy.Copy._load = load_later  # type: ignore[method-assign]
        trainer = Trainer(reduction.serve(trainers=2), seed=3)
        trainer.train(5)
        return parameters_at_the_end(trainer, steps, 3)
    trainer = Trainer(reduction.serve(trainers=2), seed=process)
    trainer.train(5)
    steps.done(f"begun {process}")
    if process < 2:
        while True:
            trainer.train()
    trainer.train(5)
    steps.done("trained 2")
    if is_given:
        eventually(lambda: len(trainer.model._copy.asking) == 1, "the fourth asks for the state")
    loss = trainer.model(torch.ones(16, 8)).square().mean()
    if is_given:
        steps.wait_for("given")
    else:
        eventually(lambda: len(trainer.model._copy.asking) == 1, "the fourth asks for the state")
    for host in trainer.server.hosts:
        rpc.rpc_async(host, die)
    eventually(lambda: not trainer.server.ring.living(), "all hosts are lost")
    steps.done("lost")
    began = time.monotonic()
    trainer.optimizer.zero_grad()
    loss.backward()
    trainer.optimizer.step()
    assert time.monotonic() - began < 5
    trainer.train(5 if not is_given else 4)
    return parameters_at_the_end(trainer, steps, 2)


def parameters_at_the_end(trainer: Trainer, steps: Steps, process: int) -> list[torch.Tensor]:
    result = [parameter.detach().clone() for parameter in trainer.module.parameters()]
    steps.done(f"over {process}")
    steps.wait_for("over 2", "over 3")
    rpc.shutdown()
    return result


def test_trainers_meet_though_a_lower_rank_comes_later(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    assert run_on_ucx(2, meet_from_below, Steps(tmp_path), url, init=False) == [("worker0", "worker1")] * 2


def meet_from_below(process: int, steps: Steps, url: str) -> tuple[str, ...]:
    if process == 0:
        steps.wait_for("first")
        eventually(lambda: steps.is_done("waiting"), "the other waits in serve")
    enter(url, process)
    if process == 1:
        steps.done("first")
        threading.Timer(0.2, steps.done, ("waiting",)).start()
    server = reduction.serve(trainers=2)
    assert torch.equal(reduction.push_pull(server, torch.full((3,), float(process))), torch.full((3,), 0.5))
    steps.done(f"over {process}")
    steps.wait_for("over 0", "over 1")
    rpc.shutdown()
    return server.hosts


def test_training_goes_on_when_all_who_have_begun_it_have_gone(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    _, _, second, third, last = run_on_ucx(
        5, outlive_the_first, Steps(tmp_path), url, init=False, exit_codes={0: KILLED}
    )
    assert are_equal(second, third, last)


def outlive_the_first(process: int, steps: Steps, url: str) -> list[torch.Tensor] | None:
    if process in (2, 3):
        steps.wait_for("ten 0", "ten 1")
    if process == 4:
        steps.wait_for("alone 2", "alone 3")
    enter(url, process)
    trainer = Trainer(reduction.serve(trainers=2), seed=process)
    if process < 2:
        trainer.train(10)
        steps.done(f"ten {process}")
        while not (steps.is_done("there 2") and steps.is_done("there 3")):
            trainer.train()
        if process == 0:
            die()
        trainer.train(3)
        trainer.server.leave()
        rpc.shutdown()
        steps.done("left")
        return None
    trainer.train()
    assert trainer.step > 10
    steps.done(f"there {process}")
    if process < 4:
        while not steps.is_done("left"):
            trainer.train()
        trainer.train(5)
        steps.done(f"alone {process}")
    else:
        trainer.say_until(steps, "last")
    result = trainer.train_until(steps, "last")
    steps.done(f"over {process}")
    steps.wait_for("over 2", "over 3", "over 4")
    rpc.shutdown()
    return result


def test_a_host_that_leaves_sends_those_on_who_wait_there(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    run_on_ucx(4, leave_while_others_wait, Steps(tmp_path), url, init=False)


def leave_while_others_wait(process: int, steps: Steps, url: str) -> None:
    """Workers 0 and 1 are the server."""
    if process > 1:
        steps.wait_for("server 0", "server 1")
    enter(url, process)
    steps.done(f"server {process}")
    if process == 0:
        steps.wait_for("pushed")
        # It ends only when it owes no answer.
        rpc.shutdown()
        steps.done("left")
        return
    if process > 1:
        server = reduction.serve("worker0", "worker1", trainers=2)
        if process == 2:
            push = reduction.push_pull_async(server, torch.ones(2))
            eventually(lambda: rpc.rpc_sync("worker0", _hosts.absent, (server.name, "tensors/0")) != [], "it waits")
            steps.done("pushed")
        else:
            steps.wait_for("left")
            push = reduction.push_pull_async(server, torch.full((2,), 2.0))
        assert push.wait().tolist() == [1.5, 1.5]
    steps.done(f"over {process}")
    steps.wait_for("over 1", "over 2", "over 3")
    rpc.shutdown()


def test_trainer_that_shares_the_work_leaves_unnoticed(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    _, first, second = run_on_ucx(3, leave_in_the_middle, Steps(tmp_path), url, init=False)
    assert are_equal(first, second)


def leave_in_the_middle(process: int, steps: Steps, url: str) -> list[torch.Tensor]:
    enter(url, process)
    trainer = Trainer(reduction.serve(trainers=3), seed=process)
    trainer.train(5 if process == 0 else 50)
    if process == 0:
        trainer.server.leave()
        rpc.shutdown()
    else:
        steps.done(f"over {process}")
        steps.wait_for("over 1", "over 2")
        rpc.shutdown()
    return [parameter.detach().clone() for parameter in trainer.module.parameters()]
