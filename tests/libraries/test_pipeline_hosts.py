"""The hosts of stages: their threads, the end of their driver, and workers that hang."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from torch import nn

from tests.support.workers import stopped

from ._jobs import KILLED, Stalls, drive, eventually, on, processes_of, small_model
from ._pipelines import Failing, Twins, make_pipe

# ------------------------------------------------------------------------------------------------------- threads

TEAM = 8


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def wide_model() -> nn.Sequential:
    layers = [nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)]
    return nn.Sequential(*layers, *layers)


def count_threads() -> None:
    workers = ["worker1", "worker2"]
    for worker in workers:
        on(worker, torch.set_num_threads, TEAM)
    before = [on(worker, threads) for worker in workers]
    pipe = make_pipe(wide_model(), workers, chunks=8)
    x = torch.randn(512, 512)
    for _ in range(20):
        pipe.step(x, target=x)
        pipe.zero_grad()
    after = [on(worker, threads) for worker in workers]
    # One thread of each host computes, with its own OpenMP team. RPC may have started a thread too.
    assert all(more - less <= TEAM + 2 for more, less in zip(after, before, strict=True)), (before, after)


def test_a_host_computes_with_one_thread():
    drive(count_threads, 3)


# ------------------------------------------------------------------------------------------ the end of the driver


def kept() -> tuple[int, int]:
    """Return the number of hosts on this worker, and of their stages' modules."""
    from torch_ucx_rpc.pipeline import _host

    gc.collect()
    return len(_host._hosts), sum(type(one) is nn.Linear for one in gc.get_objects())


def train_and_die(rank: int) -> Any:
    if rank == 0:
        pipe = make_pipe(small_model(), ["worker1", "worker2"])
        optimizer = pipe.optimizer(torch.optim.Adam)
        pipe.step(torch.randn(8, 8), target=torch.randn(8, 4))
        optimizer.step()
        pipe.synchronize()
        assert [on(worker, kept) for worker in ("worker1", "worker2")] == [(1, 2), (1, 2)]
        os.kill(os.getpid(), signal.SIGKILL)
    gone = threading.Event()
    from torch_ucx_rpc import on_lost

    on_lost(lambda worker, reason: gone.set())
    assert gone.wait(60)
    with Stalls() as stalls:
        start = time.monotonic()
        eventually(lambda: kept() == (0, 0), "the driver's stages are gone")
        assert time.monotonic() - start < 1 + stalls.seconds()
    with contextlib.suppress(RuntimeError):
        rpc.shutdown()


def test_the_stages_of_a_killed_driver_are_freed(run_on_ucx):
    run_on_ucx(3, train_and_die, exit_codes={0: KILLED}, shutdown=False)


# ---------------------------------------------------------------------------------------------- workers that hang


def step_beside_a_stopped_stage(folder: str) -> None:
    rpc._set_rpc_timeout(10)
    pipe, model = make_pipe(small_model(), spares=["worker3"]), small_model()
    both = Twins(pipe, model, torch.optim.SGD).step
    pipe.save(Path(folder, "first"))
    both()
    pipe.synchronize()
    with stopped(processes_of("worker2")):
        both()
        assert pipe.workers == ["worker1", "worker3"]
        both()
    # The stopped worker continues: its stages are freed, and none of its values counts.
    eventually(lambda: on("worker2", kept) == (0, 0), "the stopped worker lets go of its stages")
    both()


def test_a_spare_takes_the_place_of_a_stopped_worker(tmp_path):
    drive(step_beside_a_stopped_stage, 4, str(tmp_path))


class Hanging(nn.Module):
    """A module that waits in the forward while a file is there."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while Path(self.file).exists():
            time.sleep(0.01)
        return self.inner(x)


def step_beside_a_hanging_stage(folder: str) -> None:
    from torch_ucx_rpc.pipeline import StageLostError

    file = Path(folder, "hang")
    pipe = make_pipe([nn.Linear(8, 8), Hanging(str(file))], spares=["worker3"], step_timeout=5.0)
    pipe.save(Path(folder, "first"))
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    good = pipe.step(x, target=y)
    pipe.zero_grad()
    file.touch()
    with pytest.raises(StageLostError, match=r"worker 'worker3'.*its stage is busy after step_timeout=5 s"):
        pipe.step(x, target=y)
    assert pipe.workers == ["worker1", "worker3"]
    file.unlink()
    pipe.replace("worker3", "worker2")
    pipe.load()
    assert torch.equal(pipe.step(x, target=y), good)


def test_step_timeout_ends_a_step_with_a_hanging_stage(tmp_path):
    drive(step_beside_a_hanging_stage, 4, str(tmp_path))


def step_in_one_process_that_hangs(folder: str) -> None:
    from torch_ucx_rpc.pipeline import StageLostError

    file = Path(folder, "hang")
    pipe = make_pipe([Hanging(str(file))], ["worker0"], step_timeout=3.0)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    pipe.step(x, target=y)
    file.touch()
    with pytest.raises(StageLostError, match=r"worker 'worker0'.*step_timeout=3 s"):
        pipe.step(x, target=y)
    file.unlink()


def test_step_timeout_holds_for_a_stage_of_the_driver(tmp_path):
    drive(step_in_one_process_that_hangs, 1, str(tmp_path))


# ------------------------------------------------------------------------------------------------ the end of a job

alive: list[Any] = []


def end_behind_a_step_of_the_optimizer() -> None:
    pipe = make_pipe(small_model())
    alive.append(pipe)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    pipe.step(torch.randn(8, 8), target=torch.randn(8, 4))
    optimizer.step()


def test_shutdown_does_not_wait_for_a_pipeline(backend):
    drive(end_behind_a_step_of_the_optimizer, 3, backend=backend)


# ------------------------------------------------------------------------------------------- a cut that is lost


def lose(host: str, *cut: Any) -> None:
    """Replaces `_host.cut`, as if the message were lost."""


def lose_cuts() -> None:
    from torch_ucx_rpc.pipeline import _host

    _host.cut = lose


class Slow(nn.Linear):
    """A layer so slow that it still sends values when the next stage has begun the next epoch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)
        return super().forward(x)


def fail_without_cuts() -> None:
    from torch_ucx_rpc.pipeline import StageError

    on("worker1", lose_cuts)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    for first in (nn.Linear(8, 8), Slow(8, 8)):
        pipe = make_pipe([first, Failing()], step_timeout=10)
        good = pipe.step(x, target=y)
        pipe.zero_grad()
        with pytest.raises(StageError, match="too much of it"):
            pipe.step(torch.full((8, 8), 1e5), target=y)
        assert torch.equal(pipe.step(x, target=y), good)


def test_a_host_that_misses_a_cut_begins_the_next_epoch(backend):
    drive(fail_without_cuts, 3, backend=backend, timeout=60)
