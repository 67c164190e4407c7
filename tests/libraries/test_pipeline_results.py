"""The results of a step beside its loss: outputs, losses of micro-batches, and losses with a count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from ._jobs import drive, drive_with_deaths, kill, on, small_model
from ._pipelines import Failing, assert_equal_gradients, make_pipe


def get_outputs_and_losses() -> None:
    for schedule in ("1F1B", "zero-bubble", "0F1,0F0,0B0,0B1\n1F1,1F0,1B0,1B1"):
        pipe, model = make_pipe(small_model(), chunks=2, schedule=schedule), small_model()
        x, y = torch.randn(7, 8), torch.randn(7, 4)
        halves = list(zip(x.tensor_split(2), y.tensor_split(2), strict=True))
        expected = [F.mse_loss(model(some), wanted).detach() for some, wanted in halves]
        losses: list[Any] = ["of the step before"]
        loss, output = pipe.step(x, target=y, losses=losses, return_outputs=True)
        assert losses == expected
        assert torch.equal(loss, (expected[0] + expected[1]) / 2)
        assert torch.equal(output, torch.cat([model(some) for some, _ in halves]))
        assert not output.requires_grad
        gradients = pipe.gradients()
        assert pipe.evaluate(x, target=y, losses=losses, return_outputs=True)[1].equal(output)
        assert losses == expected
        pipe.zero_grad()
        # Without outputs, a step has the same loss and gradients.
        assert torch.equal(pipe.step(x, target=y), loss)
        assert all(torch.equal(one, gradients[name]) for name, one in pipe.gradients().items())
    with pytest.raises(TypeError, match=r"losses must be a list to fill; got \(\)"):
        pipe.step(x, target=y, losses=())


def test_step_returns_outputs_and_losses(backend):
    drive(get_outputs_and_losses, 3, backend=backend)


class Tokens(nn.Module):
    """Scores of ten words for each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 8)
        self.out = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(x).tanh())


