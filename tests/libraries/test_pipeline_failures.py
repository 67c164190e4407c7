"""Stages that raise, workers that die, spares, and refusals before anything runs."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from ._jobs import BACKENDS, Stalls, drive, drive_with_deaths, eventually, kill, on, small_model
from ._pipelines import Failing, PassOn, Twins, make_pipe


def kept() -> int:
    """Return the number of micro-batches that stages keep for the backward, plus the number of values in slots."""
    from torch_ucx_rpc.pipeline import _host

    hosts = list(_host._hosts.values())
    values = sum(len(one.exchange._here) + len(one.exchange._posted) for one in hosts)
    return values + sum(len(stage.graphs) for one in hosts for stage in one.stages.by_index.values())


def fail_and_go_on() -> None:
    from torch_ucx_rpc.pipeline import StageError

    workers = ["worker1", "worker2", "worker0"]
    for schedule in ("gpipe", "1F1B", "zero-bubble"):
        pipe = make_pipe([PassOn(), Failing(), nn.Linear(8, 4)], workers, schedule=schedule)
        x, y = torch.randn(8, 8), torch.randn(8, 4)
        good = pipe.step(x, target=y)
        pipe.zero_grad()
        for value, kind, words in (
            (200.0, "forward", "ZeroDivisionError: too much of it"),
            (-200.0, "backward", "no way back"),
        ):
            bad = x.clone()
            bad[5] = value
            with pytest.raises(StageError, match=words) as raised:
                pipe.step(bad, target=y)
            error = raised.value
            assert (error.stage, error.worker, error.micro_batch) == (1, "worker2", 2)
            assert f"stage 1 on worker 'worker2' failed in the {kind}" in str(error)
            assert ("in forward" if kind == "forward" else "in raise_on_the_way_back") in error.traceback_text
            assert "_host.py" not in error.traceback_text
            # The step is undone and its memory freed, and the next step is not affected.
            assert all(gradient is None for gradient in pipe.gradients().values())
            assert [on(worker, kept) for worker in workers] == [0, 0, 0]
            assert torch.equal(pipe.step(x, target=y), good)
            pipe.zero_grad()
        with pytest.raises(StageError, match="too much"):
            pipe(torch.full((4, 8), 200.0))
        pipe.close()


def test_raising_stage_gives_one_error_and_the_next_step_works(backend):
    drive(fail_and_go_on, 3, backend=backend)


class Exploding(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise OverflowError("the optimizer burst")


def fail_beside_earlier_gradients() -> None:
    from torch_ucx_rpc.pipeline import StageError

    pipe = make_pipe([Failing(), nn.Linear(8, 4)])
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    pipe.step(x, target=y)
    earlier = pipe.gradients()
    bad = x.clone()
    bad[7] = 200.0
    for fail in (lambda: pipe.step(bad, target=y), lambda: pipe(bad)):
        with pytest.raises(StageError, match="too much"):
            fail()
        # The gradients of the steps before remain.
        assert all(torch.equal(gradient, earlier[name]) for name, gradient in pipe.gradients().items())
        pipe.step(x, target=y)
        earlier = pipe.gradients()


def explode() -> None:
    from torch_ucx_rpc.pipeline import StageError

    pipe = make_pipe(small_model())
    pipe.step(torch.randn(8, 8), target=torch.randn(8, 4))
    # If the first optimizer's step fails on a worker, the worker never does the second optimizer's step.
    other = pipe.optimizer(torch.optim.SGD, lr=0.1)
    exploding = pipe.optimizer(Exploding, lr=0.1)
    exploding.step()
    other.step()
    # The optimizers of both workers fail. The error names the worker that reports first.
    with pytest.raises(
        StageError, match=r"worker 'worker[12]' failed in optimizer step: OverflowError: the optimizer burst"
    ):
        pipe.synchronize()
    pipe.synchronize()


def test_a_failed_step_leaves_earlier_gradients_as_they_were():
    drive(fail_beside_earlier_gradients, 3)


def test_the_next_call_raises_the_error_of_an_optimizer():
    drive(explode, 3)


# ------------------------------------------------------------------------------------------------------- deaths


class Slow(nn.Module):
    """A slow layer, so that a worker can be killed in the middle of a step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        torch.manual_seed(1)
        self.inner = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.drop(torch.tanh(self.inner(x)))


