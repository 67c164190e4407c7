"""Training through a pipeline has bit for bit the results of one process with the same micro-batches."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from ._jobs import drive, on, reference_step, small_model
from ._pipelines import assert_equal_gradients, make_pipe

SCHEDULES = ("gpipe", "1F1B", "interleaved", "zero-bubble")
# Stage 3 is on the first worker again, which forms a V, as in torch's ZBVZeroBubble.
V_SHAPED = "0F0,3F0,3B0,0F1,3F1,3I1,0I0,3W1,0W0,0B1\n1F0,2F0,2B0,1F1,2F1,2B1,1I0,1B1,1W0\n"


def assert_equal_states(pipe: Any, model: nn.Module) -> None:
    found, expected = pipe.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def train_side_by_side(
    pipe: Any, model: nn.Module, steps: int = 3, chunks: int = 4, size: int = 8, **order: bool
) -> None:
    """Train both with AdamW. Compare the losses and gradients of each step, and all values at the end."""
    mine = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator)
        loss = pipe.step(x, target=y)
        assert torch.equal(loss, reference_step(model, F.mse_loss, chunks, x, target=y, **order))
        assert_equal_gradients(pipe, model)
        mine.step()
        mine.zero_grad()
        theirs.step()
        theirs.zero_grad()
    assert_equal_states(pipe, model)


def train_with_every_schedule() -> None:
    for schedule in (*SCHEDULES, V_SHAPED, "ZBVZeroBubble", "LoopedBFS"):
        chunks = 2 if schedule is V_SHAPED else 4
        for rematerialize in (False, True):
            pipe = make_pipe(small_model(), schedule=schedule, chunks=chunks, rematerialize=rematerialize)
            # torch's schedule runs the backwards from the last micro-batch to the first.
            train_side_by_side(pipe, small_model(), chunks=chunks, last_first=schedule == "LoopedBFS")
            pipe.close()


def test_every_schedule_is_bit_equal_to_one_process(backend):
    drive(train_with_every_schedule, 3, backend=backend)


def train_where_the_driver_is_a_stage() -> None:
    pipe = make_pipe(small_model(), ["worker0", "worker1"], schedule="interleaved")
    train_side_by_side(pipe, small_model())
    alone = make_pipe(small_model(), ["worker0"])
    train_side_by_side(alone, small_model())


def test_the_driver_may_be_one_of_the_workers(backend):
    drive(train_where_the_driver_is_a_stage, 2, backend=backend)


def train_batches_of_all_sizes() -> None:
    for schedule in ("1F1B", "interleaved", "zero-bubble"):
        pipe, model = make_pipe(small_model(), schedule=schedule), small_model()
        for size in (8, 10, 3, 1, 64, 7):
            x, y = torch.randn(size, 8), torch.randn(size, 4)
            loss = pipe.step(x, target=y)
            assert torch.equal(loss, reference_step(model, F.mse_loss, min(4, size), x, target=y)), size
        assert_equal_gradients(pipe, model)


def test_batches_may_have_any_size_at_any_time():
    drive(train_batches_of_all_sizes, 3)


class CountsThreads(nn.Module):
    """A module that doubles its input, and checks the number of threads that OpenMP would give a layer."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        # Ask the library that torch has loaded: asking torch for the number would set it.
        assert ctypes.CDLL("libgomp.so.1").omp_get_max_threads() == 1
        return value * 2


def compute_with_one_thread() -> None:
    # Workers of the tests compute with one thread each.
    pipe = make_pipe([nn.Linear(8, 8), CountsThreads(), CountsThreads()], ["worker1", "worker2", "worker0"])
    for _ in range(5):
        pipe.step(torch.ones(8, 8), target=torch.ones(8, 8))


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="with one core there is one thread anyway")
def test_stages_compute_with_the_threads_of_their_process(backend):
    drive(compute_with_one_thread, 3, backend=backend)


