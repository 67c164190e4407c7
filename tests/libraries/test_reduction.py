"""Averages of gradients through servers, and refused arguments."""

from __future__ import annotations

import functools
import gc
import os
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from tests.support.workers import Steps, backend_options, eventually, init_rpc, reserved_port
from torch_ucx_rpc import reduction
from torch_ucx_rpc.errors import NotRunning

from ._jobs import PATIENCE_S
from ._training import SGD, are_equal, batches, make_model, parameters_of, process_group, step_of, train

RunWorkers = Callable[..., list]


# ----------------------------------------------------------------------------------------------------------- the mean


@pytest.mark.parametrize("hosts", [("worker2",), ("worker2", "worker3"), ()], ids=["one", "two", "trainers"])
def test_two_trainers_equal_ddp_on_gloo_bit_for_bit(
    run_on_both: RunWorkers, tmp_path: Path, hosts: tuple[str, ...]
) -> None:
    workers = 2 + len(hosts)
    first, second, *_ = run_on_both(workers, train_with_ddp, Steps(tmp_path), hosts)
    assert are_equal(first, second)


def train_with_ddp(rank: int, steps: Steps, hosts: tuple[str, ...]) -> list[torch.Tensor] | None:
    trained = None
    if rank < 2:
        with process_group(rank, 2, steps.directory):
            found = []
            for way in ("gloo", "hook", "DataParallel"):
                model = make_model(160)  # it has three buckets
                if way == "DataParallel":
                    copy = reduction.DataParallel(
                        model, reduction.serve(*hosts, trainers=["worker0", "worker1"]), bucket_bytes=1 << 16
                    )
                else:
                    copy = DistributedDataParallel(model, bucket_cap_mb=0.07)
                if way == "hook":
                    server = reduction.serve(*hosts, trainers=["worker0", "worker1"])
                    copy.register_comm_hook(reduction.state(server), reduction.hook)
                losses = train(copy, torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9), rank, 100)
                assert losses[-1] < losses[0]
                found.append(parameters_of(model))
            assert are_equal(found[0], found[1])
            assert are_equal(found[0], found[2])
            trained = found[0]
    steps.meet("trained", rank, 2 + len(hosts))
    return trained


def test_sum_does_not_depend_on_the_order_of_arrival(run_on_both: RunWorkers, tmp_path: Path) -> None:
    means = run_on_both(4, sum_in_other_orders, Steps(tmp_path))
    assert all(are_equal(means[0], other) for other in means[1:])


def sum_in_other_orders(rank: int, steps: Steps) -> list[torch.Tensor]:
    server = reduction.serve()
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(50_000, generator=generator), torch.randn(3, 5, generator=generator)]
    means = []
    for turn in range(4):
        # Another trainer comes last each time.
        if rank == turn:
            steps.wait_for(*(f"pushed {turn} {other}" for other in range(4) if other != rank))
        future = reduction.push_pull_async(server, gradients)
        steps.done(f"pushed {turn} {rank}")
        means.append(future.wait())
    assert all(are_equal(means[0], other) for other in means[1:])
    assert [tensor.shape for tensor in means[0]] == [torch.Size([50_000]), torch.Size([3, 5])]
    steps.meet("done", rank, 4)
    return means[0]


def test_hosts_that_train_too_take_part_in_every_step_of_ddp(run_on_both: RunWorkers, tmp_path: Path) -> None:
    first, second = run_on_both(2, train_on_the_host_too, Steps(tmp_path))
    assert are_equal(first, second)


def train_on_the_host_too(rank: int, steps: Steps) -> list[torch.Tensor]:
    with process_group(rank, 2, steps.directory):
        server = reduction.serve("worker0")
        model = make_model()
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(reduction.state(server), reduction.hook)
        if rank:
            assert reduction.push_pull(reduction.serve("worker0", trainers=1, name="other"), torch.ones(2)).sum() == 2
        train(ddp, torch.optim.SGD(model.parameters(), lr=0.05), rank, 10)
        steps.meet("trained", rank, 2)
    return parameters_of(model)


