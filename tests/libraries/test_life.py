"""A life of a worker, and the libraries' state in it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.rpc as rpc
from torch.distributed.rpc import api

from tests.support.workers import Steps, agent, backend_options, eventually, init_rpc
from torch_ucx_rpc._workers.life import Life, PerLife, life
from torch_ucx_rpc.errors import NotRunning, ShutDown

RunWorkers = Callable[..., list]


def test_each_life_of_a_worker_has_its_own_state(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(1, live_twice, Steps(tmp_path), init=False)


def live_twice(rank: int, steps: Steps) -> None:
    per_life: PerLife[list[Life]] = PerLife(lambda lasting: [lasting])
    with pytest.raises(NotRunning, match="RPC is not running"):
        per_life()
    assert per_life.last() is None
    lives = []
    for number in range(2):
        method = (steps.directory / f"store{number}").as_uri()
        init_rpc(rank, rpc_backend_options=backend_options(init_method=method))
        assert not per_life.is_made()
        made = per_life()
        assert per_life() is made
        assert per_life.is_made()
        assert per_life.last() is made
        assert made == [life()]
        assert made[0].is_of(agent())
        assert not made[0].is_of(None)
        assert [info.name for info in made[0].living()] == ["worker0"]
        lives.append(made[0])
        rpc.shutdown()
        for ask in (per_life, life):
            with pytest.raises(NotRunning, match="RPC is not running"):
                ask()
        assert per_life.last() is made
    assert lives[0] is not lives[1]
    assert lives[0].number != lives[1].number


def test_state_that_a_request_makes_during_init_rpc_lasts(run_on_tensorpipe: RunWorkers, tmp_path: Path) -> None:
    run_on_tensorpipe(2, be_asked_while_starting, Steps(tmp_path), init=False)


asked: PerLife[list[Life]] = PerLife(lambda lasting: [lasting])


def ask() -> None:
    asked()


def be_asked_while_starting(rank: int, steps: Steps) -> None:
    init_states, calls = api._init_rpc_states, []

    def init_again(agent: object) -> None:
        # On TensorPipe torch calls this twice. This worker serves requests from the first call on.
        calls.append(agent)
        if len(calls) == 2:
            steps.wait_for("asked")
        init_states(agent)

    if rank:
        api._init_rpc_states = init_again
    init_rpc(rank)
    if rank:
        assert len(calls) == 2
        assert asked.is_made()
        assert asked() is asked.last()
    else:
        rpc.rpc_sync("worker1", ask)
        steps.done("asked")
    rpc.shutdown()
    # TensorPipe's shutdown reads the Store last, and the Store ends with worker 0.
    if rank:
        steps.done("shut down")
    else:
        steps.wait_for("shut down")


def test_a_life_knows_a_death_before_it_reports_it(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(2, outlive, Steps(tmp_path), shutdown=False, exit_codes={1: -signal.SIGKILL})


def outlive(rank: int, steps: Steps) -> None:
    if rank:
        steps.wait_for("watched")
        os.kill(os.getpid(), signal.SIGKILL)
    told: list[tuple[str, list[str]]] = []
    mine = life()

    def tell(gone: object) -> None:
        told.append((gone.name, [info.name for info in mine.living()]))  # type: ignore[attr-defined]

    mine.watch(tell)
    steps.done("watched")
    eventually(lambda: told == [("worker1", ["worker0"])], "worker1 is gone")
    assert mine.gone_names() == {"worker1"}
    # A later watcher also gets the earlier ends.
    mine.watch(tell)
    assert len(told) == 2
    rpc.shutdown(graceful=False)
    assert not mine.lasts()
    with pytest.raises(ShutDown, match="RPC has been shut down"):
        mine.living()