class TiedModel(nn.Module):
    """A model whose embedding weights are also those of the output, as in language models. Its middle uses them too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


def tied_sequence() -> nn.Sequential:
    torch.manual_seed(0)
    first, second, third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    third.weight = first.weight
    return nn.Sequential(nn.Linear(8, 6), first, nn.Tanh(), second, nn.Tanh(), third, nn.Linear(6, 4))


def train_tied() -> None:
    for schedule in ("gpipe", "1F1B", "interleaved", "zero-bubble"):
        pipe, model = make_pipe(tied_sequence(), schedule=schedule), tied_sequence()
        train_side_by_side(pipe, model)
        norm = pipe.clip_grad_norm_(1.0)
        assert norm == 0.0


def test_tied_weights_are_one_parameter():
    drive(train_tied, 3)


def flat_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def train_tied_language_model() -> None:
    from torch_ucx_rpc.pipeline import SplitPoint

    tokens = torch.randint(11, (8, 5))
    points = {"layers.1": SplitPoint.BEGINNING}
    pipe = make_pipe(TiedModel(), split_spec=points, sample=tokens, loss=flat_loss)
    model = TiedModel()
    mine, theirs = pipe.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    for length in (5, 5, 9, 3):
        tokens = torch.randint(11, (8, length))
        target = torch.randint(11, (8, length))
        loss = pipe.step(tokens, target=target)
        assert torch.equal(loss, reference_step(model, flat_loss, 4, tokens, target=target))
        assert_equal_gradients(pipe, model)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_states(pipe, model)


def test_traced_model_with_tied_weights_trains_on_any_length():
    drive(train_tied_language_model, 3)


class Skipping(nn.Module):
    """A model whose second and third stages use the first one's output. The first and last stages use the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.tanh(self.first(x))
        b = torch.tanh(self.second(a))
        c = torch.tanh(self.third(self.drop(b) + a))
        return self.last(c * a + x)


def train_skipping() -> None:
    from torch_ucx_rpc.pipeline import SplitPoint

    points = dict.fromkeys(("second", "drop", "last"), SplitPoint.BEGINNING)
    workers = ["worker0", "worker1", "worker2", "worker3"]
    for schedule in ("1F1B", "zero-bubble"):
        model = Skipping().eval()
        pipe = make_pipe(Skipping().eval(), workers, split_spec=points, sample=torch.randn(8, 8), schedule=schedule)
        train_side_by_side(pipe, model)
        pipe.train()
        x, y = torch.randn(8, 8), torch.randn(8, 4)
        assert pipe.evaluate(x, target=y) != pipe.evaluate(x, target=y)
        pipe.eval()
        assert pipe.evaluate(x, target=y) == pipe.evaluate(x, target=y)
        by_itself = make_pipe(Skipping().eval(), workers, sample=x, schedule=schedule)
        model = Skipping().eval()
        # In the divided model one stage uses a value twice, and sums its gradients first. So the results differ by
        # rounding.
        torch.testing.assert_close(by_itself.step(x, target=y), reference_step(model, F.mse_loss, 4, x, target=y))
        found = by_itself.gradients()
        torch.testing.assert_close(found, {name: one.grad for name, one in model.named_parameters()})


def test_skip_over_stages_trains_in_1f1b_and_evaluates():
    drive(train_skipping, 4)


class Counting(nn.Module):
    """A model with a batch norm, a buffer that counts, a write into a part of a tensor, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x: torch.Tensor, shift: torch.Tensor, *, factor: torch.Tensor) -> torch.Tensor:
        normed = self.norm(self.first(x))
        self.batches += 1
        parts = torch.zeros_like(normed)
        parts[:, 1:] = normed[:, 1:]
        return self.last(parts * factor + shift)


def train_counting() -> None:
    from torch_ucx_rpc.pipeline import SplitPoint

    x, shift, factor, y = torch.randn(8, 8), torch.randn(8, 8), torch.rand(8, 1), torch.randn(8, 4)
    for rematerialize in (False, True):
        given, model = Counting(), Counting()
        pipe = make_pipe(
            given,
            split_spec={"last": SplitPoint.BEGINNING},
            sample={"x": x, "shift": shift, "factor": factor},
            rematerialize=rematerialize,
        )
        assert all(torch.equal(value, given.state_dict()[name]) for name, value in Counting().state_dict().items())

        def call(x: torch.Tensor, shift: torch.Tensor, factor: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return model(x, shift, factor=factor)

        for args, kwargs in (((x, shift), {}), ((x,), {"shift": shift}), ((), {"shift": shift, "x": x})):
            loss = pipe.step(*args, target=y, factor=factor, **kwargs)
            assert torch.equal(loss, reference_step(call, F.mse_loss, 4, x, shift, factor, target=y))
        assert_equal_gradients(pipe, model)
        assert_equal_states(pipe, model)
        with pytest.raises(TypeError, match=r"forward\(x: .*too many positional arguments"):
            pipe.step(x, x, shift, target=y, factor=factor)


def test_traced_model_has_all_state_and_keyword_arguments():
    drive(train_counting, 3)


class Giving(nn.Module):
    """A module that passes on a tensor, None, a number, and a dict with a tensor that does not want a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return self.inner(x), None, 3, {"mask": mask, "rows": x.shape[0]}


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inner = nn.Linear(8, 4)

    def forward(self, given: Any) -> torch.Tensor:
        x, nothing, number, more = given
        assert nothing is None
        assert number == 3
        assert more["rows"] == len(x)
        return self.inner(x * more["mask"]) * number


