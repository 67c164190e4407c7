"""Checkpoints of optimizers: torch's own, local or behind an RRef, and those of pipelines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ._jobs import drive, on, reference_step, small_model
from ._pipelines import make_pipe
from .test_checkpoint import forget_the_most, memory, train

Make = Callable[[Any], torch.optim.Optimizer]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def no_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.1)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


def adam_with_a_tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(0.1))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x = torch.linspace(-1, 1, 64).reshape(8, 8)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(x).square().mean()
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(loss)


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("make", [adam, momentum, no_momentum, adafactor, lbfgs, adam_with_a_tensor])
def test_a_loaded_optimizer_goes_on_as_the_saved_one(tmp_path, make, steps_before):
    from torch_ucx_rpc import checkpoint

    model = small_model()
    optimizer = make(model.parameters())
    learn(model, optimizer, 3)
    checkpoint.save({"model": model, "optim": optimizer}, tmp_path)
    other = small_model(1)
    loaded = make(other.parameters())
    learn(other, loaded, steps_before)
    loaded.param_groups[0]["lr"] *= 0.5
    checkpoint.load({"model": other, "optim": loaded}, tmp_path)
    assert loaded.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    assert loaded.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for one in ((model, optimizer), (other, loaded)):
        learn(*one, 2)
    assert_same(other, model)


def test_loading_an_empty_state_empties_the_optimizer(tmp_path):
    from torch_ucx_rpc import checkpoint

    model = small_model()
    optimizer = adam(model.parameters())
    checkpoint.save({"optim": optimizer}, tmp_path)
    learn(model, optimizer, 1)
    checkpoint.load({"optim": optimizer}, tmp_path)
    assert not optimizer.state


def test_numbers_load_as_tensors_and_tensors_as_numbers(tmp_path):
    from torch_ucx_rpc import checkpoint

    for first, second in ((adam, adam_with_a_tensor), (adam_with_a_tensor, adam)):
        saved = first(small_model().parameters())
        saved.param_groups[0]["lr"] *= 2
        checkpoint.save({"optim": saved}, tmp_path)
        loaded = second(small_model().parameters())
        checkpoint.load({"optim": loaded}, tmp_path)
        assert float(loaded.param_groups[0]["lr"]) == pytest.approx(0.2)


def make_model(seed: int) -> nn.Module:
    return small_model(seed)


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    return adam(model.local_value().parameters())


def learn_there(model: Any, optimizer: Any, steps: int) -> dict[str, torch.Tensor]:
    learn(model.local_value(), optimizer.local_value(), steps)
    return dict(model.local_value().state_dict())


def load_behind_rrefs(folder: str) -> None:
    from torch_ucx_rpc import checkpoint

    model = rpc.remote("worker1", make_model, args=(0,))
    optimizer = rpc.remote("worker1", make_optimizer, args=(model,))
    on("worker1", learn_there, model, optimizer, 3)
    checkpoint.save({"model": model, "optim": optimizer}, folder)
    other = rpc.remote("worker1", make_model, args=(1,))
    fresh = rpc.remote("worker1", make_optimizer, args=(other,))
    checkpoint.load({"model": other, "optim": fresh}, folder)
    expected = on("worker1", learn_there, model, optimizer, 2)
    found = on("worker1", learn_there, other, fresh, 2)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    del model, optimizer, other, fresh


def test_an_optimizer_behind_an_rref_is_filled_where_it_is(tmp_path):
    drive(load_behind_rrefs, 2, str(tmp_path))


# ------------------------------------------------------------------------------------------------- groups


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": [first]}, {"params": rest, "lr": 0.01}]


def test_another_number_of_groups_is_refused_before_any_change(tmp_path):
    from torch_ucx_rpc import checkpoint

    for saved, wanted in ((1, 2), (2, 1)):
        made = {}
        for number in (saved, wanted):
            model = small_model(number)
            optimizer = momentum(two_groups(model) if number == 2 else model.parameters())
            learn(model, optimizer, 1)
            made[number] = {"model": model, "optim": optimizer}
        checkpoint.save(made[saved], tmp_path)
        before = {name: value.clone() for name, value in made[wanted]["model"].state_dict().items()}
        with pytest.raises(
            checkpoint.CheckpointError, match=f"'optim'.* {saved} parameter groups?, and this optimizer has {wanted}"
        ):
            checkpoint.load(made[wanted], tmp_path)
        assert all(torch.equal(before[name], value) for name, value in made[wanted]["model"].state_dict().items())


def refuse_groups_of_a_pipeline(folder: str) -> None:
    from torch_ucx_rpc import checkpoint

    pipe = make_pipe(small_model())
    one = pipe.optimizer(torch.optim.SGD, lr=0.1)
    checkpoint.save({"model": pipe, "optim": one}, folder)
    other = make_pipe(small_model(1))
    before = other.state_dict()
    parameters = list(other.parameters())
    two = other.optimizer(torch.optim.SGD, [{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)
    with pytest.raises(checkpoint.CheckpointError, match=r"'optim'.* 1 parameter group, and this optimizer has 2"):
        checkpoint.load({"model": other, "optim": two}, folder)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    checkpoint.save({"model": other, "optim": two}, Path(folder, "two"))
    with pytest.raises(checkpoint.CheckpointError, match=r"'optim'.* 2 parameter groups, and this optimizer has 1"):
        checkpoint.load({"model": pipe, "optim": one}, Path(folder, "two"))


def test_other_groups_of_a_pipelines_optimizer_are_refused(tmp_path):
    drive(refuse_groups_of_a_pipeline, 3, str(tmp_path))


def refuse_numbers(folder: str) -> None:
    """Load the state of an optimizer in one process, which numbers the parameters and does not name them."""
    from torch_ucx_rpc import checkpoint

    model = small_model()
    optimizer = momentum(model.parameters())
    learn(model, optimizer, 1)
    checkpoint.save({"model": model, "optim": optimizer}, folder)
    pipe = make_pipe(small_model(1), ["worker0", "worker1"])
    ours = pipe.optimizer(torch.optim.SGD, lr=1.0, momentum=0.9)
    before = pipe.state_dict()
    with pytest.raises(checkpoint.CheckpointError, match=r"'optim'.*names"):
        checkpoint.load({"model": pipe, "optim": ours}, folder)
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
    with pytest.raises(ValueError, match="names"):
        ours.load_state_dict(optimizer.state_dict())
    assert ours.param_groups[0]["lr"] == 1.0
    ours.load_state_dict(get_optimizer_state_dict(model, optimizer))
    assert ours.param_groups[0]["lr"] == 0.1
    assert len(ours.state_dict()["state"]) == 8
    # A dict without a state, such as a filtered one, brings only the groups.
    ours.load_state_dict({"param_groups": [{"lr": 0.2}]})
    assert ours.param_groups[0]["lr"] == 0.2
    assert ours.state_dict()["state"] == {}


def test_a_state_without_the_names_of_parameters_is_refused(tmp_path):
    drive(refuse_numbers, 2, str(tmp_path))


# ------------------------------------------------------------------------------------- optimizers of pipelines


def go_on_with_a_tensor(folder: str) -> None:
    """Train with learning rates that are tensors, which a scheduler changes in place."""
    x, y = torch.linspace(-1, 1, 64).reshape(8, 8), torch.zeros(8, 4)
    some = [(x, y)] * 6
    pipe = make_pipe(small_model(), ["worker0", "worker1"])
    optimizer = pipe.optimizer(torch.optim.Adam, lr=torch.tensor(0.1))
    train(pipe, optimizer, some[:2])
    pipe.save(folder)
    optimizer.param_groups[0]["lr"].mul_(0.5)
    train(pipe, optimizer, some[:1])
    other = make_pipe(small_model(1), ["worker1", "worker0"])
    for rate in (torch.tensor(1.0), 1.0):
        loaded = other.optimizer(torch.optim.Adam, lr=rate)
        other.load(folder)
        assert torch.equal(torch.as_tensor(loaded.param_groups[0]["lr"]), torch.tensor(0.1))
        other._model.optimizers.remove(loaded)
    pipe.load(folder)
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.1))


def test_a_learning_rate_that_is_a_tensor_is_loaded(tmp_path):
    drive(go_on_with_a_tensor, 2, str(tmp_path))


def change_it_behind_a_step() -> None:
    x, y = torch.linspace(-1, 1, 64).reshape(8, 8), torch.zeros(8, 4)
    model = small_model()
    pipe = make_pipe(model, ["worker0", "worker1"])
    mine = pipe.optimizer(torch.optim.SGD, lr=torch.tensor(0.1))
    theirs = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    for _ in range(10):
        assert torch.equal(pipe.step(x, target=y), reference_step(model, nn.functional.mse_loss, 4, x, target=y))
        for optimizer in (mine, theirs):
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            rate.mul_(0.5)
            optimizer.zero_grad()


def test_learning_rate_is_saved_as_it_was_in_the_step():
    drive(change_it_behind_a_step, 2)


def grow(folder: str) -> None:
    layers = 64
    own = 3 * layers * 2**20
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2 * layers)))
    pipe = make_pipe(model, chunks=1, loss=nn.functional.mse_loss)
    optimizer = pipe.optimizer(torch.optim.Adam)
    train(pipe, optimizer, [(torch.zeros(1, 512), torch.zeros(1, 512))])
    pipe.synchronize()
    # First save another pipeline, so that imports and freed memory do not count.
    small = make_pipe(small_model())
    small.save(folder)
    small.load(folder)
    for action in (pipe.save, pipe.load):
        workers = ("worker0", "worker1", "worker2")
        for worker in workers:
            on(worker, forget_the_most)
        before = {worker: on(worker, memory, "VmRSS") for worker in workers}
        action(folder)
        for worker in workers:
            grown = on(worker, memory, "VmHWM") - before[worker]
            assert grown < 0.1 * own, f"{worker} has grown by {grown / own:.3f} of a part in {action.__name__}"


def test_no_worker_holds_the_state_of_an_optimizer_twice(tmp_path):
    drive(grow, 3, str(tmp_path))
