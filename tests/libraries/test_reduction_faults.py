"""Faults within a step: none may hang, count twice, or stay wrong for good."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from _training import SGD, are_equal, make_model, train
from torch import Tensor
from torch.futures import Future
from workers import Steps, eventually

from torch_ucx_rpc import reduction
from torch_ucx_rpc.reduction import _data_parallel, _piece
from torch_ucx_rpc.reduction._host import Host, hosts_of, models
from torch_ucx_rpc.reduction._meeting import Meetings
from torch_ucx_rpc.reduction._messages import Push, Spec, Trainer, Update
from torch_ucx_rpc.reduction._parameters import ParameterPiece, checkpoint_of
from torch_ucx_rpc.reduction._piece import Piece
from torch_ucx_rpc.reduction._results import Results
from torch_ucx_rpc.reduction._roster import Roster
from torch_ucx_rpc.reduction._round import Round

RunWorkers = Callable[..., list]


# ------------------------------------------------------------------------------------------------------ who never comes


def test_a_host_that_trains_waits_for_others_no_longer_than_a_call(run_on_both: RunWorkers, tmp_path: Path) -> None:
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


def test_a_trainer_begins_anew_with_the_model_that_the_others_have_by_then(
    run_on_both: RunWorkers, tmp_path: Path
) -> None:
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

HOST: Any = SimpleNamespace(info=SimpleNamespace(name="ps"))
ALONE: Any = SimpleNamespace(next_host=lambda: None)


def piece_of(trainers: int, **spec: Any) -> Any:
    roster = Roster(Spec("ps", ("ps",), trainers, **spec))
    if "optimizer" not in spec:
        return Piece("tensors/0", roster, HOST)
    piece = ParameterPiece("tensors/0", roster, HOST, ALONE)
    piece.take_parameters([torch.zeros(2)])
    return piece


def trainer_of(rank: int) -> Trainer:
    return Trainer(rank, f"worker{rank}", 10 + rank)


def push_to(piece: Any, rank: int, tensor: Tensor, number: int = 0) -> Any:
    origin = piece.kept().origin if isinstance(piece, ParameterPiece) else None
    return piece.push(Push("ps", "tensors/0", 0, trainer_of(rank), 0, None, number, False, [tensor], origin), True)


def test_a_push_that_comes_again_after_its_time_counts_once() -> None:
    piece = piece_of(5)
    piece._roster.count(trainer_of(4))
    # As many as are added at a time, and then one of them has waited for long enough.
    for rank in range(4):
        push_to(piece, rank, torch.full((2,), float(rank)))
    again = push_to(piece, 1, torch.full((2,), 1.0), number=1)
    last = push_to(piece, 4, torch.full((2,), 4.0))
    for answer in (again, last):
        assert torch.equal(answer.wait().tensors[0], torch.full((2,), 2.0))


def test_all_are_told_of_a_step_that_the_host_cannot_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = piece_of(2)
    with monkeypatch.context() as broken:
        broken.setattr(Round, "add", lambda *_: fail(torch.zeros(1)))
        futures = [push_to(piece, rank, torch.zeros(2)) for rank in range(2)]
    for future in futures:
        assert future.value().refusal == "'ps' could not complete the step: RuntimeError: by design"
    futures = [push_to(piece, rank, torch.ones(2), number=1) for rank in range(2)]
    for future in futures:
        assert torch.equal(future.value().tensors[0], torch.ones(2))


def test_training_goes_on_where_a_checkpoint_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "folder"
    piece = piece_of(1, optimizer=SGD, checkpoint=str(folder), checkpoint_every=1)
    assert push_to(piece, 0, torch.ones(2)).value().refusal is None
    assert f"could not save tensors/0 to {folder}" in caplog.text


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    spec = Spec("ps", ("ps",), 1, optimizer=SGD, checkpoint=str(tmp_path))
    checkpoint_of(spec, "tensors/0").write_bytes(b"no checkpoint")
    piece = ParameterPiece("tensors/0", Roster(spec), HOST, ALONE)
    with pytest.raises(RuntimeError, match=rf"cannot restore tensors/0 from the checkpoint {tmp_path}/ps-.*\.pt: .*"):
        piece.fill(trainer_of(0))


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


@pytest.mark.parametrize("is_first_own", [True, False])
def test_a_round_that_two_hosts_complete_is_applied_once(is_first_own: bool) -> None:
    piece = piece_of(1, optimizer=SGD)
    state = piece._parameters
    answers: list[Any] = []
    # The other host has died after it had sent this, and the trainer pushes here.
    both = [
        threading.Thread(target=lambda: answers.append(push_to(piece, 0, torch.ones(2)))),
        threading.Thread(target=piece.take_update, args=(Update("ps", "tensors/0", 0, None, 0, [torch.ones(2)]),)),
    ]
    with state.lock:
        for thread in both if is_first_own else both[::-1]:
            thread.start()
            # Until it waits for the lock.
            thread.join(0.2)
    for thread in both:
        thread.join()
    assert state.updates == 1
    assert torch.equal(answers[0].value().tensors[0], state.values()[0])


def host_of(trainers: int) -> Any:
    return Host(Spec("ps", ("ps",), trainers), HOST)


def push_to_host(host: Any, rank: int, at: int = 0) -> Any:
    push = Push("ps", "tensors/0", 0, trainer_of(rank), at, None, at, False, [torch.full((2,), float(rank))])
    return host.push(push, True)


def test_a_trainer_that_dies_before_it_is_given_the_state_is_not_waited_for() -> None:
    host = host_of(1)
    assert push_to_host(host, 0).done()
    joiner = trainer_of(1)
    host.on_gone(joiner.life, joiner.name)
    # The one that gives it has not heard of the death.
    host.admit(joiner, trainer_of(0), ("tensors/0",))
    host.hold("model0", joiner)
    assert push_to_host(host, 0, at=1).done()


@pytest.mark.parametrize("is_seen", [False, True])
@pytest.mark.parametrize("at", [5, 6])
def test_a_late_trainer_gets_the_sum_of_what_it_has_missed_or_none(at: int, is_seen: bool) -> None:
    # Of a host that has taken over with the round 5.
    piece = piece_of(3)
    if is_seen:
        piece._seen.add(trainer_of(2).life)
    for round_ in (5, 6):
        for rank in (0, 1):
            push_in_the_middle(piece, rank, round_, quorum=2)
    answer = push_in_the_middle(piece, 2, at, quorum=2).value()
    if at == 5:
        assert (answer.rounds, answer.tensors[0].tolist()) == (2, [11, 11])
    else:
        # It has had the result of the round 5 from the former host.
        assert answer.is_behind
        assert "what it has missed is not known" in answer.refusal


def push_in_the_middle(piece: Any, rank: int, at: int, quorum: int | None = None) -> Any:
    """Push where all trainers have been there for a while."""
    piece._roster.has_begun = True
    for other in range(piece._roster.spec.expected):
        piece._roster.count(trainer_of(other))
    tensors = [torch.full((2,), float(at))]
    return piece.push(Push("ps", "tensors/0", 0, trainer_of(rank), at, quorum, at, False, tensors), True)


def test_a_trainer_is_not_waited_for_in_rounds_that_are_over_for_it() -> None:
    piece = piece_of(2)
    early = push_in_the_middle(piece, 0, 5)
    assert not early.done()
    late = push_in_the_middle(piece, 1, 7)
    assert early.value().is_behind
    assert not late.done()
    push_in_the_middle(piece, 0, 7)
    assert late.value().tensors[0].tolist() == [7, 7]


def test_a_trainer_that_is_a_round_further_is_asked_for_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def rpc_async(worker: str, *_: Any, **__: Any) -> Future[Any]:
        asked.append(worker)
        future: Future[Any] = Future()
        future.set_result([torch.full((2,), 42.0)])
        return future

    piece = piece_of(2)
    early = push_in_the_middle(piece, 0, 5)
    monkeypatch.setattr(rpc, "rpc_async", rpc_async)
    push_in_the_middle(piece, 1, 6)
    assert early.value().tensors[0].tolist() == [42, 42]
    assert asked == ["worker1"]


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_trainer_that_has_missed_what_nobody_knows_takes_the_state_of_another(
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
            assert copy._is_behind
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


def test_a_late_trainer_that_has_taken_the_state_of_another_has_missed_what_that_one_has() -> None:
    piece = piece_of(3)

    def push(rank: int, at: int) -> Any:
        tensors = [torch.full((2,), float(10**rank * (at + 1)))]
        return piece.push(Push("ps", "tensors/0", 0, trainer_of(rank), at, 2 if at else 3, at, False, tensors), True)

    def result(of: Any) -> float:
        return float(of.value().tensors[0][0])

    first = [push(rank, 0) for rank in range(3)]
    assert [result(of) for of in first] == [37.0] * 3
    for at in (1, 2):
        push(0, at), push(1, at)
    # It has missed two rounds, and takes the state of one that is about to miss the next.
    piece.admit(trainer_of(2), trainer_of(0))
    piece._roster.count(trainer_of(3))
    piece.admit(trainer_of(3), trainer_of(1))
    push(1, 3), push(3, 3)
    expected = (40 + 4000) / 2
    assert result(push(2, 3)) == expected
    assert result(push(0, 3)) == expected


def test_of_a_number_of_trainers_only_those_count_that_have_called_serve() -> None:
    host = host_of(3)
    host.on_gone(99, "an evaluator")
    host.note_serve(trainer_of(2))
    first = push_to_host(host, 0)
    second = push_to_host(host, 1)
    assert not first.done()
    host.on_gone(trainer_of(2).life, "worker2")
    for answer in (first, second):
        assert torch.equal(answer.value().tensors[0], torch.full((2,), 0.5))


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1, 2)])
def test_after_a_step_that_is_averaged_in_part_a_trainer_begins_anew(
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


def test_after_a_push_that_some_hosts_have_not_answered_a_trainer_begins_anew(
    run_on_both: RunWorkers, tmp_path: Path
) -> None:
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
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match=r"was not completed: its host 'worker0' does not answer"):
            reduction.push_pull(server, [torch.ones(2)])
        os.kill(pid, signal.SIGCONT)
    steps.meet("done", rank, 2)


def test_trainers_that_come_when_all_of_the_last_meeting_have_ended_meet_anew() -> None:
    living = ["driver", "worker1", "worker2"]
    life: Any = SimpleNamespace(
        info=SimpleNamespace(name="driver"),
        living=lambda: [SimpleNamespace(name=name) for name in living],
        gone_names=set,
        watch=lambda _: None,
        before_leaving=lambda _: None,
    )
    meetings = Meetings(life)
    first = meetings.meet("s", trainer_of(1), 2, ())
    assert meetings.meet("s", trainer_of(2), 2, ()).wait() == first.wait() == ("worker1", "worker2")
    assert meetings.meet("s", trainer_of(2), 2, ()).wait() == ("worker1", "worker2")
    living[1:] = ["worker3", "worker4"]
    waiting = meetings.meet("s", trainer_of(3), 2, ())
    assert not waiting.done()
    assert meetings.meet("s", trainer_of(4), 2, ()).wait() == waiting.wait() == ("worker3", "worker4")


def test_nothing_is_kept_of_a_model_that_all_have_let_go_of() -> None:
    host = Host(Spec("ps", ("ps",), 2), HOST)
    for model in ("model0", "model1"):
        for rank in range(2):
            push = Push("ps", f"{model}/0/0", 0, trainer_of(rank), 0, None, 0, False, [torch.ones(2)])
            host.push(push, True)
    host.let_go("model0", trainer_of(0))
    assert set(host._pieces) == {"model0/0/0", "model1/0/0"}
    host.let_go("model0", trainer_of(1))
    assert set(host._pieces) == {"model1/0/0"}


def test_of_models_that_are_gone_the_results_of_the_last_one_are_kept() -> None:
    results = Results(HOST)
    for piece in ("model1/0/0", "model1/1/0", "model10/0/0"):
        results.keep("ps", piece, 3, [torch.ones(2)])
    results.drop("ps", "model1")
    assert results.get("ps", "model1/1/0", 3) is None
    assert results.get("ps", "model10/0/0", 3) is not None


def test_a_result_that_is_under_way_is_waited_for() -> None:
    results = Results(HOST)
    results.expect("ps", "model0/0/0", 3, "worker0")
    early, of_asker, other = (
        results.get_or_wait("ps", "model0/0/0", number, asker)
        for number, asker in ((3, "worker1"), (3, "worker0"), (4, "worker1"))
    )
    assert not early.done()
    # The one that asks is the one that has not answered it.
    assert of_asker.value() is None
    assert other.value() is None
    results.keep("ps", "model0/0/0", 3, [torch.ones(2)])
    results.settle("ps", "model0/0/0")
    assert early.value()[0].tolist() == [1, 1]
    results.expect("ps", "model0/0/0", 4, "worker0")
    lost = results.get_or_wait("ps", "model0/0/0", 4, "worker1")
    results.settle("ps", "model0/0/0")
    assert lost.value() is None


def test_a_trainer_that_has_failed_to_give_the_parameters_is_asked_again() -> None:
    piece = ParameterPiece("tensors/0", Roster(Spec("ps", ("ps",), 1, optimizer=SGD)), HOST, ALONE)
    first, other = (piece.fill(trainer_of(rank)) for rank in range(2))
    assert first.value() == "give"
    again = piece.fill(trainer_of(0))
    assert again.done() or other.done(), "nobody is asked"