def slow_model(seconds: float) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 8), Slow(seconds), nn.Linear(8, 4))


def kill_soon(pid: int, after_s: float) -> None:
    """Kill the worker from a thread while the caller is in a step."""
    timer = threading.Timer(after_s, os.kill, (pid, signal.SIGKILL))
    timer.daemon = True
    timer.start()


def step_often(pipe: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    for _ in range(50):
        pipe.step(x, target=y)


def lose_a_stage() -> None:
    from torch_ucx_rpc.pipeline import StageLostError

    workers = ["worker1", "worker2", "worker0"]
    pipe = make_pipe(slow_model(0.05), workers)
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    pipe.step(x, target=y)
    kill_soon(on("worker2", os.getpid), 0.08)
    start = time.monotonic()
    lost = r"lost stage 1 with worker 'worker2'.*pipe\.replace\('worker2'"
    with Stalls() as stalls, pytest.raises(StageLostError, match=lost) as raised:
        step_often(pipe, x, y)
    assert time.monotonic() - start < 10 + stalls.seconds()
    assert (raised.value.workers, raised.value.stages) == (("worker2",), (1,))
    for worker in ("worker0", "worker1"):
        eventually(lambda worker=worker: on(worker, kept) == 0, f"{worker} gives back the memory of the step")
    # The next call raises the same error, without another attempt.
    with pytest.raises(StageLostError, match="worker2"):
        pipe.step(x, target=y)
    with pytest.raises(StageLostError, match="worker2"):
        pipe(x)


def test_a_dead_stage_without_a_spare_is_one_error_that_names_it(backend):
    drive_with_deaths(lose_a_stage, 3, (2,), backend=backend)


def train(folder: str, kill_at: int | None, spares: list[str], save_at: int, asynchronous: bool) -> list[float]:
    """Return the losses of ten steps with dropout, a schedule of learning rates and clipping. One stage may die in a
    step."""
    for worker in ("worker1", "worker2"):
        on(worker, seed, 5)
    pipe = make_pipe(slow_model(0.01), spares=spares, schedule="1F1B")
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    generator = torch.Generator().manual_seed(3)
    losses = []
    pipe.save(Path(folder, "first"))
    slowest = 0.0  # without the machine's stalls
    for number in range(10):
        if number == save_at:
            future = pipe.save(Path(folder, f"{number}"), asynchronous=asynchronous)
            if asynchronous:
                future.wait()
        if number == kill_at:
            kill_soon(on("worker2", os.getpid), 0.03)
        x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)
        start = time.monotonic()
        with Stalls() as stalls:
            losses.append(pipe.step(x, target=y).item())
        slowest = max(slowest, time.monotonic() - start - stalls.seconds())
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert pipe.workers == ["worker1", "worker3" if kill_at is not None else "worker2"]
    print("the longest step took", slowest)
    assert slowest < 5.0
    pipe.synchronize()
    return losses


def seed(value: int) -> None:
    torch.manual_seed(value)


@pytest.mark.parametrize("save_at", [4, -1])
def test_spare_takes_over_and_all_losses_stay_the_same(tmp_path, backend, save_at):
    undisturbed = drive(train, 3, str(tmp_path / "a"), None, [], save_at, False, backend=backend)
    disturbed = drive_with_deaths(
        train, 4, (2,), str(tmp_path / "b"), 6, ["worker3"], save_at, save_at > 0, backend=backend
    )
    assert disturbed == undisturbed
    assert len(set(undisturbed)) == 10


def cut_off(is_cut: bool) -> None:
    """Prevent this worker's stages from sending to others, or allow it again."""
    from torch_ucx_rpc.errors import WorkerLost
    from torch_ucx_rpc.pipeline import _exchange, _host

    def refuse(box: str, epoch: int, to: str, *args: Any) -> None:
        raise WorkerLost("the cable is cut", name=to)

    _exchange.put = refuse if is_cut else _host.put


