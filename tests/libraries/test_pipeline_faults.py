"""Faults that a step must not have: doubled, stale or missing gradients, and calls that never return."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from ._jobs import drive, drive_with_deaths, kill, on, processes_of, reference_step, small_model
from ._pipelines import assert_equal_gradients, make_pipe
from .test_pipeline_results import sum_of_squares


def assert_step_is_as_in_one_process(
    pipe: Any, model: nn.Module, x: torch.Tensor, y: torch.Tensor, *optimizers: Any
) -> None:
    pipe.step(x, target=y)
    reference_step(model, F.mse_loss, 4, x, target=y)
    assert_equal_gradients(pipe, model)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


# ------------------------------------------------------------------------------- the two halves of a backward


class Sum(nn.Module):
    """A linear layer whose weight is a sum: both parameters have the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.delta = (nn.Parameter(torch.randn(4, 8) * 0.1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.base + self.delta)


def with_a_sum() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Sum())


def train_what_shares_gradients() -> None:
    pipe, model = make_pipe(with_a_sum(), schedule="zero-bubble"), with_a_sum()
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    assert_step_is_as_in_one_process(pipe, model, x, y)


def test_parameters_with_equal_gradients_do_not_share_one() -> None:
    drive(train_what_shares_gradients, 3)


def train_with_a_frozen_weight() -> None:
    divided, model = small_model(), small_model()
    for name in ("4.weight", "6.bias"):
        for one in (divided, model):
            one.get_parameter(name).requires_grad_(False)
    pipe = make_pipe(divided, schedule="zero-bubble")
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    assert_step_is_as_in_one_process(pipe, model, x, y)


def test_a_weight_may_be_frozen_if_a_backward_has_two_halves() -> None:
    drive(train_with_a_frozen_weight, 3)


def tied_ends() -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last)


# The last stage reaches its first W (gradients of weights) only after a forward that waits for the first stage's
# forward.
LATE_WEIGHTS = "0F0,0I0,0W0,0F1,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


def train_tied_with_late_weights() -> None:
    pipe, model = make_pipe(tied_ends(), schedule=LATE_WEIGHTS, chunks=2), tied_ends()
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    pipe.step(x, target=y)
    reference_step(model, F.mse_loss, 2, x, target=y)
    assert_equal_gradients(pipe, model)


def test_a_tied_weight_delays_no_schedule_with_two_halves() -> None:
    drive(train_tied_with_late_weights, 3)


class BesideTheInput(nn.Module):
    """A module whose second output depends only on parameters, and whose third output is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)
        self.shift, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x), self.shift * 2 + self.inner.weight.sum(0), self.bias


class TakingThree(nn.Module):
    def forward(self, given: Any) -> torch.Tensor:
        x, shift, bias = given
        return x * shift + bias


def train_what_depends_on_weights_alone() -> None:
    stages = [nn.Linear(8, 8), BesideTheInput(), TakingThree()]
    pipe = make_pipe(stages, ["worker1", "worker2", "worker0"], schedule="zero-bubble")
    assert_step_is_as_in_one_process(pipe, nn.Sequential(*stages), torch.randn(8, 8), torch.randn(8, 8))


def test_output_of_weights_alone_has_its_gradient_in_two_halves() -> None:
    drive(train_what_depends_on_weights_alone, 3)


def look_for_gradients() -> None:
    from torch_ucx_rpc.pipeline import PipelineError

    pipe = make_pipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    pipe.step(torch.randn(8, 8), target=torch.randn(8, 4))
    before = pipe.gradients()
    # torch's functions find no gradients here, and would do nothing.
    with pytest.raises(PipelineError, match=r"pipe\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(pipe.parameters(), 1e-3)
    with pytest.raises(PipelineError, match=r"pipe\.zero_grad"):
        next(pipe.parameters()).grad = None
    assert all(torch.equal(value, before[name]) for name, value in pipe.gradients().items())


def test_a_parameter_says_where_its_gradient_is() -> None:
    drive(look_for_gradients, 3)


# --------------------------------------------------------------------------------------- calls that never get there


class Raising(nn.Module):
    """A module that raises if a value exceeds 100."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x > 100).any():
            raise ZeroDivisionError("too much of it")
        return self.inner(x)