def loss_of_tokens(scores: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum")
    return total, (target != -1).sum()


def mean_over_tokens(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total, count = loss_of_tokens(model(x), y)
    return total / count


def batch_of_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Return eight sentences of various lengths. Half of the micro-batches have few tokens. The first of four
    micro-batches has none."""
    x = torch.randint(10, (8, 12))
    y = torch.randint(10, (8, 12))
    for sentence, length in enumerate((0, 0, 12, 3, 1, 7, 12, 12)):
        y[sentence, length:] = -1
    return x, y


def assert_close_gradients(pipe: Any, model: nn.Module) -> None:
    found = pipe.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)


def train_by_tokens() -> None:
    for schedule in ("1F1B", "zero-bubble"):
        for rematerialize in (False, True):
            model = nn.Sequential(*Tokens().children())
            pipe = make_pipe(
                nn.Sequential(*Tokens().children()),
                loss_fn=loss_of_tokens,
                loss=None,
                schedule=schedule,
                rematerialize=rematerialize,
            )
            # Gradients add up over three steps. In the first step the pipeline does not know yet that losses have
            # counts.
            for _ in range(3):
                x, y = batch_of_tokens()
                losses: list[Any] = []
                loss = pipe.step(x, target=y, losses=losses)
                expected = mean_over_tokens(model, x, y)
                expected.backward()
                torch.testing.assert_close(loss, expected.detach())
                assert [count for _, count in losses] == [0, 15, 8, 24]
                assert_close_gradients(pipe, model)
                torch.testing.assert_close(pipe.evaluate(x, target=y), expected.detach())
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            torch.testing.assert_close(pipe.clip_grad_norm_(1e-3), norm)
            assert_close_gradients(pipe, model)
            with pytest.raises(RuntimeError, match="the counts that the loss returned with its sums are 0"):
                pipe.step(x, target=torch.full_like(y, -1))
            # The failed step is undone, and the gradients of earlier steps remain.
            assert_close_gradients(pipe, model)


def test_a_loss_with_counts_is_a_mean_over_the_batch(backend):
    drive(train_by_tokens, 3, backend=backend)


def sum_of_squares(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.mse_loss(output, target, reduction="sum"), output.numel()


def fail_between_two_counted_steps() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Failing())
    pipe = make_pipe(model, loss=sum_of_squares, chunks=2)
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    wrong = torch.full((6, 8), 1e4)
    pipe.step(x, target=y)
    with pytest.raises(RuntimeError, match="too much of it"):
        pipe.step(wrong, target=y)
    F.mse_loss(model(x), y).backward()
    assert_close_gradients(pipe, model)


def test_a_failed_step_leaves_the_gradients_of_a_counted_one(backend):
    drive(fail_between_two_counted_steps, 3, backend=backend)


def lose_a_worker_between_counted_steps(folder: str) -> None:
    pipe = make_pipe(small_model(), loss=sum_of_squares, spares=["worker3"], schedule="zero-bubble")
    other = make_pipe(small_model(), ["worker0", "worker1"], loss=sum_of_squares)
    pipe.save(folder)
    optimizers = [one.optimizer(torch.optim.SGD, lr=0.1) for one in (pipe, other)]
    for number in range(6):
        x, y = torch.randn(6, 8), torch.randn(6, 4)
        if number == 3:
            # The gradients of a step are on the workers, not yet multiplied by their factor.
            kill("worker2")
        losses: list[Any] = []
        loss = pipe.step(x, target=y, losses=losses)
        assert sum(count for _, count in losses) == 24
        torch.testing.assert_close(loss, other.step(x, target=y))
        if number % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert pipe.workers == ["worker1", "worker3"]
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name])


def test_a_spare_repeats_counted_steps(tmp_path):
    drive_with_deaths(lose_a_worker_between_counted_steps, 4, (2,), str(tmp_path))


def loss_of_two_kinds(output: torch.Tensor, target: torch.Tensor) -> Any:
    loss = F.mse_loss(output, target)
    return (loss, 1) if (target > 0).all() else loss


def return_counts_sometimes() -> None:
    x, y = torch.randn(8, 8), torch.ones(8, 4)
    for first, second in ((-y, y), (torch.cat([y[:4], -y[:4]]),) * 2):
        pipe = make_pipe(small_model(), loss=loss_of_two_kinds)
        with pytest.raises(RuntimeError, match=r"the loss must return \(sum, count\) always or never"):
            [pipe.step(x, target=target) for target in (first, second)]


def test_a_loss_has_counts_always_or_never(backend):
    drive(return_counts_sometimes, 3, backend=backend)


def use_torchs_names() -> None:
    pipe = make_pipe(small_model(), loss=None, chunks=None, n_microbatches=3, loss_fn=F.l1_loss)
    assert pipe.chunks == 3
    assert pipe.loss is F.l1_loss
    with pytest.raises(ValueError, match="n_microbatches is another name of chunks: give one of them; got chunks=2"):
        make_pipe(small_model(), chunks=2, n_microbatches=2)
    with pytest.raises(ValueError, match="loss_fn is another name of loss: give one of them"):
        make_pipe(small_model(), loss_fn=F.l1_loss)
    with pytest.raises(ValueError, match="n_microbatches must be"):
        make_pipe(small_model(), chunks=None, n_microbatches=0)


def of_two_parts(output: torch.Tensor, target: torch.Tensor) -> Any:
    return F.mse_loss(output, target), output.square().mean()


def without_a_gradient(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.tensor(F.mse_loss(output, target).item())


def refuse_losses() -> None:
    from torch_ucx_rpc.pipeline import StageError

    x, y = torch.randn(8, 8), torch.randn(8, 4)
    for loss, said in ((of_two_parts, "two values with a gradient"), (without_a_gradient, "train nothing")):
        pipe = make_pipe(small_model(), loss=loss)
        with pytest.raises(StageError, match=said):
            pipe.step(x, target=y)
    assert pipe.evaluate(x, target=y) > 0


def test_a_loss_that_trains_nothing_is_refused(backend):
    drive(refuse_losses, 3, backend=backend)


def constant_without_targets(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target) if (target > 0).any() else torch.zeros(())


def train_with_a_constant_loss() -> None:
    x, y = torch.randn(8, 8), torch.ones(8, 4)
    y[2:4] = 0.0
    for schedule in ("1F1B", "zero-bubble"):
        pipe, model = make_pipe(small_model(), loss=constant_without_targets, schedule=schedule), small_model()
        losses: list[Any] = []
        pipe.step(x, target=y, losses=losses)
        assert [bool(loss) for loss in losses] == [True, False, True, True]
        for part, target in zip(x.split(2), y.split(2), strict=True):
            if (loss := constant_without_targets(model(part), target)).requires_grad:
                (loss / 4).backward()
        assert_equal_gradients(pipe, model)


def test_the_loss_of_one_micro_batch_may_be_a_constant(backend):
    drive(train_with_a_constant_loss, 3, backend=backend)


class Weighted(nn.CrossEntropyLoss):
    """A loss with a tensor, which knows whether it was moved to a device."""

    def __init__(self) -> None:
        super().__init__(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.was_moved = False

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.was_moved = True
        return super()._apply(*args, **kwargs)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert self.was_moved
        return super().forward(output, target)


def losses_here() -> list[Any]:
    """Return the losses that this worker's stages have."""
    from torch_ucx_rpc.pipeline import _host

    return [stage.loss for one in list(_host._hosts.values()) for stage in one.stages.by_index.values()]


def weigh_classes() -> None:
    x, y = torch.randn(8, 8), torch.arange(8) % 4
    loss = Weighted()
    for worker in ("worker1", "worker0"):
        pipe = make_pipe(small_model(), [worker], loss=loss, chunks=1)
        torch.testing.assert_close(pipe.step(x, target=y), F.cross_entropy(small_model()(x), y, weight=loss.weight))
        pipe.close()
    # Only the last stage uses the loss.
    pipe = make_pipe(small_model(), ["worker0", "worker1"], loss=loss)
    assert [one.was_moved for worker in ("worker0", "worker1") for one in on(worker, losses_here)] == [False, True]
    assert not loss.was_moved


def test_a_loss_with_tensors_moves_to_the_stages_device(backend):
    drive(weigh_classes, 2, backend=backend)


def test_torchs_names_of_arguments_are_accepted():
    drive(use_torchs_names, 3)