def lose_what_leaves() -> None:
    from torch_ucx_rpc.pipeline import PipelineError

    pipe = make_pipe(small_model())
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    good = pipe.step(x, target=y)
    pipe.zero_grad()
    out = pipe(x)
    for worker, other, call in (
        ("worker1", "worker2", lambda: pipe.step(x, target=y)),
        ("worker1", "worker2", lambda: pipe(x)),
        ("worker2", "worker1", lambda: out.sum().backward()),
    ):
        on(worker, cut_off, True)
        start = time.monotonic()
        words = f"could not exchange values with worker {other}: the cable is cut, which the driver"
        with Stalls() as stalls, pytest.raises(PipelineError, match=words):
            call()
        assert time.monotonic() - start < 10 + stalls.seconds()
        on(worker, cut_off, False)
        assert torch.equal(pipe.step(x, target=y), good)
        pipe.zero_grad()


def test_value_that_never_reaches_the_next_stage_ends_the_step():
    drive(lose_what_leaves, 3)


def steady_model() -> nn.Sequential:
    torch.manual_seed(2)
    layers = [nn.Linear(8, 8), Slow(0.001), nn.BatchNorm1d(8), Slow(0.001), nn.Linear(8, 4)]
    return nn.Sequential(*layers)


def train_with_random_deaths(folder: str, seed_of_deaths: int | None) -> tuple[list[float], dict[str, Any]]:
    """Do twenty steps with saves of both kinds. Two of three stages are killed, at any moment of any step."""
    chance = random.Random(seed_of_deaths)
    victims = chance.sample(["worker1", "worker2", "worker3"], 2)
    deaths = {
        step: (victim, chance.uniform(0, 0.03))
        for step, victim in zip(chance.sample(range(20), 2), victims, strict=True)
    }
    spares = ["worker4", "worker5"]
    if seed_of_deaths is None:
        deaths, spares = {}, []
    print("deaths:", deaths)
    for worker in ("worker1", "worker2", "worker3"):
        on(worker, seed, 5)
    pipe = make_pipe(steady_model(), ["worker1", "worker2", "worker3"], balance=[1, 2, 2], spares=spares)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    generator = torch.Generator().manual_seed(3)
    processes = {worker: on(worker, os.getpid) for worker in victims}
    losses = []
    pipe.save(Path(folder, "first"))
    for number in range(20):
        start = time.monotonic()
        with Stalls() as stalls:
            if number in deaths:
                kill_soon(processes[deaths[number][0]], deaths[number][1])
            if number % 4 == 3:
                pipe.save(Path(folder, f"{number}"), asynchronous=number % 8 == 7)
            x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)
            losses.append(pipe.step(x, target=y).item())
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert time.monotonic() - start < 5.0 + stalls.seconds()
    pipe.synchronize()
    for victim, _ in deaths.values():
        # The kill may be due only after the last step. Wait for it.
        eventually(lambda victim=victim: not Path(f"/proc/{processes[victim]}/task").exists(), f"{victim} is dead")
    return losses, pipe.state_dict()


def test_stages_that_die_at_random_moments_change_no_loss(tmp_path, backend):
    expected = drive(train_with_random_deaths, 4, str(tmp_path / "undisturbed"), None, backend=backend)
    number = BACKENDS.index(backend)
    dying = tuple(int(one[-1]) for one in random.Random(number).sample(["worker1", "worker2", "worker3"], 2))
    found = drive_with_deaths(train_with_random_deaths, 6, dying, str(tmp_path / "deaths"), number, backend=backend)
    assert found[0] == expected[0]
    assert all(torch.equal(value, expected[1][name]) for name, value in found[1].items())