class SlowInTheLastStage(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if any(len(parameter) == 4 for group in self.param_groups for parameter in group["params"]):
            time.sleep(0.5)


def raising_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Raising(), nn.Linear(8, 4))


def fail_before_the_last_worker_begins() -> None:
    from torch_ucx_rpc.pipeline import StageError

    pipe, model = make_pipe(raising_model()), raising_model()
    # The last worker is still in its optimizer when the first worker raises.
    mine, theirs = pipe.optimizer(SlowInTheLastStage, lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    assert_step_is_as_in_one_process(pipe, model, x, y, mine, theirs)
    with pytest.raises(StageError, match="too much"):
        pipe.step(torch.full((8, 8), 200.0), target=y)
    assert_step_is_as_in_one_process(pipe, model, x, y)


def tied_raising_model() -> nn.Sequential:
    torch.manual_seed(0)
    first, last = Raising(), nn.Linear(8, 8)
    last.weight = first.inner.weight
    return nn.Sequential(first, nn.Tanh(), last)


class SlowWhereWeightsAreOwned(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if len(self.param_groups[0]["params"]) == 2:
            time.sleep(0.5)


class Interrupting(nn.Module):
    """A module that presses Ctrl-C in the driver if a value exceeds 100."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x > 100).any():
            on("worker0", os.kill, processes_of("worker0"), signal.SIGINT)
        return self.inner(x)


def interrupt_a_step() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for loss in (F.mse_loss, sum_of_squares):
        torch.manual_seed(0)
        model = nn.Sequential(Interrupting(), nn.Linear(8, 4))
        pipe = make_pipe(model, loss=loss)
        x, y = torch.randn(8, 8), torch.randn(8, 4)
        bad = x.clone()
        bad[0] = 200.0
        expected = pipe.step(x, target=y)
        before = pipe.gradients()
        for call in (partial(pipe.step, target=y), pipe):
            with pytest.raises(KeyboardInterrupt):
                call(bad)
            assert all(torch.equal(value, before[name]) for name, value in pipe.gradients().items())
        assert torch.equal(pipe.step(x, target=y), expected)
        for name, value in pipe.gradients().items():
            torch.testing.assert_close(value, 2 * before[name])


def test_an_interrupted_step_is_undone() -> None:
    drive(interrupt_a_step, 3)


# The functions of a driver that give the order of a step and wait for its results.
STEP = {"each", "_message", "_put_all", "_put", "_gather", "_run_and_weigh", "later", "ask", "record"}


class InterruptAt:
    """Presses Ctrl-C in this thread before the line of the number ``left``, among the lines of some functions."""

    def __init__(self, left: int, names: set[str]) -> None:
        self.left = left
        self._names = names

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.settrace(None)

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        ours = "torch_ucx_rpc/pipeline/_" in frame.f_code.co_filename and frame.f_code.co_name in self._names
        if ours and event == "line":
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        return self._trace if ours else None


def interrupt_at_every_line(folder: str) -> None:
    for loss in (F.mse_loss, sum_of_squares):
        pipe = make_pipe(small_model(), loss=loss, chunks=2, spares=["worker3"])
        pipe.save(folder)
        x, y = torch.randn(8, 8), torch.randn(8, 4)
        for _ in range(2):
            pipe.step(x, target=y)
        before = pipe.gradients()
        entries = len(pipe._recovery._checkpoints[-1].journal)
        with pytest.raises(TypeError, match="stays here"):
            pipe.step(x, target=NotToBeSent())
        for number in itertools.count():
            try:
                with InterruptAt(number, STEP) as interrupt:
                    pipe.step(x, target=y)
            except KeyboardInterrupt:
                found = pipe.gradients()
                assert all(torch.equal(value, before[name]) for name, value in found.items()), number
                # A recovery must not repeat the step either.
                assert len(pipe._recovery._checkpoints[-1].journal) == entries, number
            if interrupt.left >= 0:
                break
        assert number > 10
        for name, value in pipe.gradients().items():
            torch.testing.assert_close(value, 1.5 * before[name])


def test_a_step_that_is_interrupted_anywhere_is_undone(tmp_path: Path) -> None:
    drive(interrupt_at_every_line, 4, str(tmp_path))


class NotToBeSent:
    """A value that pickle refuses."""

    def __reduce__(self) -> Any:
        raise TypeError("stays here")


def call_off_behind_an_optimizer() -> None:
    pipe, model = make_pipe(tied_raising_model()), tied_raising_model()
    mine, theirs = pipe.optimizer(SlowWhereWeightsAreOwned, lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    assert_step_is_as_in_one_process(pipe, model, x, y, mine, theirs)
    # The last worker waits for the tied weight's values when the next order is canceled.
    with pytest.raises(TypeError, match="stays here"):
        pipe.step(x, target=NotToBeSent())
    assert_step_is_as_in_one_process(pipe, model, x, y)


def test_a_canceled_step_keeps_the_former_optimizer_step() -> None:
    drive(call_off_behind_an_optimizer, 3)


def test_a_step_is_undone_on_workers_that_have_not_begun_it() -> None:
    drive(fail_before_the_last_worker_begins, 3)


def give_what_cannot_be_pickled() -> None:
    pipe = make_pipe(small_model())
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    good = pipe.step(x, target=y)
    pipe.zero_grad()
    for wrong in (
        lambda: pipe.optimizer(torch.optim.SGD, lr=lambda: 0.1),
        lambda: pipe.step(x, target=y, f=lambda: 0),
    ):
        with pytest.raises((TypeError, AttributeError, ValueError)):
            wrong()
        # The next step returns, and its gradients are those of one step.
        assert torch.equal(pipe.step(x, target=y), good)
        pipe.zero_grad()


def test_an_unpicklable_value_blocks_no_worker() -> None:
    drive(give_what_cannot_be_pickled, 3)


def use_a_closed_pipe() -> None:
    from torch_ucx_rpc.pipeline import PipelineError

    pipe = make_pipe(small_model())
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    pipe.step(x, target=y)
    pipe.close()
    with pytest.raises(PipelineError, match="has been closed"):
        pipe.step(x, target=y)


def test_a_closed_pipe_says_so() -> None:
    drive(use_a_closed_pipe, 3)


# ------------------------------------------------------------------------- saves between a step and its optimizer


def embedding_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Flatten(), nn.Linear(64, 4))


def accumulate(
    folder: str, kill_after: int | None, is_sparse: bool, asynchronous: bool, loads: bool
) -> tuple[list[float], dict[str, Any]]:
    """Do two steps for each update, with saves before the second step and before the update."""
    generator = torch.Generator().manual_seed(3)
    spares = ["worker3"] if kill_after is not None else []
    pipe = make_pipe(embedding_model() if is_sparse else small_model(), spares=spares)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    pipe.save(Path(folder, "first"))
    losses = []
    for number in range(8):
        x = torch.randint(16, (8, 8), generator=generator)
        y = torch.randn(8, 4, generator=generator)
        losses.append(pipe.step(x if is_sparse else x.float(), target=y).item())
        if number == 0:
            assert pipe.gradients()["0.weight"].is_sparse == is_sparse
        if number in {2, 3}:
            future = pipe.save(Path(folder, f"{number}"), asynchronous=asynchronous)
            if asynchronous:
                future.wait()
        if number == 4 and loads:
            pipe.load(Path(folder, "2"))
        if number == kill_after:
            pipe.synchronize()
            kill("worker1")
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    pipe.synchronize()
    return losses, pipe.state_dict()


@pytest.mark.parametrize(
    ("kill_after", "is_sparse", "asynchronous", "loads"),
    [
        (2, False, False, False),
        (3, False, True, False),
        (5, True, False, False),
        (3, True, True, False),
        (5, False, False, True),
    ],
)
def test_a_save_has_gradients_that_no_optimizer_used_yet(tmp_path, kill_after, is_sparse, asynchronous, loads) -> None:
    losses, state = drive(accumulate, 3, str(tmp_path / "a"), None, is_sparse, asynchronous, loads)
    found = drive_with_deaths(accumulate, 4, (1,), str(tmp_path / "b"), kill_after, is_sparse, asynchronous, loads)
    assert found[0] == losses
    assert all(torch.equal(value, state[name]) for name, value in found[1].items())


def leave() -> Any:
    raise SystemExit("no arguments")


def build_with_an_exit() -> None:
    from torch_ucx_rpc import pipeline

    with pytest.raises(pipeline.PipelineError, match="SystemExit: no arguments"):
        make_pipe([pipeline.Built(leave), nn.Linear(8, 4)])


def test_a_builder_that_exits_is_an_error():
    drive(build_with_an_exit, 3)
