"""Workers that are started anew, and all that change: servers and trainers that agree on who has what."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc as rpc
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch._C._distributed_rpc import WorkerInfo
from workers import Steps, backend_options, eventually, init_rpc

from torch_ucx_rpc import reduction
from torch_ucx_rpc.reduction import _host, _piece
from torch_ucx_rpc.reduction._messages import Answer, Push, Spec, Update
from torch_ucx_rpc.reduction._messages import Trainer as TrainerLife
from torch_ucx_rpc.reduction._parameters import Applied, ParameterPiece, Parameters
from torch_ucx_rpc.reduction._roster import Roster

RunWorkers = Callable[..., list]

KILLED = -signal.SIGKILL
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def enter(url: str, rank: int) -> None:
    """Join the group, as worker0, worker1, ..."""
    init_rpc(rank, name=f"worker{rank}", world_size=None, rpc_backend_options=backend_options(init_method=url))


class Trainer:
    """A copy of a model in training, with batches that differ from trainer to trainer."""

    def __init__(self, server: reduction.Server, seed: int) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.5)
        self.server = server
        self.model = reduction.DataParallel(self.module, server, optimizer=self.optimizer, bucket_bytes=1 << 10)
        self._draw = torch.Generator().manual_seed(seed)

    @property
    def step(self) -> int:
        return self.server.positions.get("model0/0/0", 0)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            x = torch.randn(16, 8, generator=self._draw)
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), x.sum(1, keepdim=True)).backward()
            self.optimizer.step()

    def train_until(self, steps: Steps, file: str) -> list[torch.Tensor]:
        """To the step that the file names, which appears on the way; the parameters then."""
        last = None
        while last is None or self.step < last:
            self.train()
            if last is None and steps.is_done(file):
                last = int((steps.directory / file).read_text())
                assert self.step <= last
        assert self.step == last
        return [parameter.detach().clone() for parameter in self.module.parameters()]

    def say_until(self, steps: Steps, file: str, more: int = 20) -> None:
        """Have all train so many steps more. The others cannot be further: they wait for this trainer."""
        part = steps.directory / f"{file}.part"
        part.write_text(str(self.step + more))
        part.rename(steps.directory / file)


def are_equal(*trained: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for other in trained[1:] for a, b in zip(trained[0], other, strict=True))


# ------------------------------------------------------------------------------------------------------------ trainers


def test_a_trainer_that_shares_the_work_is_killed_and_comes_back_under_its_name(
    run_on_ucx: RunWorkers, tmp_path: Path
) -> None:
    url = (tmp_path / "store").as_uri()
    first, _, third, again = run_on_ucx(
        4, restart_a_trainer, Steps(tmp_path), url, init=False, exit_codes={1: KILLED}, timeout=60
    )
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


def test_trainers_meet_though_one_with_a_lower_rank_comes_after_the_first(
    run_on_ucx: RunWorkers, tmp_path: Path
) -> None:
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
        5, outlive_the_first, Steps(tmp_path), url, init=False, exit_codes={0: KILLED}, timeout=60
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
            eventually(lambda: rpc.rpc_sync("worker0", _host.absent, (server.name, "tensors/0")) != [], "it waits")
            steps.done("pushed")
        else:
            steps.wait_for("left")
            push = reduction.push_pull_async(server, torch.full((2,), 2.0))
        assert push.wait().tolist() == [1.5, 1.5]
    steps.done(f"over {process}")
    steps.wait_for("over 1", "over 2", "over 3")
    rpc.shutdown()


# ------------------------------------------------------------------------------------------------------------- servers


def train_over_the_death_of_a_host(process: int, steps: Steps) -> list[torch.Tensor]:
    """Process 2 trains before and after worker0 dies. The other trainer joins it after that."""
    trainer = Trainer(reduction.serve("worker0", "worker1"), seed=process)
    if process == 2:
        trainer.train(5)
        rpc.rpc_async("worker0", die)
        trainer.train(5)
        steps.done("without it")
    else:
        assert trainer.step >= 10
        trainer.say_until(steps, "last")
    return trainer.train_until(steps, "last")


def test_whoever_joins_after_a_server_was_started_anew_goes_where_the_others_go(
    run_on_ucx: RunWorkers, tmp_path: Path
) -> None:
    url = (tmp_path / "store").as_uri()
    results = run_on_ucx(5, join_after_a_restart, Steps(tmp_path), url, init=False, exit_codes={0: KILLED}, timeout=60)
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


def test_a_server_that_is_started_anew_keeps_the_replica_for_the_next_death(
    run_on_ucx: RunWorkers, tmp_path: Path
) -> None:
    url = (tmp_path / "store").as_uri()
    run_on_ucx(
        5, lose_one_host_after_the_other, Steps(tmp_path), url, init=False, exit_codes={0: KILLED, 1: KILLED},
        timeout=60,
    )  # fmt: skip


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
        rpc.rpc_async("worker0", die)
        push(5)
        steps.done("without it")
        steps.wait_for("pushed 4")
        parameters = push(5)
        assert all(torch.equal(p, torch.full_like(p, own + 5)) for p in parameters), parameters
        rpc.rpc_async("worker1", die)
        parameters = push(5)
        # No update is lost, and none is applied twice.
        assert all(torch.equal(p, torch.full_like(p, own + 5)) for p in parameters), parameters
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
    results = run_on_ucx(4, join_without_a_host, Steps(tmp_path), url, init=False, exit_codes={0: KILLED}, timeout=60)
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


def test_nobody_notices_a_trainer_that_shares_the_work_and_leaves(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    _, first, second = run_on_ucx(3, leave_in_the_middle, Steps(tmp_path), url, init=False, timeout=60)
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
        eventually(lambda: len(server.living_hosts()) == 1, "the host is lost")
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


def test_a_trainer_is_told_when_other_parameters_are_in_the_place_of_its_own(
    run_on_both: RunWorkers, tmp_path: Path
) -> None:
    run_on_both(3, give_parameters_anew, Steps(tmp_path))


def forget_all_servers() -> None:
    _host.hosts()._hosts.clear()


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
        setattr(_host, step, die_of_anything)
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
        trainer, gradients = TrainerLife(0, "t0", 7), [torch.ones(2)]
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


def test_a_quorum_does_not_complete_a_round_whose_result_another_trainer_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, torch.futures.Future] = {}

    def ask(info: WorkerInfo, *_: object, **__: object) -> torch.futures.Future:
        return asked.setdefault(info.name, torch.futures.Future())

    monkeypatch.setattr(_piece.rpc, "rpc_async", ask)
    roster = Roster(Spec("ps", ("ps0", "ps1"), 2))
    piece = _piece.Piece("tensors/0", roster, FakeLife())  # type: ignore[arg-type]

    def push(rank: int, at: int) -> torch.futures.Future[Answer]:
        pushed = Push("ps", "tensors/0", 0, TrainerLife(rank, f"t{rank}", 7 + rank), at, 1, at, False, [torch.ones(2)])
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