def recall(folder: str, kill_after: int | None) -> list[float]:
    """Change all inputs of a step after the save, and lose a worker while the inputs differ from the saved ones."""
    spares = ["worker3"] if kill_after is not None else []
    pipe = make_pipe(small_model(), spares=spares)
    early = pipe.optimizer(torch.optim.SGD, lr=0.3)
    pipe.save(folder)
    late = pipe.optimizer(torch.optim.AdamW, lr=0.01)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for number in range(6):
        x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)
        if number == 1:
            pipe.load_state_dict(small_model(5).state_dict())
        if number == 2:
            next(iter(pipe.parameters())).requires_grad_(False)
        if number == 4:
            pipe.requires_grad_(True)
        if number == kill_after:
            pipe.synchronize()
            kill("worker2")
        if number % 2:
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(pipe.step(x, target=y).item())
        else:
            losses.append(pipe.step(x, target=y).item())
        for optimizer in (early, late):
            optimizer.step()
        early.zero_grad()
    pipe.synchronize()
    return losses


def test_repeated_work_has_the_modes_of_the_first_time(tmp_path):
    undisturbed = drive(recall, 3, str(tmp_path / "a"), None)
    for kill_after in (2, 4, 5):
        disturbed = drive_with_deaths(recall, 4, (2,), str(tmp_path / f"{kill_after}"), kill_after)
        assert disturbed == undisturbed, kill_after


def hold_writing(seconds: float) -> None:
    """Make this worker's disk slow."""
    from torch_ucx_rpc.checkpoint import storage

    write = storage.Writer.write_data

    def slowly(self: Any, plan: Any, planner: Any) -> Any:
        time.sleep(seconds)
        return write(self, plan, planner)

    storage.Writer.write_data = slowly  # type: ignore[method-assign]


def lose_behind_a_save(folder: str, dying: str) -> None:
    """Let a stage die while a save is being written. If the save completes it counts, otherwise the previous one
    counts."""
    pipe, model = make_pipe(small_model(), spares=["worker3"]), small_model()
    both = Twins(pipe, model, torch.optim.AdamW).step
    pipe.save(Path(folder, "first"))
    both()
    on("worker1", hold_writing, 0.5)
    on("worker2", hold_writing, 0.0 if dying == "later" else 0.5)
    future = pipe.save(Path(folder, "second"), asynchronous=True)
    if dying == "later":
        eventually(lambda: len(list(Path(folder, "second").glob("*.distcp"))) > 0, "the one that dies has written")
        time.sleep(0.1)
    kill("worker2")
    both()
    both()
    assert future.done()
    assert pipe.workers == ["worker1", "worker3"]
    pipe.load()
    assert Path(folder, "second", ".metadata").exists() == (future.exception() is None)


@pytest.mark.parametrize("dying", ["while it writes", "later"])
def test_loss_during_an_async_save_restores_the_latest_whole_one(tmp_path, dying):
    drive_with_deaths(lose_behind_a_save, 4, (2,), str(tmp_path), dying)


def replace_by_hand(folder: str) -> None:
    from torch_ucx_rpc.pipeline import PipelineError, StageLostError

    pipe, model = make_pipe(small_model(), schedule="zero-bubble"), small_model()
    both = Twins(pipe, model, torch.optim.AdamW).step
    batches = [(torch.randn(8, 8), torch.randn(8, 4)) for _ in range(4)]
    both(*batches[0])
    pipe.save(Path(folder, "one"))
    pipe.step(*batches[3][:1], target=batches[3][1])
    kill("worker2")
    with pytest.raises(StageLostError):
        pipe.step(*batches[1][:1], target=batches[1][1])
    with pytest.raises(ValueError, match="no stage runs on 'worker3'; the stages run on 'worker1', 'worker2'"):
        pipe.replace("worker3", "worker0")
    pipe.replace("worker2", "worker3")
    pipe.load(Path(folder, "one"))
    both(*batches[1])
    both(*batches[2])
    assert pipe.workers == ["worker1", "worker3"]
    with pytest.raises(PipelineError, match="'worker1' is alive, and only a lost worker can be replaced"):
        pipe.replace("worker1", "worker0")
    gc.collect()


