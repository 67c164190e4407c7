"""In stages, modules have the same modes, buffers and arguments as in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from torch_ucx_rpc.pipeline._divide import divide

from ._jobs import drive, drive_with_deaths, kill, on, reference_step
from ._pipelines import PassOn, assert_equal_gradients, make_pipe


def with_a_frozen_norm() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[1].eval()
    return model


def assert_same_state(pipe: Any, model: nn.Module) -> None:
    found = pipe.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name


def train_with_a_frozen_norm(folder: str) -> None:
    pipe, model = make_pipe(with_a_frozen_norm(), spares=["worker3"]), with_a_frozen_norm()
    pipe.save(folder)
    x, y = torch.randn(16, 8), torch.randn(16, 4)

    def both() -> None:
        pipe.step(x, target=y)
        reference_step(model, F.mse_loss, 4, x, target=y)
        assert_same_state(pipe, model)

    both()
    # A spare gets the modes too, and the other stages keep theirs when they repeat steps.
    kill("worker2")
    both()
    both()
    # eval() and train() set the mode of all modules, as in torch.
    for one in (pipe, model):
        one.eval()
        one.train()
    both()


def test_a_module_in_eval_mode_stays_in_eval_mode(tmp_path: Path) -> None:
    drive_with_deaths(train_with_a_frozen_norm, 4, (2,), str(tmp_path))


def list_and_trace_a_frozen_norm() -> None:
    from torch_ucx_rpc.pipeline import SplitPoint

    x, y = torch.randn(16, 8), torch.randn(16, 4)
    model = with_a_frozen_norm()
    pipe = make_pipe([with_a_frozen_norm()[:2], with_a_frozen_norm()[2:]])
    pipe.step(x, target=y)
    reference_step(model, F.mse_loss, 4, x, target=y)
    found = pipe.state_dict()
    assert torch.equal(found["0.1.running_mean"], model[1].running_mean)
    assert torch.equal(found["1.3.running_mean"], model[3].running_mean)
    model, given = with_a_frozen_norm(), with_a_frozen_norm()
    pipe = make_pipe(given, sample=x, split_spec={"2": SplitPoint.BEGINNING})
    assert [part.training for part in given.modules()] == [part.training for part in model.modules()]
    pipe.step(x, target=y)
    reference_step(model, F.mse_loss, 4, x, target=y)
    assert_same_state(pipe, model)


def test_listed_and_traced_stages_keep_their_modes() -> None:
    drive(list_and_trace_a_frozen_norm, 3)


class Counting(nn.Module):
    """A module that counts its forwards in two buffers: it changes one in place, and replaces the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.total = self.total + x.detach().sum(0)
        return torch.tanh(self.inner(x))


def rematerialize_what_counts() -> None:
    pipe = make_pipe([nn.Linear(8, 8), Counting()], rematerialize=True)
    model = make_pipe([nn.Linear(8, 8), Counting()])
    model.load_state_dict(pipe.state_dict())
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    for one in (pipe, model):
        one.step(x, target=y)
    found, expected = pipe.state_dict(), model.state_dict()
    assert expected["1.steps"] == 4
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert all(
        torch.equal(found, expected)
        for found, expected in zip(pipe.gradients().values(), model.gradients().values(), strict=True)
    )


def test_rematerialization_counts_once_in_any_buffer() -> None:
    drive(rematerialize_what_counts, 3)


class Noting(PassOn):
    """A module that counts the forwards in its process."""

    forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Noting.forwards += 1
        return super().forward(x)


def noted() -> int:
    found, Noting.forwards = Noting.forwards, 0
    return found


def rematerialize_what_is_worth_it() -> None:
    # The forwards of the first and of the last stage for four micro-batches.
    for schedule, expected in (("gpipe", (8, 8)), ("1F1B", (8, 4)), ("zero-bubble", (8, 4))):
        pipe = make_pipe([Noting(), Noting()], schedule=schedule, rematerialize=True)
        pipe.step(torch.randn(8, 8), target=torch.randn(8, 8))
        assert tuple(on(worker, noted) for worker in ("worker1", "worker2")) == expected, schedule
        pipe.close()


def test_no_forward_is_repeated_right_before_its_backward() -> None:
    drive(rematerialize_what_is_worth_it, 3)


# ----------------------------------------------------------------------------------------------------- traced models


class Scaled(nn.Module):
    """A module that takes two tensors with gradients and a number, and has layers that depend on ``self.training``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        hidden = self.first(a).relu_() * factor + b
        if self.training:
            hidden = hidden * 2
        # The last stage begins with an in-place write.
        return self.last(F.relu(hidden, inplace=True))


class InPlaceFirst(nn.Module):
    """A model whose second part begins with an in-place write."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), Tail()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mul_(2)
        return self.inner(x)