def train_with_anything_between() -> None:
    pipe = make_pipe([Giving(), Taking()])
    giving, taking = Giving(), Taking()
    for _ in range(2):
        x, y, mask = torch.randn(8, 8), torch.randn(8, 4), torch.randint(2, (8, 8))
        loss = pipe.step(x, mask=mask, target=y)
        expected = reference_step(lambda x, m: taking(giving(x, m)), F.mse_loss, 4, x, mask, target=y)
        assert torch.equal(loss, expected)
    found = pipe.gradients()
    assert torch.equal(found["0.inner.weight"], giving.inner.weight.grad)
    assert torch.equal(found["1.inner.weight"], taking.inner.weight.grad)


def test_none_numbers_and_dicts_may_go_between_stages(backend):
    drive(train_with_anything_between, 3, backend=backend)


THEIR_CODE = """
import torch
from torch import nn

class Tail(nn.Module):
    def __init__(self, width):
        super().__init__()
        torch.manual_seed(5)
        self.inner = nn.Linear(width, 4)

    def forward(self, x):
        return torch.tanh(self.inner(x))
"""


def install_their_code(folder: str) -> None:
    import sys
    from pathlib import Path

    Path(folder, "their_code.py").write_text(THEIR_CODE, encoding="utf-8")
    sys.path.insert(0, folder)


def a_module_there() -> nn.Module:
    torch.manual_seed(6)
    return nn.Linear(4, 4)


def train_with_other_code(folder: str) -> None:
    from torch_ucx_rpc.pipeline import Built

    on("worker1", install_their_code, folder)
    with pytest.raises(ModuleNotFoundError):
        __import__("their_code")
    rref = rpc.remote("worker2", a_module_there)
    pipe = make_pipe([small_model()[:1], Built("their_code:Tail", width=24), rref], ["worker0", "worker1", "worker2"])
    namespace: dict[str, Any] = {}
    exec(THEIR_CODE, namespace)
    model = nn.Sequential(small_model()[:1], namespace["Tail"](24), a_module_there())
    train_side_by_side(pipe, model)
    assert "Built(their_code:Tail)" in str(pipe)
    del pipe, rref


def test_a_stage_trains_though_only_its_worker_has_its_code(tmp_path):
    drive(train_with_other_code, 3, str(tmp_path))


def with_norm_and_dropout() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.ReLU(inplace=True),
        nn.Linear(16, 4),
    )


def seed(value: int) -> None:
    # Not torch.manual_seed itself: once torch._dynamo is loaded, it is a wrapper that pickle refuses.
    torch.manual_seed(value)


def gradients_and_state(rematerialize: bool) -> tuple[dict[str, Any], dict[str, Any], torch.Tensor]:
    pipe = make_pipe(with_norm_and_dropout(), balance=[4, 2], rematerialize=rematerialize)
    for worker in ("worker1", "worker2"):
        on(worker, seed, 7)
    torch.manual_seed(2)
    loss = pipe.step(torch.randn(16, 8), target=torch.randn(16, 4))
    return pipe.gradients(), pipe.state_dict(), loss