def test_replace_and_load_bring_another_worker_in(tmp_path, backend):
    drive_with_deaths(replace_by_hand, 4, (2,), str(tmp_path), backend=backend)


def lose_before_a_save() -> None:
    from torch_ucx_rpc.pipeline import StageLostError

    pipe = make_pipe(small_model(), spares=["worker3"])
    kill("worker2")
    with pytest.raises(StageLostError, match=r"nothing has been saved yet.*call pipe\.save\(path\) once before"):
        pipe.step(torch.randn(8, 8), target=torch.randn(8, 4))


def test_a_spare_needs_a_checkpoint_to_begin_from():
    drive_with_deaths(lose_before_a_save, 4, (2,))


def lose_in_a_save(folder: str) -> None:
    from torch_ucx_rpc import checkpoint

    pipe = make_pipe(small_model(), spares=["worker3"])
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    pipe.save(Path(folder, "first"))
    first = pipe.state_dict()
    pipe.step(torch.randn(8, 8), target=torch.randn(8, 4))
    optimizer.step()
    trained = pipe.state_dict()
    assert not all(torch.equal(trained[name], first[name]) for name in trained)
    save = checkpoint.save

    def save_with_a_death(*args: Any, **options: Any) -> Any:
        checkpoint.save = save
        kill("worker2")
        return save(*args, **options)

    checkpoint.save = save_with_a_death
    pipe.save(Path(folder, "second"))
    assert pipe.workers == ["worker1", "worker3"]
    pipe.load(Path(folder, "second"))
    saved = pipe.state_dict()
    assert all(torch.equal(saved[name], trained[name]) for name in trained)


def test_a_save_in_which_a_worker_dies_has_the_steps_before_it(tmp_path):
    drive_with_deaths(lose_in_a_save, 4, (2,), str(tmp_path))


# ------------------------------------------------------------------------------------------------------ bad input


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target) ** 2