def test_one_model_after_the_other_is_trained_by_all(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(4, train_one_after_the_other, Steps(tmp_path))


def train_one_after_the_other(rank: int, steps: Steps) -> None:
    with process_group(rank, 4, steps.directory):
        server = reduction.serve()
        for turn in range(6):
            model = nn.Linear(8, 1, bias=False)
            ddp = DistributedDataParallel(model)
            ddp.register_comm_hook(reduction.state(server), reduction.hook)
            for step in range(5):
                model.zero_grad()
                ddp(torch.full((1, 8), float(rank + step))).backward()
                assert torch.equal(model.weight.grad, torch.full((1, 8), step + 1.5)), (turn, step)
            # Workers free the model at different times.
            del model, ddp
            time.sleep(0.01 * rank)
        steps.meet("trained", rank, 4)


def test_one_tensor_and_other_dtypes_are_averaged(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, average_dtypes, Steps(tmp_path))


def average_dtypes(rank: int, steps: Steps) -> None:
    if rank:
        server = reduction.serve("worker0")
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            tensor = torch.full((2, 3), float(rank), dtype=dtype)
            mean = reduction.push_pull(server, tensor)
            assert mean.dtype == dtype
            assert torch.equal(mean, torch.full((2, 3), 1.5, dtype=dtype))
            mean.zero_()
            assert tensor[0, 0] == rank
    steps.meet("done", rank, 3)


def test_gradients_of_any_layout_are_averaged(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, average_layouts, Steps(tmp_path))


def average_layouts(rank: int, steps: Steps) -> None:
    server = reduction.serve()
    value = rank + 1.0
    layouts = [torch.full((1,), value).expand(4), torch.full((4, 1), value).t(), torch.full((8,), value)[::2]]
    for mean, layout in zip(reduction.push_pull(server, layouts), layouts, strict=True):
        assert torch.equal(mean, torch.full(layout.shape, 1.5))
        assert torch.equal(layout, torch.full(layout.shape, value))
    steps.meet("done", rank, 2)


def test_torchs_compression_hooks_work(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, train_compressed, Steps(tmp_path))


def train_compressed(rank: int, steps: Steps) -> None:
    if rank:
        with process_group(rank - 1, 2, steps.directory):
            server = reduction.serve("worker0")
            model = make_model()
            ddp = DistributedDataParallel(model)
            ddp.register_comm_hook(reduction.state(server), default_hooks.fp16_compress_wrapper(reduction.hook))
            losses = train(ddp, torch.optim.SGD(model.parameters(), lr=0.05), rank, 30)
            assert losses[-1] < losses[0]
            flat = torch.cat([parameter.flatten() for parameter in parameters_of(model)])
            both = [torch.empty_like(flat) for _ in range(2)]
            dist.all_gather(both, flat)
            assert torch.equal(*both)
            assert model[0].weight.grad.dtype == torch.float32
    steps.meet("done", rank, 3)


# ---------------------------------------------------------------------------------------------------- DataParallel


def test_trainers_begin_alike_accumulate_and_skip_no_gradient(run_on_both: RunWorkers, tmp_path: Path) -> None:
    first, second = run_on_both(2, train_unusually, Steps(tmp_path))
    assert are_equal(first, second)


class Unusual(nn.Module):
    """A model with a buffer and with a part that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.rare, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, is_rare: bool) -> torch.Tensor:
        x = self.norm(self.common(x))
        return (self.rare(x) if is_rare else x).square().mean()


def train_unusually(rank: int, steps: Steps) -> list[torch.Tensor]:
    torch.manual_seed(rank)  # each trainer has other parameters
    module = Unusual()
    module.norm.running_mean.fill_(float(rank))
    model = reduction.DataParallel(module, reduction.serve())
    assert module.norm.running_mean[0] == 0
    begun = parameters_of(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for turn, x in enumerate(batches(rank, 9)):
        optimizer.zero_grad()
        with model.no_sync():
            model(x, is_rare=turn % 2 == 0).backward()
        model(x, is_rare=turn % 3 == rank).backward()
        optimizer.step()
    assert module.never.weight.grad is None
    assert not torch.equal(parameters_of(module)[0], begun[0])
    model.eval()
    with torch.no_grad():
        model(x, True)
    steps.meet("done", rank, 2)
    return parameters_of(module)


def test_parts_of_a_bucket_come_together(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, train_a_cut_bucket, Steps(tmp_path))


POSITIONS = torch.arange(768 * 1024.0)


class Various(nn.Module):
    """A model with gradients of 3 MiB each: contiguous ones, one that is not, and one that only some trainers have."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.partly, self.last = (nn.Parameter(torch.zeros(768, 1024)) for _ in range(3))
        self.transposed = nn.Parameter(torch.zeros(4, 192, 32, 32).to(memory_format=torch.channels_last))

    def forward(self, rank: int) -> torch.Tensor:
        terms = [self.flat, self.transposed, self.last, *([self.partly] if rank == 0 else [])]
        # Each element has another gradient on each trainer.
        return sum((term.reshape(-1) * (POSITIONS + rank) * (place + 1)).sum() for place, term in enumerate(terms))


def train_a_cut_bucket(rank: int, steps: Steps) -> None:
    module = Various()
    model = reduction.DataParallel(module, reduction.serve(trainers=["worker0", "worker1"]))
    assert len(model._buckets) == 1
    for _ in range(2):
        module.zero_grad()
        model(rank).backward()
        for place, parameter in enumerate((module.flat, module.transposed, module.last)):
            expected = (POSITIONS + 0.5) * (place + 1)
            assert torch.equal(parameter.grad.reshape(-1), expected)
        assert not module.transposed.grad.is_contiguous()
        assert torch.equal(module.partly.grad.reshape(-1), POSITIONS * 4 / 2)
    steps.meet("done", rank, 2)


def test_trainers_join_with_the_state_and_leave(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    *others, joined, _ = run_on_ucx(4, join_and_leave, Steps(tmp_path), url, init=False)
    assert are_equal(others[1], joined)


def join_and_leave(rank: int, steps: Steps, url: str) -> list[torch.Tensor] | None:

    def enter() -> None:
        init_rpc(rank, world_size=None, rpc_backend_options=backend_options(init_method=url))

    if rank == 3:
        # This worker only hosts the server.
        enter()
        steps.done("server")
        steps.wait_for("over 0", "over 1", "over 2", timeout=120)
        rpc.shutdown()
        return None
    steps.wait_for("server", timeout=120)
    if rank == 2:
        steps.wait_for("five steps", timeout=120)
    enter()
    model = make_model()
    if rank:
        nn.init.zeros_(model[0].weight)  # it gets the others' state instead
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    server = reduction.serve("worker3", trainers=2)
    copy = reduction.DataParallel(model, server, optimizer=optimizer)
    if rank < 2:
        train(copy, optimizer, rank, 5)
        steps.done("five steps")
        # A new trainer joins while the others train.
        while not steps.is_done("joined"):
            train(copy, optimizer, 10 + rank, 1)
    else:
        assert step_of(server) >= 5
        steps.done("joined")
    # From here on all count the same steps, even if they notice the new trainer at different steps. One trainer leaves,
    # and the others go on.
    last = 5 + 2000
    while step_of(server) < last:
        train(copy, optimizer, 20 + rank, 1)
        if rank == 0:
            break
        if last == 2005:
            steps.done(f"after {rank}: {step_of(server)}")
            known = [name for peer in (1, 2) if (name := first_after(steps, peer)) is not None]
            if len(known) == 2:
                last = max(known) + 5
    server.leave()
    steps.done(f"over {rank}")
    steps.wait_for("over 0", "over 1", "over 2", timeout=120)
    rpc.shutdown()
    return parameters_of(model)


def first_after(steps: Steps, rank: int) -> int | None:
    """Return the step in which a trainer has noticed that another has joined."""
    found = [int(path.name.partition(": ")[2]) for path in steps.directory.glob(f"after {rank}: *")]
    return min(found, default=None)


def test_a_trainer_whose_model_is_gone_delays_no_step(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, train_for_different_times, Steps(tmp_path))


def train_for_different_times(rank: int, steps: Steps) -> None:
    if rank:
        for turn in range(2):
            # In the second turn both trainers use the same server again.
            model = make_model()
            copy = reduction.DataParallel(model, reduction.serve("worker0"))
            assert len(train(copy, torch.optim.SGD(model.parameters(), lr=0.05), rank, 2 + 3 * rank)) == 2 + 3 * rank
            del copy
            steps.meet(f"trained {turn}", rank, 3)
    else:
        steps.meet("trained 0", rank, 3)
        steps.meet("trained 1", rank, 3)


def test_newcomer_begins_if_its_donor_drops_the_model(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, let_go_of_a_model_asked_for, Steps(tmp_path))


def let_go_of_a_model_asked_for(rank: int, steps: Steps) -> None:
    if rank:
        server = reduction.serve("worker0", trainers=1)
        if rank == 2:
            steps.wait_for("trained")
        model = make_model()
        copy = reduction.DataParallel(model, server)
        train(copy, torch.optim.SGD(model.parameters(), lr=0.05), rank, 2)
        if rank == 1:
            steps.done("trained")
            eventually(lambda: copy._steps._requests, "another asks for the model")
            del copy
    steps.meet("over", rank, 3)


def test_a_trainer_can_drop_one_of_two_models(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(4, let_go_of_one_of_two_models, Steps(tmp_path))


def let_go_of_one_of_two_models(rank: int, steps: Steps) -> None:
    if rank == 3:
        steps.wait_for("trained alone")
    if rank:
        server = reduction.serve("worker0", trainers=2)
        models = [make_model() for _ in range(1 if rank == 3 else 2)]
        copies = [reduction.DataParallel(model, server) for model in models]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    if rank in (1, 2):
        for copy, optimizer in zip(copies, optimizers, strict=True):
            train(copy, optimizer, rank, 2)
        if rank == 1:
            del copies[0], copy
        else:
            train(copies[0], optimizers[0], rank, 2)
            steps.done("trained alone")
            # The third trainer gets the model from this trainer, since the other one has dropped it.
            while not steps.is_done("begun"):
                train(copies[0], optimizers[0], rank, 1)
        # Both trainers still train the other model.
        steps.wait_for("begun")
        train(copies[-1], optimizers[-1], rank, 2)
    elif rank == 3:
        del copies
        steps.done("begun")
    steps.meet("over", rank, 4)


# --------------------------------------------------------------------------------------------------------- bad input


def test_bad_input_is_refused_in_sentences(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, give_bad_input, Steps(tmp_path))


def serve_parameters(optimizer: Any, parameters: list[Any]) -> reduction.Server:
    return reduction.serve("worker1", optimizer=optimizer, parameters=parameters)


def give_bad_input(rank: int, steps: Steps) -> None:
    if rank == 0:
        for wrong, why in (
            (lambda: reduction.serve("worker9"), r"'worker9' cannot be a host of a server.*close to it: worker"),
            (lambda: reduction.serve("worker1", "worker1"), "must be different workers"),
            (lambda: reduction.serve(3), "each of hosts must be the name of a worker, .*; got 3"),
            (lambda: reduction.serve("worker1", trainers=0), "trainers must be at least 1"),
            (lambda: reduction.serve("worker1", optimizer=SGD), "needs both, parameters="),
            (lambda: reduction.serve("worker1", checkpoint="x"), "checkpoint is for a server with an optimizer"),
            (lambda: reduction.serve(optimizer=SGD, parameters=[torch.ones(1)]), "needs hosts, as in"),
            (
                lambda: reduction.serve("worker1", optimizer=lambda p: None, parameters=[torch.ones(1)]),
                "goes to the server by pickle",
            ),
            (lambda: serve_parameters(SGD, [3]), "number 0 is 3: give model.parameters"),
            (lambda: serve_parameters(SGD, [torch.ones(1, dtype=torch.int64)]), "whose dtype is torch.int64: give it"),
            (lambda: serve_parameters(SGD, []), "parameters is empty: give model.parameters"),
            (
                lambda: serve_parameters(functools.partial(torch.optim.SGD, rate=1), [torch.ones(1)]),
                "makes no optimizer of these parameters: TypeError: .*'rate'",
            ),
            (
                lambda: serve_parameters(torch.optim.LBFGS, [torch.ones(1)]),
                r"cannot update by LBFGS: its step\(\) takes a closure",
            ),
            (lambda: serve_parameters(list, [torch.ones(1)]), r"must make a torch.optim.Optimizer; .*list.* makes \["),
            (
                lambda: serve_parameters(SGD, torch.ones(2)),
                r"parameters must be several tensors, .*; got tensor",
            ),
            (lambda: serve_parameters(SGD, 5), r"parameters must be several tensors, .*; got 5"),
            (lambda: reduction.serve("worker1", trainers=1.5), "how many there are, or a list.*got 1.5"),
            (lambda: reduction.serve("worker1", trainers=True), "how many there are, or a list.*got True"),
            (lambda: reduction.serve("worker1", trainers=[]), "one or more different workers"),
            (lambda: reduction.serve("worker1", trainers=["worker0"] * 2), "one or more different workers"),
            (lambda: reduction.serve(trainers=["worker9"]), "'worker9' cannot be a trainer: no worker has that name"),
            (lambda: reduction.serve("worker1", name=3), "name must be a str; got 3"),
            (lambda: reduction.serve("worker1", name=""), "name must be a str that is not empty"),
            (lambda: reduction.serve("worker1", checkpoint=5), "checkpoint must be a path"),
            (lambda: reduction.serve("worker1", checkpoint_every=0), "checkpoint_every must be at least 1"),
        ):
            with pytest.raises((TypeError, ValueError), match=why):
                wrong()
        # None of these calls has made a server of that name.
        server = reduction.serve("worker1", trainers=["worker0"])
        for wrong, why in (
            (
                lambda: reduction.state(server, quorum=5),
                r"quorum=5 can never be reached: there are \d trainers.*at most",
            ),
            (
                lambda: reduction.state(server, optimizer=SGD([torch.ones(1)])),
                r"optimizer needs model=: .* give both",
            ),
            (lambda: reduction.push_pull(server, torch.ones(1), quorum=0), "quorum must be at least 1"),
            (lambda: reduction.DataParallel(nn.Linear(1, 1), server, quorum=9), "quorum=9 can never be reached"),
            (lambda: reduction.DataParallel(nn.ReLU(), server), "no parameter of the module requires grad"),
            (
                lambda: reduction.push_pull("ps", torch.ones(1)),
                "server must be what reduction.serve returns; got 'ps'",
            ),
            (lambda: reduction.push_pull(server, [torch.ones(1), None]), "with zeros .* number 1 is not; got None"),
            (lambda: reduction.push_pull(server, torch.ones(1, dtype=torch.int64)), "number 0 is torch.int64"),
            (
                lambda: reduction.push_pull(server, [torch.ones(1), torch.ones(2).to_sparse()]),
                r"number 1 is torch\.sparse_coo: give tensor\.to_dense\(\)",
            ),
            (lambda: reduction.push_pull(server, []), "gradients must be those of all parameters; got"),
            (lambda: reduction.push_pull(server, None), r"a tensor, or several as a list; got None \(NoneType\)"),
            (lambda: reduction.hook(None, None), r"what reduction.state returns.*got None \(NoneType\)"),
            (lambda: reduction.DataParallel(None, server), r"must be an nn.Module; got None \(NoneType\)"),
            (
                lambda: reduction.DataParallel(nn.Linear(1, 1), server, optimizer=SGD),
                "optimizer must be this trainer's .*Optimizer; got .*SGD",
            ),
            (lambda: reduction.DataParallel(nn.Linear(1, 1), server, bucket_bytes=0), "bucket_bytes must be"),
            (lambda: reduction.DataParallel(nn.Linear(1, 1), server, bucket_bytes="x"), "bucket_bytes must be"),
        ):
            with pytest.raises((TypeError, ValueError), match=why):
                wrong()
        assert torch.equal(reduction.push_pull(server, [torch.ones(2), torch.ones(3)])[1], torch.ones(3))
        # The first step is over, so the server waits for no further trainer.
        reduction.serve("worker1", trainers=2)
        reduction.serve("worker1", name="two", trainers=["worker0", "worker2"])
        reduction.serve("worker1", name="two", trainers=["worker2", "worker0"])
        reduction.serve("worker1", name="two", trainers=2)
        for others in (3, ["worker0", "worker1"]):
            with pytest.raises(ValueError, match=r"made with trainers=\('worker0', 'worker2'\), and .* with trainers="):
                reduction.serve("worker1", name="two", trainers=others)
        with pytest.raises(ValueError, match=r"another shape than the server's.*number 1 is \[4\].*that one is \[3\]"):
            reduction.push_pull(server, [torch.ones(2), torch.ones(4)])
        with pytest.raises(ValueError, match=r"all trainers must call serve alike"):
            reduction.serve("worker1", trainers=1, parameters=[torch.ones(1)], optimizer=SGD)
    steps.meet("done", rank, 3)


def test_gradients_of_another_shape_than_the_others_are_refused(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, push_other_shapes, Steps(tmp_path))


def push_other_shapes(rank: int, steps: Steps) -> None:
    server = reduction.serve("worker0", trainers=2)
    if rank == 1:
        first = reduction.push_pull_async(server, [torch.ones(2, 3)])
        steps.done("first")
        assert torch.equal(first.wait()[0], torch.full((2, 3), 1.5))
    if rank == 2:
        steps.wait_for("first")
        wrong = torch.ones(3, 2)
        with pytest.raises(
            ValueError,
            match=r"'worker2' pushes gradients of \[3, 2\] .*'worker1' has pushed \[2, 3\]",
        ):
            reduction.push_pull(server, [wrong])
        # The trainer may push again with other arguments, and the refusal leaves no trace.
        known = weakref.ref(wrong)
        del wrong
        eventually(lambda: gc.collect() >= 0 and known() is None, "the gradients are free")
        assert torch.equal(reduction.push_pull(server, [torch.full((2, 3), 2.0)])[0], torch.full((2, 3), 1.5))
    steps.meet("done", rank, 3)


def test_a_step_that_runs_out_of_time_names_the_missing(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(3, miss_a_trainer, Steps(tmp_path), options={"rpc_timeout": 2})


def miss_a_trainer(rank: int, steps: Steps) -> None:
    if rank == 1:
        server = reduction.serve("worker0")
        with pytest.raises(RuntimeError, match=r"it waited for worker2\. If some need not come, serve\(..., trainers"):
            reduction.push_pull(server, torch.ones(2))
    steps.done(f"done {rank}")
    steps.wait_for(*(f"done {peer}" for peer in range(3)))


def test_without_rpc_serve_says_so() -> None:
    with pytest.raises(NotRunning, match="RPC is not running"):
        reduction.serve("ps0")


# ------------------------------------------------------------------------------------------- the programs of the page

PROGRAMS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/reduction.md").read_text(), re.DOTALL)
# The number of workers of each program, and the output of each trainer.
RUNS = (
    (("ps0", "trainer0", "trainer1"), r"loss \d\.\d+, mean of [12]"),
    (("0", "1"), r"Contributors\(names=\('trainer0', 'trainer1'\), index=[01], divisor=2\)"),
    (("ps0", "trainer0", "trainer1"), "done"),
)


def test_the_page_has_a_run_for_each_program() -> None:
    assert len(PROGRAMS) == len(RUNS)


@pytest.mark.parametrize("number", range(len(RUNS)), ids=["DataParallel", "hook", "push_pull"])
def test_programs_of_the_page_run_unedited(tmp_path: Path, number: int) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAMS[number])
    names, printed = RUNS[number]
    with reserved_port() as port:
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = [
            subprocess.Popen(
                [sys.executable, str(program), name],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name in names
        ]
        outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(names), outputs
    for name, output in zip(names, outputs, strict=True):
        assert name == "ps0" or re.search(printed, output), output