def call_traced() -> None:
    from torch_ucx_rpc.pipeline import SplitPoint

    points = {"last": SplitPoint.BEGINNING}
    a, b = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    one = a.detach()
    sample = {"a": one, "b": one, "factor": 3.0}
    pipe, model = make_pipe(Scaled(), sample=sample, split_spec=points), Scaled()

    def gradients(output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(output.square().sum(), (a, b))

    # The arguments are passed by name in another order, and each gets its own gradient.
    found = gradients(pipe(factor=3.0, b=b, a=a))
    for mine, theirs in zip(found, gradients(model(a, b, 3.0)), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not torch.equal(*found)
    with torch.no_grad():
        torch.testing.assert_close(pipe(a, b, 3.0), model(a, b, 3.0))
        torch.testing.assert_close(pipe.eval()(a, b, 3.0), model.eval()(a, b, 3.0))
    with pytest.raises(ValueError, match=r"factor was 3\.0 when the model was traced, and is 2\.0 in this call"):
        pipe(a, b, 2.0)
    with pytest.raises(ValueError, match=r"dimension 1 of a was 8 when the model was traced, and is 9 in this call"):
        pipe(torch.randn(8, 9), b, 3.0)


def test_traced_model_has_named_arguments_and_an_eval_graph() -> None:
    drive(call_traced, 3)


def test_a_sequential_with_hooks_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    dividing = {"balance": None, "sample": None, "split_spec": None, "chunks": 1}
    assert len(divide(model, 2, **dividing).specs) == 2
    model.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(ValueError, match="hooks"):
        divide(model, 2, **dividing)


class TakesMeans(nn.Module):
    """A model that computes with the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(hidden + hidden.sum(0, keepdim=True).expand(x.shape[0], -1) / x.shape[0])


def trace_one_sample() -> None:
    x, y = torch.randn(10, 8), torch.randn(10, 4)
    pipe, model = make_pipe(TakesMeans(), sample=x[:1]), TakesMeans()
    # Micro-batches of 3, 3, 2 and 2 samples, and of one.
    for size in (10, 4):
        loss = pipe.step(x[:size], target=y[:size])
        assert torch.equal(loss, reference_step(model, F.mse_loss, 4, x[:size], target=y[:size]))
    assert_equal_gradients(pipe, model)


def test_a_model_traced_with_one_sample_takes_any_batch() -> None:
    drive(trace_one_sample, 3)


class OnlyInEvaluation(nn.Module):
    """A model whose first part has a layer that training does not run."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.shift, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if not self.training:
            hidden = self.shift(hidden)
        return self.last(hidden)


def load_what_only_evaluation_runs() -> None:
    from torch_ucx_rpc.pipeline import SplitPoint

    x = torch.randn(8, 8)
    pipe = make_pipe(OnlyInEvaluation(0), sample=x, split_spec={"last": SplitPoint.BEGINNING}).eval()
    for seed in (0, 1):
        model = OnlyInEvaluation(seed).eval()
        pipe.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.equal(pipe(x), torch.cat([model(part) for part in x.tensor_split(4)])), seed


def test_layer_used_only_in_evaluation_gets_loaded_values() -> None:
    drive(load_what_only_evaluation_runs, 3)


def train_in_place() -> None:
    from torch_ucx_rpc.pipeline import SplitPoint

    x, y = torch.randn(8, 8), torch.randn(8, 4)
    pipe = make_pipe(InPlaceFirst(), sample=x, split_spec={"second": SplitPoint.BEGINNING})
    model = InPlaceFirst()
    pipe.step(x, target=y)
    reference_step(model, F.mse_loss, 4, x, target=y)
    assert_equal_gradients(pipe, model)


def test_a_traced_stage_may_begin_with_a_write_in_place() -> None:
    drive(train_in_place, 3)


# --------------------------------------------------------------------------------------------------- float16


def two_optimizers_and_a_scaler() -> None:
    from torch_ucx_rpc.pipeline import GradScaler

    def small() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def optimizers(model: Any) -> list[torch.optim.Optimizer]:
        make = torch.optim.SGD if isinstance(model, nn.Module) else partial(model.optimizer, torch.optim.SGD)
        named = dict(model.named_parameters())
        return [make([one for name, one in named.items() if kind in name], lr=0.1) for kind in ("bias", "weight")]

    pipe, model = make_pipe(small()), small()
    mine, theirs = optimizers(pipe), optimizers(model)
    scaler = GradScaler(init_scale=1024.0, growth_interval=1)
    for number in range(4):
        x, y = torch.randn(8, 8), torch.randn(8, 4)
        pipe.step(x, target=y, scaler=scaler)
        reference_step(model, F.mse_loss, 4, x, target=y)
        if number % 2:
            for one in mine:
                scaler.unscale_(one)
            assert_equal_gradients(pipe, model)
            norms = pipe.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert torch.equal(*norms)
            with pytest.raises(RuntimeError, match=r"unscale_\(\) has been called"):
                scaler.unscale_(mine[0])
        for one in mine:
            one.step(scaler=scaler)
        for one in theirs:
            one.step()
        # The scale grows once a step, for any number of optimizers.
        assert scaler.get_scale() == 2048.0 * 2**number
        pipe.zero_grad()
        model.zero_grad()
        assert_same_state(pipe, model)
    # One optimizer's gradients are not finite. Only the other optimizer steps, and the scale shrinks once.
    x[0, 0] = float("inf")
    pipe.step(x, target=y, scaler=scaler)
    for one in mine:
        one.step(scaler=scaler)
    assert scaler.get_scale() == 8192.0
    # The loop itself applies the scale of the last update.
    pipe.zero_grad()
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    before = scaler.get_scale()
    (F.mse_loss(pipe(x), y) * before).backward()
    for one in mine:
        one.step(scaler=scaler)
    assert scaler.get_scale() == 2 * before


def test_scaler_serves_several_optimizers_and_unscales_first() -> None:
    drive(two_optimizers_and_a_scaler, 3)
