"""Values that go between stages, and that the driver gets back from several micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from torch_ucx_rpc.pipeline._values import merge

from ._jobs import drive, reference_step
from ._pipelines import make_pipe


def test_leaves_that_differ_between_micro_batches_become_a_list() -> None:
    one = torch.ones(2, 3)
    assert merge([{"rows": 1, "x": None}, {"rows": 2, "x": None}]) == {"rows": [1, 2], "x": None}
    assert merge([{"flag": 1}, {"flag": True}]) == {"flag": [1, True]}
    # Neither a None and a tensor nor tensors of different widths can be joined.
    assert merge([(None,), (one,)])[0] == [None, one]
    assert merge([(one,), (None,)])[0] == [one, None]
    assert [part.shape for part in merge([one, torch.ones(2, 4)])] == [(2, 3), (2, 4)]
    assert [part.shape for part in merge([one, torch.ones(())])] == [(2, 3), ()]
    arrays = merge([(one.numpy(),), (one.numpy(),)])[0]
    assert [type(part).__name__ for part in arrays] == ["ndarray", "ndarray"]


class Telling(nn.Module):
    """A module that also returns its number of rows, and one more tensor if a value exceeds 100."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x)
        return {"rows": len(x), "y": y, **({"more": y} if (x > 100).any() else {})}


def call_with_different_values() -> None:
    pipe = make_pipe([nn.Identity(), Telling()])
    model = Telling()
    x = torch.randn(10, 8)
    out = pipe(x)
    assert out["rows"] == [3, 3, 2, 2]
    expected = torch.cat([model(part)["y"] for part in x.tensor_split(4)])
    assert torch.equal(out["y"], expected)
    out["y"].sum().backward()
    expected.sum().backward()
    assert torch.equal(pipe.gradients()["1.inner.weight"], model.inner.weight.grad)
    x[0] = 200.0
    pipe.zero_grad()
    model.zero_grad()
    parts = pipe(x)
    assert [sorted(part) for part in parts] == [["more", "rows", "y"], *[["rows", "y"]] * 3]
    (parts[0]["more"].sum() + parts[3]["y"].sum()).backward()
    (model(x[:3])["more"].sum() + model(x[8:])["y"].sum()).backward()
    torch.testing.assert_close(pipe.gradients()["1.inner.weight"], model.inner.weight.grad)


def test_differing_micro_batches_keep_gradients_in_place() -> None:
    drive(call_with_different_values, 3)


@dataclasses.dataclass(frozen=True)
class Hidden:
    """A dataclass with tensors and a number, which stages pass on."""

    x: torch.Tensor
    scale: float
    skipped: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    size: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.x))


class GivesHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)

    def forward(self, given: Any) -> Hidden:
        x = given.x if isinstance(given, Hidden) else given
        y = self.inner(x)
        return Hidden(y, 0.5, {"x": torch.tanh(y)})


class TakesHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(8, 4)

    def forward(self, given: Hidden) -> torch.Tensor:
        assert given.size == len(given.x)
        return self.inner(given.x * given.scale + given.skipped["x"])


def train_with_dataclasses() -> None:
    pipe = make_pipe([GivesHidden(), TakesHidden()])
    first, last = GivesHidden(), TakesHidden()
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    loss = pipe.step(x, target=y)
    assert torch.equal(loss, reference_step(lambda x: last(first(x)), F.mse_loss, 4, x, target=y))
    assert torch.equal(pipe.gradients()["0.inner.weight"], first.inner.weight.grad)
    # A dataclass may also be the batch and the output.
    calling = make_pipe([GivesHidden(), GivesHidden()])
    source = torch.randn(8, 8, requires_grad=True)
    out = calling(Hidden(source, 1.0))
    assert type(out) is Hidden
    assert out.x.shape == (8, 8)
    (out.x + out.skipped["x"]).sum().backward()
    found, source.grad = source.grad, None
    again = GivesHidden()(GivesHidden()(source))
    (again.x + again.skipped["x"]).sum().backward()
    torch.testing.assert_close(found, source.grad)


def test_dataclasses_between_stages_carry_gradients() -> None:
    drive(train_with_dataclasses, 3)


class Hiding:
    """An object in which no stage looks for tensors."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x)
        return y, [Hiding(y if (x > 100).any() else y.detach())]


class Seeks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, given: Any) -> torch.Tensor:
        y, [hiding] = given
        return self.inner(y + hiding.x)


def hide_a_tensor() -> None:
    from torch_ucx_rpc.pipeline import StageError

    pipe = make_pipe([Hides(), Seeks()])
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    # An object may have tensors that want no gradient.
    pipe.step(x, target=y)
    with pytest.raises(StageError, match=r"stage 0 .* inside a Hiding"):
        pipe.step(x + 200, target=y)
    pipe.evaluate(x + 200, target=y)


def test_a_gradient_that_could_not_come_back_is_an_error() -> None:
    drive(hide_a_tensor, 3)
