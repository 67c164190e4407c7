"""Openings, sums and gradients that arrive after a model has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from tests.support.workers import Steps, agent, eventually
from torch_ucx_rpc import reduction
from torch_ucx_rpc.channel import Channel
from torch_ucx_rpc.errors import EpochEnded
from torch_ucx_rpc.reduction._messages import Opening, channel_of, generation

RunWorkers = Callable[..., list]


def end_a_model(server: reduction.Server) -> Opening:
    """Push once, leave as the last trainer, and return the last opening. This worker is the only host."""
    reduction.push_pull(server, torch.ones(2))
    [key] = server.office.steps
    opening = server.office.opening(key)
    assert opening is not None
    server.leave()
    eventually(lambda: server.office.opening(key) is None, "the model is dropped")
    return opening


def wait_until_refused(gradients: Channel, tag: str) -> None:
    def is_refused() -> bool:
        try:
            gradients.put("worker0", tag, torch.ones(100_000))
        except EpochEnded:
            return True
        return False

    eventually(is_refused, "the host drops them, and says so")


def test_late_openings_of_a_dropped_model_are_ignored(run_on_ucx: RunWorkers) -> None:
    run_on_ucx(1, take_late_openings)


def take_late_openings(rank: int) -> None:
    server = reduction.serve("worker0")
    before = end_a_model(server)
    for late in (before, before._replace(step=before.step + 1)):
        server.office.receive(late)
        assert server.office.opening(before.key) is None
    # A new trainer starts again after these steps.
    assert reduction.push_pull(reduction.serve("worker0"), torch.ones(2)).sum() == 2


def test_sums_end_with_their_epoch(run_on_ucx: RunWorkers) -> None:
    run_on_ucx(1, miss_the_end_of_a_model)


def miss_the_end_of_a_model(rank: int) -> None:
    server = reduction.serve("worker0")
    reduction.push_pull(server, torch.ones(2))
    office = server.office
    [sums] = [thread for thread in threading.enumerate() if thread.name == "torch_ucx_rpc-sums"]
    # A host that was left out does not learn that the last trainer has left.
    office.steps.clear()
    assert office.epoch is not None
    office._enter(office.epoch._replace(number=office.epoch.number + 1))
    eventually(lambda: not sums.is_alive(), "the sums end")


def test_gradients_for_a_missed_model_end_with_their_epoch(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, miss_a_model, Steps(tmp_path))


def miss_a_model(rank: int, steps: Steps) -> None:
    office = reduction.serve("worker0", trainers=1).office
    assert office.epoch is not None
    number = office.epoch.number
    if rank == 1:
        # The host was left out, and has no opening of this model.
        gradients = Channel(channel_of("worker0/missed"), epoch=generation(number, 1))
        gradients.put("worker0", "0/0", torch.ones(100_000))
        steps.done("put")
        wait_until_refused(gradients, "0/1")
        steps.done("refused")
    else:
        steps.wait_for("put")
        office._end_steps(number + 1)
        steps.wait_for("refused")
        if office.life.tells_ends:  # on UCX
            eventually(lambda: agent().get_metrics()["pool.in_use_bytes"] == "0", "nothing is left")
    steps.meet("over", rank, 2)


def test_gradients_after_the_end_of_a_model_are_dropped(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(2, push_after_the_end, Steps(tmp_path))


def push_after_the_end(rank: int, steps: Steps) -> None:
    if rank == 0:
        opening = end_a_model(reduction.serve("worker0", trainers=1))
        steps.done(f"ended {opening.generation}")
    else:
        eventually(lambda: any(steps.directory.glob("ended *")), "the model has ended")
        [step] = steps.directory.glob("ended *")
        late = Channel(channel_of("worker0/tensors"), epoch=int(step.name.split()[1]))
        wait_until_refused(late, "0/9")
    steps.meet("done", rank, 2)


def test_models_that_end_leave_nothing_behind(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, make_many_models, Steps(tmp_path))


def make_many_models(rank: int, steps: Steps) -> None:
    server = reduction.serve()
    for _ in range(12):
        model = reduction.DataParallel(torch.nn.Linear(2, 1), server)
        model(torch.ones(1, 2)).sum().backward()
        # The trainers drop the model at about the same time, in any order.
        del model
    steps.meet("trained", rank, 2)

    def is_nothing_left() -> bool:
        return not server.office._openings and "torch_ucx_rpc-sums" not in {one.name for one in threading.enumerate()}

    eventually(is_nothing_left, "all models have ended")
    steps.meet("over", rank, 2)