def refuse() -> None:
    from torch_ucx_rpc import pipeline
    from torch_ucx_rpc.pipeline import PipelineError, ScheduleError, StageError

    model = small_model()

    def refused(kind: type[Exception], words: str, **options: Any) -> None:
        options = {"model": model, "workers": ["worker1", "worker2"], "loss": F.mse_loss, "chunks": 4, **options}
        with pytest.raises(kind, match=words):
            pipeline.DistributedPipeline(**options)

    refused(
        ValueError,
        r"balance=\[3, 4\] is for 7 layers, but the model has 8: the sum must be 8",
        balance=[3, 4],
    )
    refused(ValueError, r"balance=\[8\] is for 1 stages, but there are 2", balance=[8])
    refused(ValueError, r"needs at least one layer", balance=[8, 0])
    refused(ValueError, r'"profile" or "parameters"; got \'speed\'', balance="speed")
    refused(ValueError, r"measures the layers on a batch: give one as sample=", balance="profile")
    refused(
        ValueError, r"16 stages need at least 16 layers, but the model has 8: give fewer workers", stages_per_worker=8
    )
    refused(
        ValueError,
        r"there is no worker 'worker9'; did you mean .*The workers are: worker0, worker1",
        workers=["worker9"],
    )
    refused(ValueError, r"'gpu0' is no device", workers=["worker1/gpu0"])
    refused(ValueError, r"'worker1' is given twice", workers=["worker1", "worker1"])
    refused(ValueError, r"'worker1' is given twice", spares=["worker1"])
    refused(ValueError, r"at least one worker", workers=[])
    refused(ValueError, r"there is no worker 'x'\. The workers are: worker0", workers=["x"])
    refused(TypeError, r"each of workers must be a name, .* got 3", workers=[3])
    refused(TypeError, r"workers must be a list of names, .*; got 'worker1'", workers="worker1")
    refused(ValueError, r"chunks must be at least 1", chunks=0)
    refused(ValueError, r"step_timeout must be above 0; got 0", step_timeout=0)
    refused(ValueError, r"the loss Linear has parameters.*put what has them into the model's last stage", loss=model[0])
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    refused(
        PipelineError, r"(?s)stages \[0\] cannot be sent.*let the worker make the stage: pipeline\.Built", model=normed
    )
    refused(ValueError, r"the list has 1 stages, but the workers run 2", model=[model])
    refused(TypeError, r"stage 1 must be an nn\.Module, .* got 3 \(int\)", model=[model, 3])
    refused(
        PipelineError,
        r"worker 'worker1' cannot make its stages: ModuleNotFoundError: No module named 'no_such_code'",
        model=[pipeline.Built("no_such_code:X"), model],
    )
    refused(
        PipelineError,
        r"Modules and the loss are pickled: define them at the top of a module",
        loss=lambda a, b: a.sum(),
    )
    refused(ScheduleError, r"there is no schedule 'fast'. The named schedules are gpipe", schedule="fast")
    refused(ScheduleError, r"'0X1' in line 1 of the schedule is no action", schedule="0F0,0X1")
    text = "0F0,0B0\n1B0,1F0\n"
    refused(
        ScheduleError,
        r"never end.*line 1 stops at 0B0, which needs 1B0.*line 2 stops at 1B0, which needs 1F0",
        schedule=text,
        chunks=1,
    )
    refused(ScheduleError, r"has 1 lines, but there are 2 workers", schedule="0F0,1F0,1B0,0B0", chunks=1)
    refused(ScheduleError, r"lacks 1F1, the forward of micro-batch 1", schedule="0F0,0F1,0B0,0B1\n1F0,1B0", chunks=2)
    refused(ScheduleError, r"lacks 1W0", schedule="0F0,0B0\n1F0,1I0", chunks=1)
    refused(ScheduleError, r"1F0 stands twice", schedule="0F0,0B0\n1F0,1F0,1B0", chunks=1)
    refused(ScheduleError, r"stage 0 is in lines 1 and 2", schedule="0F0,0B0\n1F0,0F1,1B0", chunks=2)
    refused(ScheduleError, r"B is I and W in one", schedule="0F0,0B0\n1F0,1I0,1B0,1W0", chunks=1)

    other = Failing()
    refused(
        ValueError, r"Failing is no plain nn\.Sequential, so it must be traced to be divided: give sample=", model=other
    )
    points = {"iner": pipeline.SplitPoint.BEGINNING}
    refused(
        ValueError,
        r"'iner' is no module of the model; did you mean 'inner'",
        model=other,
        split_spec=points,
        sample=torch.ones(4, 8),
    )

    points = {"inner": 3}
    refused(
        ValueError,
        r"split_spec has 3 for 'inner': give pipeline\.SplitPoint",
        model=other,
        split_spec=points,
        sample=torch.ones(4, 8),
    )

    pipe = make_pipe(model, loss=squares)
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    with pytest.raises(
        StageError,
        match=r"the loss squares must return a scalar for each micro-batch, but returned a tensor of shape \(2, 4\)",
    ):
        pipe.step(x, target=y)
    with pytest.raises(ValueError, match=r"must agree in their first dimension.*\[7, 8\]"):
        pipe.step(x, target=y[:7])
    with pytest.raises(ValueError, match="the batch is empty"):
        pipe.step(x[:0], target=y[:0])
    with pytest.raises(PipelineError, match=r"step\(\) needs a loss"):
        make_pipe(model, loss=None).step(x, target=y)
    with pytest.raises(TypeError, match="an optimizer's class"):
        pipe.optimizer("Adam")
    with pytest.raises(ValueError, match="Invalid learning rate"):
        pipe.optimizer(torch.optim.SGD, lr=-1.0)
    with pytest.raises(ValueError, match=r"take them from pipe\.parameters\(\)"):
        pipe.optimizer(torch.optim.SGD, model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"nothing has been saved yet"):
        pipe.load()
    text = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    fixed = make_pipe(model, schedule=text, chunks=2)
    with pytest.raises(ScheduleError, match=r"0F1 in line 1.*give a batch of as many samples"):
        fixed.step(x[:1], target=y[:1])


def test_impossible_pipelines_are_refused_with_the_cure():
    drive(refuse, 3)
