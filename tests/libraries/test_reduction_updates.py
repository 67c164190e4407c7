"""Servers with an optimizer apply each push once, to the parameters that it is for; and so do their replicas."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch._C._distributed_rpc import WorkerInfo

from tests.support.workers import Steps, eventually
from torch_ucx_rpc import reduction
from torch_ucx_rpc.reduction import _host, _hosts, _piece, _push_pull
from torch_ucx_rpc.reduction._applied import Applied
from torch_ucx_rpc.reduction._messages import Answer, Push, Spec, Trainer, Update
from torch_ucx_rpc.reduction._parameters import ParameterPiece, Parameters
from torch_ucx_rpc.reduction._roster import Roster

from ._jobs import KILLED, die
from ._training import SGD, are_equal

RunWorkers = Callable[..., list]


# ------------------------------------------------------------------------------------------ an optimizer on the server


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


def test_asynchronous_pushes_are_all_applied_and_wait_for_nobody(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, update_asynchronously, Steps(tmp_path))


PUSHES = 40


def update_asynchronously(rank: int, steps: Steps) -> None:
    if rank:
        server = reduction.serve("worker0", parameters=[torch.zeros(5)], optimizer=SGD, asynchronous=True)
        if rank == 2:
            steps.wait_for("pushed 1")
        for _ in range(PUSHES):
            (parameter,) = reduction.push_pull(server, [torch.ones(5)])
        steps.done(f"pushed {rank}")
        if rank == 2:
            assert torch.allclose(parameter, torch.full((5,), -0.1 * 2 * PUSHES))
    steps.meet("done", rank, 3)


# ---------------------------------------------------------------------------------------------------- what is applied


def test_pushes_that_overtake_each_other_are_all_applied_once(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, push_without_waiting, Steps(tmp_path))


def push_without_waiting(rank: int, steps: Steps) -> None:
    if rank == 1:
        make = functools.partial(torch.optim.SGD, lr=1.0)

        def serve() -> reduction.Server:
            return reduction.serve("worker0", parameters=[torch.zeros(2)], optimizer=make, asynchronous=True)

        server = serve()
        gradients = [-torch.ones(2)]
        torch.futures.wait_all([reduction.push_pull_async(server, gradients) for _ in range(300)])
        assert reduction.push_pull(server, gradients)[0].tolist() == [301, 301]
        # Nor are those of a trainer taken for old ones that leaves and comes back.
        server.leave()
        assert reduction.push_pull(serve(), gradients)[0].tolist() == [302, 302]
    steps.done(f"over {rank}")
    steps.wait_for("over 0", "over 1")


def test_threads_that_join_a_server_at_once_are_one_trainer(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, serve_in_threads, Steps(tmp_path))


def serve_in_threads(rank: int, steps: Steps) -> None:
    if rank == 1:
        make = functools.partial(torch.optim.SGD, lr=1.0)
        count = 8
        for turn in range(5):
            all_are_there = threading.Barrier(count)

            def push(turn: int, all_are_there: threading.Barrier) -> torch.Tensor:
                all_are_there.wait()
                server = reduction.serve(
                    "worker0", name=f"turn {turn}", parameters=[torch.zeros(2)], optimizer=make, asynchronous=True
                )
                return reduction.push_pull(server, [-torch.ones(2)])[0]

            with ThreadPoolExecutor(count) as threads:
                pushed = [threads.submit(push, turn, all_are_there) for _ in range(count)]
                states = sorted(done.result()[0].item() for done in pushed)
            # Each one's push is in the answer to it, and no two of them are taken for the same.
            assert states[-1] == count, states
    steps.done(f"over {rank}")
    steps.wait_for("over 0", "over 1")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_replica_has_the_parameters_before_the_first_update(
    run_on_ucx: RunWorkers, tmp_path: Path, asynchronous: bool
) -> None:
    run_on_ucx(
        3, lose_a_host_before_the_first_update, Steps(tmp_path), asynchronous, shutdown=False, exit_codes={0: KILLED}
    )


def lose_a_host_before_the_first_update(rank: int, steps: Steps, asynchronous: bool) -> None:
    if rank == 2:
        server = reduction.serve(
            "worker0",
            "worker1",
            parameters=[torch.ones(2), torch.ones(3)],
            optimizer=SGD,
            asynchronous=asynchronous,
            replica=True,
        )
        rpc.rpc_async("worker0", die)
        eventually(lambda: len(server.ring.living()) == 1, "the host is lost")
        parameters = reduction.push_pull(server, [torch.ones(2), torch.ones(3)])
        assert torch.allclose(torch.cat(parameters), torch.full((5,), 0.9))
        steps.done("over")
    steps.wait_for("over")
    rpc.shutdown(graceful=False)


def test_a_copy_of_the_state_stays_as_it_is_while_updates_come() -> None:
    state = Parameters([torch.zeros(2)], functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9))
    state.update([torch.ones(2)])
    copied = state.to_dict()
    state.update([torch.ones(2)])
    again = Parameters.from_dict(copied, functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9))
    again.update([torch.ones(2)])
    assert torch.equal(again.values()[0], state.values()[0])


def test_trainer_with_replaced_parameters_is_warned(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, give_parameters_anew, Steps(tmp_path))


def forget_all_servers() -> None:
    _hosts.hosts()._hosts.clear()


def give_parameters_anew(rank: int, steps: Steps) -> None:
    def serve() -> reduction.Server:
        return reduction.serve("worker0", trainers=1, parameters=[torch.ones(2)], optimizer=SGD, asynchronous=True)

    if rank == 1:
        server = serve()
        reduction.push_pull(server, [torch.ones(2)])
        # As a host that was started anew.
        rpc.rpc_sync("worker0", forget_all_servers)
        steps.done("forgotten")
        steps.wait_for("given anew")
        with pytest.raises(ValueError, match=r"worker1.*were lost with their hosts, and 'worker0' has others.*leave"):
            reduction.push_pull(server, [torch.ones(2)])
        server.leave()
        assert torch.allclose(reduction.push_pull(serve(), [torch.ones(2)])[0], torch.full((2,), 0.9))
    elif rank == 2:
        steps.wait_for("forgotten")
        serve()
        steps.done("given anew")
    steps.done(f"over {rank}")
    steps.wait_for("over 0", "over 1", "over 2")


STEPS_OF_SERVE = ("open_host", "is_newcomer", "fill", "take_parameters", "kept")


@pytest.mark.parametrize("step", STEPS_OF_SERVE)
def test_a_host_that_dies_while_a_server_is_made_is_done_without(
    run_on_ucx: RunWorkers, tmp_path: Path, step: str
) -> None:
    run_on_ucx(3, lose_a_host_in_serve, Steps(tmp_path), step, shutdown=False, exit_codes={0: KILLED})


def die_of_anything(*_: object) -> None:
    die()


def lose_a_host_in_serve(rank: int, steps: Steps, step: str) -> None:
    if rank == 0:
        # What a trainer calls is looked up by its name.
        setattr(_hosts, step, die_of_anything)
        steps.done("mortal")
    elif rank == 2:
        steps.wait_for("mortal")
        server = reduction.serve(
            "worker0", "worker1", parameters=[torch.ones(2), torch.ones(3)], optimizer=SGD, replica=True
        )
        parameters = reduction.push_pull(server, [torch.ones(2), torch.ones(3)])
        assert torch.allclose(torch.cat(parameters), torch.full((5,), 0.9))
        steps.done("over")
    steps.wait_for("over")
    rpc.shutdown(graceful=False)


class FakeHosts:
    """Another host, with a replica, that answers when it is told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[Update, torch.futures.Future[None]]] = []

    def next_host(self) -> str:
        return "ps0"

    def send_update(self, host: str, update: Update) -> torch.futures.Future[None]:
        self.sent.append((update, torch.futures.Future()))
        return self.sent[-1][1]