def rematerialize_norms_and_dropout() -> None:
    kept, again = gradients_and_state(False), gradients_and_state(True)
    assert torch.equal(kept[2], again[2])
    for one, other in zip(kept[:2], again[:2], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    # Without random numbers the results also equal those of one process.
    model = with_norm_and_dropout()
    model[3].p = 0.0
    model[4].inplace = False
    pipe = make_pipe(model, balance=[4, 2], rematerialize=True)
    train_side_by_side(pipe, model, size=16)
    x = torch.randn(16, 8)
    with torch.no_grad():
        assert torch.equal(pipe.eval()(x), torch.cat([model.eval()(part) for part in x.tensor_split(4)]))


def test_rematerialization_repeats_dropout_and_counts_once():
    drive(rematerialize_norms_and_dropout, 3)


def clip_schedule_and_cast() -> None:
    pipe, model = make_pipe(small_model()), small_model()
    mine = pipe.optimizer(torch.optim.SGD, lr=0.5, momentum=0.9)
    theirs = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(one, 0.5, total_steps=10) for one in (mine, theirs)]
    for _ in range(6):
        x, y = torch.randn(8, 8), torch.randn(8, 4)
        with torch.autocast("cpu", torch.bfloat16):
            loss = pipe.step(x, target=y)
            expected = reference_step(model, F.mse_loss, 4, x, target=y)
        assert torch.equal(loss, expected)
        norms = [pipe.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)]
        assert torch.equal(*norms)
        assert_equal_gradients(pipe, model)
        for one in (mine, theirs):
            one.step()
            one.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        assert mine.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert_equal_states(pipe, model)
    state = mine.state_dict()
    named = {name: theirs.state[parameter]["momentum_buffer"] for name, parameter in model.named_parameters()}
    assert all(torch.equal(state["state"][name]["momentum_buffer"], value) for name, value in named.items())


def test_clipping_schedulers_and_autocast_do_what_torchs_do():
    drive(clip_schedule_and_cast, 3)


def groups_and_scaler() -> None:
    from torch_ucx_rpc.pipeline import GradScaler

    def groups(model: Any) -> list[dict[str, Any]]:
        named = dict(model.named_parameters())
        return [
            {"params": [value for name, value in named.items() if "bias" in name], "weight_decay": 0.0},
            {"params": [value for name, value in named.items() if "bias" not in name], "weight_decay": 0.3},
        ]

    pipe, model = make_pipe(small_model()), small_model()
    mine = pipe.optimizer(torch.optim.AdamW, groups(pipe), lr=0.1)
    theirs = torch.optim.AdamW(groups(model), lr=0.1)
    scaler = GradScaler(init_scale=1024.0, growth_interval=2)
    for _ in range(3):
        x, y = torch.randn(8, 8), torch.randn(8, 4)
        pipe.step(x, target=y, scaler=scaler)
        reference_step(model, F.mse_loss, 4, x, target=y)
        mine.step(scaler=scaler)
        theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
    assert scaler.get_scale() == 2048.0
    # Scaling by powers of two does not round.
    assert_equal_states(pipe, model)
    pipe.step(torch.full((8, 8), float("inf")), target=torch.zeros(8, 4), scaler=scaler)
    mine.step(scaler=scaler)
    assert scaler.get_scale() == 1024.0
    assert_equal_states(pipe, model)


def test_a_scaler_changes_no_result_of_parameter_groups():
    drive(groups_and_scaler, 3)


def differentiate_calls() -> None:
    model = small_model()
    pipe = make_pipe(model)
    x = torch.randn(10, 8, requires_grad=True)
    pipe(x).square().sum().backward()
    found, x.grad = x.grad, None
    torch.cat([model(part) for part in x.tensor_split(4)]).square().sum().backward()
    assert torch.equal(found, x.grad)
    assert_equal_gradients(pipe, model)

    # A loop over the model: three calls wait for their backward at once.
    square = nn.Linear(8, 8)
    loop = make_pipe(nn.Sequential(square, nn.Tanh()), chunks=1)
    hidden = expected = torch.randn(4, 8)
    for _ in range(3):
        hidden, expected = loop(hidden), torch.tanh(square(expected))
    hidden.sum().backward()
    expected.sum().backward()
    for name, gradient in loop.gradients().items():
        torch.testing.assert_close(gradient, dict(nn.Sequential(square).named_parameters())[name].grad)

    with pytest.raises(RuntimeError, match="second backward"):
        hidden.sum().backward()
    # Outputs without a backward are released.
    for _ in range(3):
        pipe(x)
    pipe.synchronize()
    pipe(x).sum().backward()
    assert [on(worker, graphs) for worker in ("worker1", "worker2")] == [0, 0]
    with torch.no_grad():
        assert not pipe(x).requires_grad


