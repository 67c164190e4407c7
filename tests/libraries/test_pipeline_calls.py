"""``pipe(x)`` and its backward: undone calls, freed memory, and recovery by a spare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ._jobs import drive, drive_with_deaths, kill, on, small_model
from ._pipelines import Failing, PassOn, assert_equal_gradients, make_pipe


def graphs() -> int:
    """Return the micro-batches for which stages of this worker keep state for the backward."""
    from torch_ucx_rpc.pipeline import _host

    return sum(len(stage.graphs) for one in list(_host._hosts.values()) for stage in one.stages.by_index.values())


def fail_on_the_way_back() -> None:
    from torch_ucx_rpc.pipeline import StageError

    workers = ["worker1", "worker2", "worker0"]
    pipe = make_pipe([PassOn(), Failing(), nn.Linear(8, 4)], workers)
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    good = pipe.step(x, target=y)
    pipe.zero_grad()
    bad = x.clone()
    # When this micro-batch fails, the backward of the others is over.
    bad[0] = -200.0
    with pytest.raises(StageError, match=r"stage 1 on worker 'worker2' failed in the backward of micro-batch 0"):
        pipe(bad).sum().backward()
    assert all(gradient is None for gradient in pipe.gradients().values())
    assert [on(worker, graphs) for worker in workers] == [0, 0, 0]
    assert torch.equal(pipe.step(x, target=y), good)
    # The gradients of an earlier step remain.
    earlier = pipe.gradients()
    with pytest.raises(StageError, match="no way back"):
        pipe(bad).sum().backward()
    assert all(torch.equal(gradient, earlier[name]) for name, gradient in pipe.gradients().items())


def test_a_failed_backward_is_undone() -> None:
    drive(fail_on_the_way_back, 3)


def differentiate_twice() -> None:
    pipe = make_pipe(small_model())
    x = torch.randn(8, 8, requires_grad=True)
    # The gradient that arrives after sum() is a constant.
    for loss in (torch.sum, lambda output: output.square().sum()):
        [gradient] = torch.autograd.grad(loss(pipe(x)), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            (x.sum() + gradient.square().sum()).backward()
        # Without a graph of the gradient everything is as usual.
        [again] = torch.autograd.grad(loss(pipe(x)), x)
        assert torch.equal(again, gradient)
        assert not again.requires_grad
    # An input without a gradient has none to differentiate.
    with pytest.warns(UserWarning, match="create_graph"):
        pipe(x.detach()).sum().backward(create_graph=True)


def test_a_call_has_no_second_derivative() -> None:
    drive(differentiate_twice, 3)


def call_and_drop() -> None:
    from torch_ucx_rpc.pipeline import StageError

    pipe = make_pipe([PassOn(), Failing(), nn.Linear(8, 4)], ["worker1", "worker2", "worker0"])
    for _ in range(4):
        pipe(torch.randn(8, 8))
    # Each call frees the memory of earlier calls whose outputs were dropped.
    assert on("worker1", graphs) <= 4
    pipe.gradients()
    assert [on(worker, graphs) for worker in ("worker0", "worker1", "worker2")] == [0, 0, 0]
    with pytest.raises(StageError, match="too much"):
        pipe(torch.full((8, 8), 200.0))
    assert [on(worker, graphs) for worker in ("worker0", "worker1", "worker2")] == [0, 0, 0]


def test_calls_whose_output_is_dropped_keep_nothing() -> None:
    drive(call_and_drop, 3)


def trained(folder: str, spares: list[str]) -> Any:
    pipe = make_pipe(small_model(), spares=spares)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    pipe.save(folder)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        optimizer.zero_grad()
        pipe.step(torch.randn(8, 8, generator=generator), target=torch.randn(8, 4, generator=generator))
        optimizer.step()
    return pipe, optimizer


def lose_between_calls(folder: str) -> None:
    from torch_ucx_rpc.pipeline import PipelineError, StageLostError

    pipe, _ = trained(folder, ["worker3", "worker4"])
    model = small_model()
    x = torch.randn(8, 8)
    kept = pipe(x)
    model.load_state_dict(pipe.state_dict())
    kill("worker2")
    # A forward runs on a spare, and so does its backward.
    pipe.zero_grad()
    out = pipe(x)
    expected = torch.cat([model(part) for part in x.tensor_split(4)])
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    assert_equal_gradients(pipe, model)
    assert pipe.workers == ["worker1", "worker3"]
    # After such a backward no step can be repeated, so the journal keeps no batch.
    entries = len(pipe._recovery._checkpoints[-1].journal)
    del out
    pipe(x)
    assert len(pipe._recovery._checkpoints[-1].journal) == entries
    with pytest.raises(PipelineError, match=r"a worker was lost, or replaced, since.*call the pipeline again"):
        kept.sum().backward()
    # If a worker dies in a backward, that is an error, and the next call uses a spare.
    pipe.save(folder + "-again")
    out = pipe(x)
    kill("worker3")
    with pytest.raises(StageLostError, match="worker3"):
        out.sum().backward()
    assert torch.equal(pipe(x), torch.cat([model(part) for part in x.tensor_split(4)]))
    assert pipe.workers == ["worker1", "worker4"]


def test_a_call_and_its_backward_run_on_a_spare(tmp_path: Path) -> None:
    drive_with_deaths(lose_between_calls, 5, (2, 3), str(tmp_path / "ckpt"))


def ask_after_losses(folder: str) -> None:
    pipe, optimizer = trained(folder, ["worker3", "worker4", "worker5"])
    gradients, state, moments = pipe.gradients(), pipe.state_dict(), optimizer.state_dict()["state"]

    def lose_the_last() -> None:
        kill(pipe.workers[-1])

    def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    lose_the_last()
    same(pipe.gradients(), gradients)
    lose_the_last()
    same(pipe.state_dict(), state)
    lose_the_last()
    later = pipe.optimizer(torch.optim.SGD, lr=0.5)
    assert pipe.workers == ["worker1", "worker5"]
    same(
        {name: one["momentum_buffer"] for name, one in optimizer.state_dict()["state"].items()},
        {name: one["momentum_buffer"] for name, one in moments.items()},
    )
    later.step()
    pipe.synchronize()


def test_a_spare_answers_every_request_to_a_pipeline(tmp_path: Path) -> None:
    drive_with_deaths(ask_after_losses, 6, (2, 3, 4), str(tmp_path / "ckpt"))


def load_after_losses(folder: str) -> None:
    pipe, optimizer = trained(folder, ["worker3", "worker4", "worker5"])
    other = small_model(5).state_dict()
    state = optimizer.state_dict()
    kill("worker2")
    pipe.load_state_dict(other)
    kill("worker3")
    found = optimizer.state_dict()
    for name, one in state["state"].items():
        assert torch.equal(found["state"][name]["momentum_buffer"], one["momentum_buffer"])
    for one in state["state"].values():
        one["momentum_buffer"].fill_(7.0)
    optimizer.load_state_dict(state)
    kill("worker4")
    pipe.synchronize()
    assert pipe.workers == ["worker1", "worker5"]
    assert all((one["momentum_buffer"] == 7.0).all() for one in optimizer.state_dict()["state"].values())
    assert all(torch.equal(value, other[name]) for name, value in pipe.state_dict().items())


def test_loaded_states_survive_the_loss_of_a_worker(tmp_path: Path) -> None:
    drive_with_deaths(load_after_losses, 6, (2, 3, 4), str(tmp_path / "ckpt"))
