"""A host and its pieces by themselves: whom a round waits for, and what becomes of late trainers."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from torch_ucx_rpc.reduction._host import Host
from torch_ucx_rpc.reduction._meeting import Meetings
from torch_ucx_rpc.reduction._messages import Admission, Entry, Push, Spec, Trainer, Update
from torch_ucx_rpc.reduction._parameters import ParameterPiece, checkpoint_of
from torch_ucx_rpc.reduction._piece import Piece
from torch_ucx_rpc.reduction._results import Results
from torch_ucx_rpc.reduction._roster import Roster
from torch_ucx_rpc.reduction._round import Round

from ._training import SGD

HOST: Any = SimpleNamespace(info=SimpleNamespace(name="ps"), living=list)
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


def host_of(trainers: int) -> Any:
    return Host(Spec("ps", ("ps",), trainers), HOST, ALONE)


def push_to(piece: Any, rank: int, tensor: Tensor, number: int = 0) -> Any:
    origin = piece.kept().origin if isinstance(piece, ParameterPiece) else None
    return piece.push(Push("ps", "tensors/0", 0, trainer_of(rank), 0, None, number, False, [tensor], origin), True)


def push_to_host(host: Any, rank: int, at: int = 0) -> Any:
    push = Push("ps", "tensors/0", 0, trainer_of(rank), at, None, at, False, [torch.full((2,), float(rank))])
    return host.push(push, True)


def push_in_the_middle(piece: Any, rank: int, at: int, quorum: int | None = None) -> Any:
    """Push where all trainers have been there for a while."""
    piece._roster.has_begun = True
    for other in range(piece._roster.spec.expected):
        piece._roster.count(trainer_of(other))
    tensors = [torch.full((2,), float(at))]
    return piece.push(Push("ps", "tensors/0", 0, trainer_of(rank), at, quorum, at, False, tensors), True)


# -------------------------------------------------------------------------------------------------------------- a round


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


def fail(*_: object) -> None:
    raise RuntimeError("by design")


def test_all_are_told_of_a_step_that_the_host_cannot_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = piece_of(2)
    with monkeypatch.context() as broken:
        broken.setattr(Round, "add", fail)
        futures = [push_to(piece, rank, torch.zeros(2)) for rank in range(2)]
    for future in futures:
        assert future.value().refusal == "'ps' could not complete the step: RuntimeError: by design"
    futures = [push_to(piece, rank, torch.ones(2), number=1) for rank in range(2)]
    for future in futures:
        assert torch.equal(future.value().tensors[0], torch.ones(2))


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


# ---------------------------------------------------------------------------------------------------- who is waited for


def test_number_of_trainers_counts_only_callers_of_serve() -> None:
    host = host_of(3)
    host.on_gone(99, "an evaluator")
    host.note_serve(trainer_of(2))
    first = push_to_host(host, 0)
    second = push_to_host(host, 1)
    assert not first.done()
    host.on_gone(trainer_of(2).life, "worker2")
    for answer in (first, second):
        assert torch.equal(answer.value().tensors[0], torch.full((2,), 0.5))


def test_trainers_after_a_finished_meeting_meet_again() -> None:
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


def test_trainer_dying_before_it_has_the_state_blocks_no_step() -> None:
    host = host_of(1)
    assert push_to_host(host, 0).done()
    joiner = trainer_of(1)
    host.on_gone(joiner.life, joiner.name)
    # The one that gives it has not heard of the death.
    host.admit(Admission(joiner, trainer_of(0), 0, ("tensors/0",)))
    host.hold("model0", joiner)
    assert push_to_host(host, 0, at=1).done()


def test_trainer_that_stopped_waiting_for_the_first_blocks_none() -> None:
    host = host_of(2)
    entered = host.enter("model0", trainer_of(1))
    assert not entered.done()
    host.hold_no_more("model0", trainer_of(1), -1)
    assert entered.done(), "the host would owe an answer for good"
    assert host.enter("model0", trainer_of(0)).value() == Entry(None, True)
    assert push_to_host(host, 0).done()


@pytest.mark.parametrize("is_admission_late", [True, False])
def test_timed_out_state_request_does_not_block_step(is_admission_late: bool) -> None:
    host = host_of(1)
    assert push_to_host(host, 0).done()
    donor, joiner = trainer_of(0), trainer_of(1)
    admission = Admission(joiner, donor, 3, ("tensors/0",))
    if not is_admission_late:
        host.admit(admission)
    host.hold_no_more("model0", joiner, 3)
    if is_admission_late:
        host.admit(admission)
    assert push_to_host(host, 0, at=1).done()
    # It asks again.
    host.admit(admission._replace(request=4))
    assert not push_to_host(host, 0, at=2).done()


@pytest.mark.parametrize("is_admission_late", [True, False])
@pytest.mark.parametrize("is_repeated", [True, False])
def test_trainer_with_a_dead_donor_blocks_no_step_until_heard(is_repeated: bool, is_admission_late: bool) -> None:
    host = host_of(2)
    for rank in range(2):
        push_to_host(host, rank)
    donor, joiner = trainer_of(0), trainer_of(2)
    if not is_admission_late:
        host.admit(Admission(joiner, donor, 0, ("tensors/0",), is_repeated))
    host.on_gone(donor.life, donor.name)
    if is_admission_late:
        host.admit(Admission(joiner, donor, 0, ("tensors/0",), is_repeated))
    # That one may wait for a state of trainer 1, which is in the middle of a step.
    mean = push_to_host(host, 1, at=1)
    assert mean.done()
    # Or it has got the state.
    assert torch.equal(push_to_host(host, 2, at=1).value().tensors[0], mean.value().tensors[0])
    assert not push_to_host(host, 1, at=2).done()


def test_trainer_with_a_dead_donors_state_is_expected() -> None:
    host = host_of(2)
    for rank in range(2):
        push_to_host(host, rank)
    donor, joiner = trainer_of(0), trainer_of(2)
    host.admit(Admission(joiner, donor, 0, ("tensors/0",)))
    host.hold("model0", joiner)
    host.on_gone(donor.life, donor.name)
    last = push_to_host(host, 1, at=1)
    assert not last.done()
    push_to_host(host, 2, at=1)
    assert last.done()


def test_trainer_blocks_no_round_that_is_over_for_it() -> None:
    piece = piece_of(2)
    early = push_in_the_middle(piece, 0, 5)
    assert not early.done()
    late = push_in_the_middle(piece, 1, 7)
    assert early.value().is_behind
    assert not late.done()
    push_in_the_middle(piece, 0, 7)
    assert late.value().tensors[0].tolist() == [7, 7]


# ----------------------------------------------------------------------------------------------- what late trainers get


@pytest.mark.parametrize("is_seen", [False, True])
@pytest.mark.parametrize("at", [5, 6])
def test_late_trainer_gets_the_sum_it_missed_or_none(at: int, is_seen: bool) -> None:
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


def test_late_trainer_misses_what_its_donor_missed() -> None:
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


# --------------------------------------------------------------------------------------------------------- what is kept


def test_trainer_a_round_ahead_is_asked_for_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_result_that_is_under_way_is_waited_for() -> None:
    results = Results(HOST)
    results.expect("ps", "model0/0/0", 3, "worker0")
    early, of_asker, other = (
        results.get_or_wait("ps", "model0/0/0", number, asker, ())
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
    lost = results.get_or_wait("ps", "model0/0/0", 4, "worker1", ())
    results.settle("ps", "model0/0/0")
    assert lost.value() is None


def test_a_result_that_may_come_with_a_state_is_waited_for() -> None:
    results = Results(HOST)
    question = ("ps", "model0/0/0", 3, "worker1")
    with results.expect_state("ps", "model0", "worker0"):
        of_lost = results.get_or_wait(*question, ("worker1",))
        assert not of_lost.done()
        # That one may give its state when the round is over that this question is of.
        assert results.get_or_wait(*question, ("worker0", "worker1")).value() is None
        results.adopt("ps", {"model0/0/0": (3, [torch.ones(2)])})
    assert of_lost.value()[0].tolist() == [1, 1]
    with results.expect_state("ps", "model0", "worker0"):
        of_lost = results.get_or_wait("ps", "model0/0/0", 4, "worker1", ("worker1",))
    assert of_lost.value() is None


def test_nothing_is_kept_of_a_model_that_all_have_let_go_of() -> None:
    host = Host(Spec("ps", ("ps",), 2), HOST, ALONE)
    for model in ("model0", "model1"):
        for rank in range(2):
            push = Push("ps", f"{model}/0/0", 0, trainer_of(rank), 0, None, 0, False, [torch.ones(2)])
            host.push(push, True)
    host.let_go("model0", trainer_of(0))
    assert set(host._pieces) == {"model0/0/0", "model1/0/0"}
    host.let_go("model0", trainer_of(1))
    assert set(host._pieces) == {"model1/0/0"}


def test_results_of_the_last_dropped_model_are_kept() -> None:
    results = Results(HOST)
    for piece in ("model1/0/0", "model1/1/0", "model10/0/0"):
        results.keep("ps", piece, 3, [torch.ones(2)])
    results.drop("ps", "model1")
    assert results.get("ps", "model1/1/0", 3) is None
    assert results.get("ps", "model10/0/0", 3) is not None


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


def test_trainer_that_failed_to_give_parameters_is_asked_again() -> None:
    piece = ParameterPiece("tensors/0", Roster(Spec("ps", ("ps",), 1, optimizer=SGD)), HOST, ALONE)
    first, other = (piece.fill(trainer_of(rank)) for rank in range(2))
    assert first.value() == "give"
    again = piece.fill(trainer_of(0))
    assert again.done() or other.done(), "nobody is asked"