def graphs() -> int:
    from torch_ucx_rpc.pipeline import _host

    return sum(len(stage.graphs) for one in list(_host._hosts.values()) for stage in one.stages.by_index.values())


def test_a_call_works_in_autograd_and_in_loops(backend):
    drive(differentiate_calls, 3, backend=backend)


def freeze() -> None:
    pipe, model = make_pipe(small_model()), small_model()
    pipe.requires_grad_(False)
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    assert pipe.step(x, target=y) == pipe.evaluate(x, target=y)
    assert all(gradient is None for gradient in pipe.gradients().values())
    pipe.requires_grad_(True)
    pipe.step(x, target=y)
    reference_step(model, F.mse_loss, 4, x, target=y)
    assert_equal_gradients(pipe, model)
    # Parameters can be frozen, as in any model. A tied one is frozen in all stages.
    for tied in (False, True):
        make = tied_sequence if tied else small_model
        pipe, model = make_pipe(make()), make()
        for one in (pipe, model):
            for name, parameter in one.named_parameters():
                parameter.requires_grad_("bias" in name)
        for schedule in (False, True):
            for one in (pipe, model) if schedule else ():
                for parameter in one.parameters():
                    parameter.requires_grad_(True)
            assert torch.equal(pipe.step(x, target=y), reference_step(model, F.mse_loss, 4, x, target=y))
            assert_equal_gradients(pipe, model)
    pipe, model = make_pipe(small_model()), small_model()
    other = small_model(1)
    pipe.load_state_dict(other.state_dict())
    assert_equal_states(pipe, other)
    with pytest.raises(KeyError, match=r"lacks 6\.bias"):
        pipe.load_state_dict({name: value for name, value in other.state_dict().items() if name != "6.bias"})


def test_frozen_parameters_get_no_gradients():
    drive(freeze, 3)


def look(folder: str) -> None:
    import json
    from pathlib import Path

    x, y = torch.randn(64, 8), torch.randn(64, 4)
    pipe = make_pipe(small_model(), balance="profile", sample=x, schedule="zero-bubble")
    lines = str(pipe).splitlines()
    assert lines[1].split() == ["stage", "worker", "layers", "parameters", "profiled", "ms"]
    assert [line.split()[:2] for line in lines[2:]] == [["0", "worker1"], ["1", "worker2"]]
    assert all(float(line.split()[-1]) > 0 for line in lines[2:])
    before = pipe.step(x, target=y)
    assert torch.equal(pipe.trace(Path(folder, "step.json"), x, target=y), before)
    events = [one for one in json.loads(Path(folder, "step.json").read_text())["traceEvents"] if one["ph"] == "X"]
    assert sorted(one["name"] for one in events) == sorted(
        f"{stage}{kind}{number}" for stage in range(2) for kind in "FIW" for number in range(4)
    )
    assert {one["pid"] for one in events if one["name"].startswith("1")} == {1}
    assert all(one["dur"] > 0 for one in events)
    with pytest.raises(ValueError, match=r"a Chrome trace, with a path that ends in \.json"):
        pipe.trace(Path(folder, "step.txt"), x, target=y)
    pipe.zero_grad()
    with pytest.raises(FileNotFoundError, match="no folder"):
        pipe.trace(Path(folder, "nothing", "step.json"), x, target=y)
    assert all(gradient is None for gradient in pipe.gradients().values())


def test_the_partition_is_printed_and_a_step_is_traced(tmp_path):
    drive(look, 3, str(tmp_path))


def in_two_places() -> None:
    pipe = make_pipe(small_model(), ["worker1", "worker0/cpu"])
    other = make_pipe(small_model(), [rpc.get_worker_info("worker1"), "worker0"])
    train_side_by_side(pipe, small_model())
    train_side_by_side(other, small_model())


def test_workers_are_given_by_name_by_device_and_by_info():
    drive(in_two_places, 2)
