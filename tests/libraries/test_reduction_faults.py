"""Faults within a step: none may hang, count twice, or stay wrong for good."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.futures import Future

from tests.support.workers import Steps, eventually, stop
from torch_ucx_rpc import reduction
from torch_ucx_rpc.reduction import _data_parallel, _piece
from torch_ucx_rpc.reduction._host import Host
from torch_ucx_rpc.reduction._hosts import hosts_of, models

from ._training import SGD, are_equal, make_model, train

RunWorkers = Callable[..., list]


# ------------------------------------------------------------------------------------------------------ who never comes


def test_training_host_waits_for_others_as_long_as_a_call(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, miss_the_other_trainer, Steps(tmp_path), options={"rpc_timeout": 2})


def miss_the_other_trainer(rank: int, steps: Steps) -> None:
    if rank == 0:
        # Before the other one has called serve at all, and without hosts of their own.
        with pytest.raises(RuntimeError, match=r"not all trainers have called reduction\.serve\(\)"):
            reduction.serve()
        server = reduction.serve("worker0", trainers=["worker0", "worker1"])
        with pytest.raises(RuntimeError, match="it waited for worker1"):
            reduction.push_pull(server, torch.ones(2))
    steps.meet("done", rank, 2)


def test_timed_out_trainer_blocks_no_step(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, ask_in_a_long_pause, Steps(tmp_path), options={"rpc_timeout": 2})


def ask_in_a_long_pause(rank: int, steps: Steps) -> None:
    model = make_model()
    if rank == 0:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        copy = reduction.DataParallel(model, reduction.serve("worker0", trainers=1))
        train(copy, optimizer, rank, 2)
        steps.done("begun")
        steps.wait_for("given up")
        train(copy, optimizer, rank, 2)
    else:
        steps.wait_for("begun")
        with pytest.raises(
            RuntimeError, match="cannot begin: the others, or a step of one of them, did not come"
        ) as kept:
            reduction.DataParallel(model, reduction.serve("worker0", trainers=1))
        # The model is here still, held by the traceback, and does not try again.
        assert kept.tb is not None
        steps.done("given up")
    steps.meet("done", rank, 2)


def test_a_trainer_with_another_model_is_not_waited_for(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, join_with_another_model, Steps(tmp_path), options={"rpc_timeout": 5})


def join_with_another_model(rank: int, steps: Steps) -> None:
    if rank == 0:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        copy = reduction.DataParallel(model, reduction.serve("worker0", trainers=1))
        train(copy, optimizer, rank, 2)
        steps.done("begun")
        while not steps.is_done("refused"):
            train(copy, optimizer, rank, 1)
        train(copy, optimizer, rank, 2)
    else:
        steps.wait_for("begun")
        with pytest.raises(ValueError, match="must have the same model") as kept:
            reduction.DataParallel(nn.Linear(3, 1), reduction.serve("worker0", trainers=1))
        # The model is here still, held by the traceback.
        assert kept.tb is not None
        steps.done("refused")
    steps.meet("done", rank, 2)


# ------------------------------------------------------------------------------------------------ a backward that fails


def test_after_a_backward_that_has_failed_a_trainer_begins_anew(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, fail_in_backward, Steps(tmp_path))


def fail_in_backward(rank: int, steps: Steps) -> None:
    if rank == 1:
        server = reduction.serve("worker0")
        model = make_model()
        copy = reduction.DataParallel(model, server)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(copy, optimizer, rank, 1)
        failing = next(model.parameters()).register_hook(fail)
        with pytest.raises(RuntimeError, match="by design"):
            train(copy, optimizer, rank, 1)
        failing.remove()
        # Otherwise the gradients would stay here from now on, without a word.
        with pytest.raises(RuntimeError, match=r"has pushed or averaged a part.*Begin anew: server\.leave"):
            train(copy, optimizer, rank, 1)
        server.leave()
        copy = reduction.DataParallel(model, reduction.serve("worker0"))
        train(copy, optimizer, rank, 2)
    steps.meet("done", rank, 2)


def test_trainer_begins_again_with_the_others_model(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, begin_anew_in_the_second_model, Steps(tmp_path))


def begin_anew_in_the_second_model(rank: int, steps: Steps) -> None:
    if rank:
        server = reduction.serve("worker0")
        first = reduction.DataParallel(make_model(), server)
        train(first, torch.optim.SGD(first.parameters(), lr=0.05), rank, 2)
        copy = reduction.DataParallel(make_model(), server)
        del first
        optimizer = torch.optim.SGD(copy.parameters(), lr=0.05)
        train(copy, optimizer, rank, 2)
        eventually(lambda: rpc.rpc_sync("worker0", models, args=(server.name,)) == ["model1"], "model0 is gone")
    if rank == 1:
        while not steps.is_done("over"):
            train(copy, optimizer, rank, 1)
    elif rank == 2:
        server.leave()
        model = make_model()
        torch.nn.init.zeros_(model[0].weight)
        copy = reduction.DataParallel(model, reduction.serve("worker0"))
        assert model[0].weight.any(), "it has the state of the other one"
        train(copy, torch.optim.SGD(model.parameters(), lr=0.05), rank, 3)
        steps.done("over")
        del copy
    steps.meet("done", rank, 3)


def fail(gradient: Tensor) -> None:
    raise RuntimeError("by design")


# --------------------------------------------------------------------------------------------- servers of the same name


def test_a_server_that_one_host_refuses_is_made_on_none(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, ask_for_a_server_that_is_another, Steps(tmp_path))


def ask_for_a_server_that_is_another(rank: int, steps: Steps) -> None:
    if rank == 0:
        reduction.serve("worker1", name="s", trainers=1)
        steps.done("made")
    if rank == 2:
        steps.wait_for("made")
        with pytest.raises(ValueError, match="all trainers must call serve alike"):
            reduction.serve("worker0", "worker1", name="s", trainers=1)
        assert rpc.rpc_sync("worker0", hosts_of, args=("s",)) is None
        assert rpc.rpc_sync("worker1", hosts_of, args=("s",)) == ("worker1",)
    steps.meet("done", rank, 3)


# --------------------------------------------------------------------------------------------------- a piece, by itself


def test_a_checkpoint_of_another_model_is_named(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(1, give_another_model, str(tmp_path))


def give_another_model(rank: int, folder: str) -> None:
    def serve(name: str, parameters: list[Tensor]) -> reduction.Server:
        return reduction.serve(
            "worker0", name=name, parameters=parameters, optimizer=SGD, checkpoint=folder, checkpoint_every=1
        )

    reduction.push_pull(serve("ps", [torch.ones(2)]), [torch.ones(2)])
    (saved,) = Path(folder).iterdir()
    # As for a server that is made another day.
    saved.rename(saved.with_name(saved.name.replace("ps-", "later-")))
    with pytest.raises(ValueError, match=r"those of the checkpoint .*/later-.*\.pt\. Give the model that"):
        serve("later", [torch.ones(3)])


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_trainer_that_missed_an_unknown_sum_takes_the_state(
    run_on_both: RunWorkers, tmp_path: Path, has_optimizer: bool
) -> None:
    run_on_both(4, miss_what_nobody_knows, Steps(tmp_path), has_optimizer)


def miss_what_nobody_knows(rank: int, steps: Steps, has_optimizer: bool) -> None:
    if rank == 0:
        steps.wait_for("first 1", "first 2", "first 3")
        _piece._Missed.take = lambda *_: None  # type: ignore[method-assign,assignment]
        steps.done("forgotten")
        steps.meet("done", rank, 4)
        return
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    server = reduction.serve("worker0")
    copy = reduction.DataParallel(model, server, optimizer=optimizer if has_optimizer else None)
    train(copy, optimizer, rank, 1)
    copy._quorum = 2  # in the first step nobody is late
    steps.done(f"first {rank}")
    steps.wait_for("forgotten")
    if rank == 3:
        steps.wait_for("far 1", "far 2")
        if has_optimizer:
            train(copy, optimizer, rank, 1)
            assert copy._copy.is_behind
            train(copy, optimizer, rank, 1)
            assert server.positions["model0/0/0"] > 3
        else:
            with pytest.raises(ValueError, match=r"what it has missed is not known.*has to begin anew"):
                train(copy, optimizer, rank, 1)
        server.leave()
        steps.done("over")
    else:
        train(copy, optimizer, rank, 3)
        steps.done(f"far {rank}")
        while not steps.is_done("over"):
            train(copy, optimizer, rank, 1)
        server.leave()
    steps.meet("done", rank, 4)


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1, 2)])
def test_trainer_begins_again_after_a_partly_averaged_step(
    run_on_both: RunWorkers, failing: tuple[int, ...], error: type[Exception]
) -> None:
    run_on_both(1, fail_in_buckets, failing, error)


def fail_in_buckets(rank: int, failing: tuple[int, ...], error: type[Exception]) -> None:
    model = make_model()
    copy = reduction.DataParallel(model, reduction.serve(), bucket_bytes=1 << 14)
    assert len(copy._buckets) == 3
    real = _data_parallel.push_bucket

    def push(server: Any, prefix: str, *arguments: Any) -> Any:
        if int(prefix.rpartition("/")[2]) not in failing:
            return real(server, prefix, *arguments)
        failed: Future[Any] = Future()
        failed.set_exception(error("by design"))
        return [(None, failed)]

    _data_parallel.push_bucket = push
    with pytest.raises(error, match="by design"):
        copy(torch.ones(4, 8)).sum().backward()
    _data_parallel.push_bucket = real
    if len(failing) == 1:
        with pytest.raises(RuntimeError, match=r"pushed or averaged a part of its gradients.* Begin anew"):
            copy(torch.ones(4, 8))
    else:
        copy(torch.ones(4, 8)).sum().backward()


def test_trainer_begins_again_after_a_partly_answered_push(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, push_to_a_host_that_answers_nothing, Steps(tmp_path), options={"rpc_timeout": 2})


def answer_pushes(answers: bool) -> None:
    Host.push = HOST_PUSH if answers else lambda *_: Future()  # type: ignore[method-assign,assignment]


HOST_PUSH = Host.push


def push_to_a_host_that_answers_nothing(rank: int, steps: Steps) -> None:
    if rank == 2:
        gradients = [torch.ones(2), torch.ones(2)]

        def push() -> list[Tensor]:
            return reduction.push_pull(server, gradients)

        server = reduction.serve("worker0", "worker1")
        for silent in (["worker0", "worker1"], ["worker1"]):
            for host in silent:
                rpc.rpc_sync(host, answer_pushes, args=(False,))
            with pytest.raises(RuntimeError, match="was not completed"):
                push()
            for host in silent:
                rpc.rpc_sync(host, answer_pushes, args=(True,))
            if len(silent) == 2:
                # Nobody is a step ahead.
                assert are_equal(push(), gradients)
        with pytest.raises(RuntimeError, match=r"has failed at some hosts.*Begin anew, with server\.leave\(\)"):
            push()
        server.leave()
        server = reduction.serve("worker0", "worker1")
        assert are_equal(push(), gradients)
    steps.meet("done", rank, 3)


def test_a_host_that_hangs_is_named(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(2, push_to_a_stopped_host, Steps(tmp_path), options={"rpc_timeout": 2})


def push_to_a_stopped_host(rank: int, steps: Steps) -> None:
    if rank == 1:
        server = reduction.serve("worker0")
        reduction.push_pull(server, [torch.ones(2)])
        pid = rpc.rpc_sync("worker0", os.getpid)
        stop(pid)
        with pytest.raises(RuntimeError, match=r"was not completed: its host 'worker0' does not answer"):
            reduction.push_pull(server, [torch.ones(2)])
        os.kill(pid, signal.SIGCONT)
    steps.meet("done", rank, 2)