def test_a_replica_is_sent_no_update_before_it_has_the_state() -> None:
    spec = Spec("ps", ("ps0", "ps1"), 1, optimizer=SGD, asynchronous=True, replica=True)
    others = FakeHosts()
    piece = ParameterPiece("parameters/0", Roster(spec), FakeLife(), others)  # type: ignore[arg-type]
    taken = piece.take_parameters([torch.zeros(2)])

    def push(number: int) -> torch.futures.Future[Answer]:
        kept = piece.kept()
        assert kept is not None
        trainer, gradients = Trainer(0, "t0", 7), [torch.ones(2)]
        pushed = Push("ps", piece.name, 0, trainer, None, None, number, False, gradients, kept[0])
        return piece.push(pushed, True)

    answers = [push(0), push(1)]
    # It could overtake the state, which is more, and be lost in it.
    assert [update.everything is not None for update, _ in others.sent] == [True]
    others.sent[0][1].set_result(None)
    assert taken.done()
    assert [update.push for update, _ in others.sent[1:]] == [0, 1]
    assert not any(answer.done() for answer in answers)
    others.sent[2][1].set_result(None)
    assert [answer.done() for answer in answers] == [False, True]


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_trainer_joining_between_two_hosts_has_one_step_at_both(
    run_on_both: RunWorkers, tmp_path: Path, has_optimizer: bool
) -> None:
    first, second = run_on_both(2, join_between_two_hosts, Steps(tmp_path), has_optimizer)
    # All but the step in which the second has come.
    for mine, theirs in zip(first[1:], second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def join_between_two_hosts(rank: int, steps: Steps, has_optimizer: bool) -> list[list[torch.Tensor]]:
    options: Any = {"parameters": start_values(), "optimizer": SGD} if has_optimizer else {}

    def train(times: int) -> list[list[torch.Tensor]]:
        gradients = [torch.full_like(value, rank + 1.0) for value in start_values()]
        return [reduction.push_pull(server, gradients) for _ in range(times)]

    if rank == 1:
        steps.wait_for("pushed in part")
    server = reduction.serve("worker0", "worker1", trainers=1, **options)
    push, take = _push_pull.push, _host.Host.push

    def push_in_order(server: reduction.Server, piece: str, shard: int, *arguments: Any) -> Any:
        """The first one pushes to the second host when both hosts have what the second one has pushed."""
        if rank == 0 and shard == 1 and "tensors/0" not in server.positions and "parameters/0" not in server.positions:
            return later(server, piece, shard, *arguments)
        return push(server, piece, shard, *arguments)

    def take_and_tell(host: _host.Host, pushed: Push, *arguments: Any) -> Any:
        answer = take(host, pushed, *arguments)
        if pushed.trainer.name == "worker1":
            steps.done(f"pushed to worker{rank}")
        return answer

    def later(*arguments: Any) -> Any:
        future: Any = torch.futures.Future()

        def go_on() -> None:
            eventually(lambda: bool(server.positions), "the first host has answered")
            steps.done("pushed in part")
            steps.wait_for("pushed to worker0")
            steps.wait_for("pushed to worker1")
            push(*arguments).add_done_callback(lambda done: future.set_result(done.value()))

        threading.Thread(target=go_on, daemon=True).start()
        return future

    _push_pull.push = push_in_order  # type: ignore[assignment]
    _host.Host.push = take_and_tell  # type: ignore[method-assign]
    results = train(5 if rank == 0 else 4)
    steps.meet("over", rank, 2)
    return results


@pytest.mark.parametrize("is_new", [False, True])
def test_what_a_late_trainer_missed_at_one_host_adds_up(monkeypatch: pytest.MonkeyPatch, is_new: bool) -> None:
    # By shard, the next round and the mean, or the sum of those that were missed.
    answers = [[(7, 30.0)], [(6, 10.0), (7, 20.0)]]

    def push(server: Any, piece: str, shard: int, *_: Any) -> Any:
        server.positions[piece], value = answers[shard].pop(0)
        future: Any = torch.futures.Future()
        future.set_result(Answer(None, server.positions[piece], 1, [torch.full((2,), value)]))
        return future

    monkeypatch.setattr(_push_pull, "push", push)
    server: Any = SimpleNamespace(
        spec=Spec("ps", ("ps0", "ps1"), 3),
        positions={} if is_new else {"tensors/0": 5, "tensors/1": 5},
        life=SimpleNamespace(devices=[]),
        assign=lambda _: [0, 1],
        keep_shapes=lambda _: None,
    )
    step = _push_pull._Step(server, [torch.zeros(2), torch.zeros(2)], 2, is_one=False)
    assert [float(result[0]) for result in step.future.value()] == ([30, 20] if is_new else [30, 30])


def test_a_second_push_of_a_round_is_refused(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, push_twice, Steps(tmp_path))


def push_twice(rank: int, steps: Steps) -> None:
    server = reduction.serve()
    if rank == 0:
        first = reduction.push_pull_async(server, torch.ones(2))
        with pytest.raises(RuntimeError, match=r"former push to .* has not been answered: wait for it"):
            reduction.push_pull_async(server, torch.ones(2))
        steps.done("refused")
        assert first.wait().tolist() == [1.5, 1.5]
    else:
        steps.wait_for("refused")
        assert reduction.push_pull(server, torch.full((2,), 2.0)).tolist() == [1.5, 1.5]
    for _ in range(50):
        reduction.push_pull(server, torch.ones(2))
    steps.done(f"over {rank}")
    steps.wait_for("over 0", "over 1")


def test_what_was_applied_is_remembered_in_little_memory() -> None:
    applied = Applied()
    assert [applied.add(7, push) for push in (0, 2, 1, 2, 0, 3)] == [True, True, True, False, False, True]
    assert applied.to_dict() == {7: [4]}
    assert applied.add(7, 5)
    assert applied.add(8, 1)
    again = Applied.from_dict(applied.to_dict())
    assert again.to_dict() == {7: [4, 5], 8: [0, 1]}
    assert not again.add(7, 5)
    # The first ones were applied elsewhere, and this one does not know.
    for push in range(100, 5000):
        assert again.add(9, push)
    assert again.to_dict()[9] == [5000]


class FakeLife:
    """Of a host with two other workers, and no RPC."""

    info = WorkerInfo("ps1", 9)

    def living(self) -> list[WorkerInfo]:
        return [WorkerInfo("t0", 0), WorkerInfo("t1", 1), self.info]


def test_quorum_leaves_a_round_whose_result_may_be_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, torch.futures.Future] = {}

    def ask(info: WorkerInfo, *_: object, **__: object) -> torch.futures.Future:
        return asked.setdefault(info.name, torch.futures.Future())

    monkeypatch.setattr(_piece.rpc, "rpc_async", ask)
    roster = Roster(Spec("ps", ("ps0", "ps1"), 2))
    piece = _piece.Piece("tensors/0", roster, FakeLife())  # type: ignore[arg-type]

    def push(rank: int, at: int) -> torch.futures.Future[Answer]:
        pushed = Push("ps", "tensors/0", 0, Trainer(rank, f"t{rank}", 7 + rank), at, 1, at, False, [torch.ones(2)])
        return piece.push(pushed, is_owned=False, takes_over=True)

    # Its own host has been lost with the round. t1 was answered by that, and t0 was not.
    answer = push(0, at=5)
    assert set(asked) == {"t1", "ps1"}
    asked["ps1"].set_result(None)
    assert not answer.done()
    asked["t1"].set_result([torch.full((2,), 3.0)])
    assert torch.equal(answer.value().tensors[0], torch.full((2,), 3.0))
    # From then on it is this host's, and nobody is asked.
    asked.clear()
    assert push(0, at=6).done()
    assert not asked
