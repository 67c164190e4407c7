"""Checkpoints of pipelines, RemoteModules and plain state. Many workers write and read the same files as DCP."""

from __future__ import annotations

import os
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.rpc as rpc
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.nn.api.remote_module import RemoteModule

from ._jobs import drive, drive_with_deaths, on, reference_step, small_model


def make_pipe(model: Any, workers: Any = ("worker1", "worker2"), **options: Any) -> Any:
    from torch_ucx_rpc import pipeline

    return pipeline.DistributedPipeline(model, list(workers), **{"loss": F.mse_loss, "chunks": 4, **options})


def read_plainly(state: dict[str, Any], checkpoint_id: Any) -> None:
    """Read in one process, without workers. torch warns that the process is alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=checkpoint_id, no_dist=True)


def write_plainly(state: dict[str, Any], checkpoint_id: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=checkpoint_id, no_dist=True)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(count)]


def train(pipe: Any, optimizer: Any, some: Any) -> list[float]:
    losses = []
    for x, y in some:
        losses.append(pipe.step(x, target=y).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def go_on_with_other_stages(folder: str) -> None:
    """Let two stages save. Three stages with another schedule, and one process, continue with equal results."""
    from torch_ucx_rpc import checkpoint

    some = batches(6)
    two = make_pipe(small_model())
    first = two.optimizer(torch.optim.AdamW, lr=0.1)
    train(two, first, some[:3])
    first.param_groups[0]["lr"] = 0.05
    path = Path(folder, "ckpt")
    checkpoint.save({"model": two, "optim": first, "epoch": 7, "more": {"x": torch.arange(3)}}, path)
    expected = train(two, first, some[3:])

    three = make_pipe(small_model(1), ["worker2", "worker0", "worker1"], schedule="zero-bubble")
    second = three.optimizer(torch.optim.AdamW, lr=1.0)
    rest: dict[str, Any] = {
        "model": three,
        "optim": second,
        "epoch": 0,
        "more": {"x": torch.zeros(3, dtype=torch.long)},
    }
    checkpoint.load(rest, path)
    assert rest["epoch"] == 7
    assert rest["more"]["x"].tolist() == [0, 1, 2]
    assert second.param_groups[0]["lr"] == 0.05
    assert train(three, second, some[3:]) == expected

    # Plain DCP reads the checkpoint in one process, without the workers.
    model = small_model(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    train_reference(model, optimizer, some[:1])
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    read_plainly(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    assert train_reference(model, optimizer, some[3:]) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(path, Path(folder, "one.pt"))
    saved = torch.load(Path(folder, "one.pt"), weights_only=False)
    assert saved["epoch"] == 7
    assert saved["model"].keys() == model.state_dict().keys()

    # All workers read plain DCP's files.
    back = Path(folder, "back")
    write_plainly({"model": model.state_dict()}, checkpoint_id=back)
    checkpoint.load({"model": two}, back)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in two.state_dict().items())


def train_reference(model: nn.Module, optimizer: torch.optim.Optimizer, some: Any) -> list[float]:
    losses = []
    for x, y in some:
        losses.append(reference_step(model, F.mse_loss, 4, x, target=y).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_other_stages_and_one_process_resume_bit_for_bit(tmp_path, backend):
    drive(go_on_with_other_stages, 3, str(tmp_path), backend=backend)


def save_behind(folder: str) -> None:
    from torch_ucx_rpc import checkpoint

    pipe = make_pipe(small_model())
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    some = batches(4)
    train(pipe, optimizer, some[:2])
    before = pipe.state_dict()
    mine = torch.arange(1000.0)
    for number in range(2):
        future = checkpoint.save(
            {"model": pipe, "optim": optimizer, "mine": mine}, Path(folder, "ckpt"), asynchronous=True
        )
        # The save has copied all values, so later changes do not reach the file.
        mine.add_(1)
        train(pipe, optimizer, some[2:])
        future.wait()
        found: dict[str, Any] = {"model": small_model().state_dict(), "mine": torch.zeros(1000)}
        read_plainly(found, checkpoint_id=Path(folder, "ckpt"))
        assert torch.equal(found["mine"], torch.arange(1000.0) + number)
        assert all(torch.equal(value, before[name]) for name, value in found["model"].items())
        before = pipe.state_dict()
    # Only one checkpoint's files remain.
    names = [file.name.split("_")[2] for file in Path(folder, "ckpt").glob("*.distcp")]
    assert len(set(names)) == 1


def test_asynchronous_save_has_the_state_at_its_return(tmp_path):
    drive(save_behind, 3, str(tmp_path))


def die_while_writing(self: Any, plan: Any, planner: Any) -> Any:
    """Replaces the writer's method: it writes half a file, and then dies."""
    Path(self.path, f"{plan.storage_data.prefix}0.distcp").write_bytes(b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)


def arm() -> None:
    from torch_ucx_rpc.checkpoint import storage

    storage.Writer.write_data = die_while_writing  # type: ignore[method-assign]


def lose_a_worker_in_a_save(folder: str) -> None:
    from torch_ucx_rpc import checkpoint

    path = Path(folder, "ckpt")
    pipe = make_pipe(small_model(), ["worker0", "worker1"])
    checkpoint.save({"model": pipe}, path)
    saved = pipe.state_dict()
    train(pipe, pipe.optimizer(torch.optim.SGD, lr=0.1), batches(1))
    on("worker1", arm)
    with pytest.raises(checkpoint.CheckpointError, match="writing a checkpoint failed on 'worker1'"):
        checkpoint.save({"model": pipe}, path)
    found = {"model": small_model().state_dict()}
    read_plainly(found, checkpoint_id=path)
    assert all(torch.equal(value, saved[name]) for name, value in found["model"].items())
    # A new worker replaces the dead one, and the next save removes the leftovers.
    pipe.replace("worker1", "worker2")
    checkpoint.load({"model": pipe}, path)
    assert all(torch.equal(value, saved[name]) for name, value in pipe.state_dict().items())
    checkpoint.save({"model": pipe}, path)
    assert len(list(path.glob("*.distcp"))) == 2


def test_death_during_a_save_leaves_the_former_checkpoint(tmp_path, backend):
    drive_with_deaths(lose_a_worker_in_a_save, 3, (1,), str(tmp_path), backend=backend)


def memory(of: str) -> int:
    """Return bytes: ``VmRSS`` is the present memory of this process, and ``VmHWM`` its peak since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(of)).split()[1])


def forget_the_most() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def grow(folder: str) -> None:
    from torch_ucx_rpc import checkpoint

    own, layers = 64 * 2**20, 64
    pipe = make_pipe(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2 * layers))), loss=None)
    path = Path(folder, "ckpt")
    # First save once, so that imports do not count.
    checkpoint.save({"model": pipe}, path)
    checkpoint.load({"model": pipe}, path)
    for action in (checkpoint.save, checkpoint.load):
        workers = ("worker0", "worker1", "worker2")
        for worker in workers:
            on(worker, forget_the_most)
        before = {worker: on(worker, memory, "VmRSS") for worker in workers}
        action({"model": pipe}, path)
        for worker in workers:
            grown = on(worker, memory, "VmHWM") - before[worker]
            assert grown < 0.1 * own, f"{worker} has grown by {grown / own:.3f} of a part in {action.__name__}"


def test_no_worker_holds_more_than_its_own_part(tmp_path):
    drive(grow, 3, str(tmp_path))


class Table(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(rows, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.drop(self.embedding(index))


def make_linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 3)


def keep_remote_modules(folder: str) -> None:
    from torch_ucx_rpc import checkpoint
    from torch_ucx_rpc.checkpoint import remote_modules

    remote = RemoteModule("worker1/cpu", Table, args=(10,))
    local = Table(10)
    state = remote_modules.state_dict(remote)
    assert all(torch.equal(value, local.state_dict()[name]) for name, value in state.items())
    assert remote_modules.train(remote) is remote
    index = torch.arange(10)
    assert not torch.equal(remote(index), remote(index))
    remote_modules.eval(remote)
    assert not remote.training
    assert torch.equal(remote(index), local.eval()(index))
    assert remote_modules.requires_grad_(remote, False) is remote
    assert [on("worker1", wants_gradient, one) for one in remote.remote_parameters()] == [False]
    remote_modules.requires_grad_(remote, True)
    on("worker1", give_gradients, remote.get_module_rref())
    assert on("worker1", has_gradients, remote.get_module_rref())
    remote_modules.zero_grad(remote)
    assert not on("worker1", has_gradients, remote.get_module_rref())

    rref = rpc.remote("worker2", make_linear, args=(1,))
    checkpoint.save({"emb": remote, "nested": {"head": rref, "here": small_model()}}, Path(folder, "ckpt"))
    changed = {name: torch.zeros_like(value) for name, value in state.items()}
    assert remote_modules.load_state_dict(remote, changed).missing_keys == []
    assert remote_modules.state_dict(remote)["embedding.weight"].abs().sum() == 0
    with pytest.raises(RuntimeError, match="Missing key"):
        remote_modules.load_state_dict(remote, {})
    assert remote_modules.load_state_dict(remote, {}, strict=False).missing_keys == ["embedding.weight"]
    other, here = rpc.remote("worker1", make_linear, args=(2,)), small_model(5)
    checkpoint.load({"emb": remote, "nested": {"head": other, "here": here}}, Path(folder, "ckpt"))
    assert torch.equal(remote_modules.state_dict(remote)["embedding.weight"], local.embedding.weight)
    assert torch.equal(on("worker1", weight_of, other), make_linear(1).weight)
    assert torch.equal(here[0].weight, small_model()[0].weight)
    found = {"emb": Table(10).state_dict()}
    read_plainly(found, checkpoint_id=Path(folder, "ckpt"))
    del remote, rref, other


def wants_gradient(rref: Any) -> bool:
    return bool(rref.local_value().requires_grad)


def weight_of(rref: Any) -> torch.Tensor:
    return rref.local_value().weight.detach()


def give_gradients(rref: Any) -> None:
    rref.local_value().embedding.weight.grad = torch.ones(10, 4)


def has_gradients(rref: Any) -> bool:
    return rref.local_value().embedding.weight.grad is not None


def test_remote_modules_are_modules_and_saved_where_they_are(tmp_path, backend):
    # If a remote method raises, RPC writes the exception to its worker's stderr.
    drive(keep_remote_modules, 3, str(tmp_path), backend=backend, silent=False)


def into_its_own_folder(path: str, real: str) -> None:
    """Put the files for ``path`` elsewhere, as on a host that does not share the folder."""
    from torch_ucx_rpc.checkpoint import storage

    def astray(self: Any, is_coordinator: bool) -> None:
        if str(self.path) == path:
            self.reset(real)

    storage.Writer.set_up_storage_writer = astray  # type: ignore[method-assign]


def find_the_folder(folder: str) -> None:
    from torch_ucx_rpc import checkpoint
    from torch_ucx_rpc.checkpoint import storage

    pipe = make_pipe(small_model())
    os.chdir(folder)
    pipe.save("here/1")
    assert len(list(Path(folder, "here", "1").glob("*.distcp"))) == 2
    os.chdir("/")
    pipe.load()
    storage._UNTIL_SEEN_S = 0.2
    path = str(Path(folder, "shared"))
    on("worker2", into_its_own_folder, path, str(Path(folder, "not_shared")))
    with pytest.raises(checkpoint.CheckpointError, match=r"'worker2' has written __.*which is not in .*shared' here"):
        pipe.save(path)
    assert not Path(path, ".metadata").exists()


def test_relative_path_is_the_callers_and_must_be_shared(tmp_path):
    drive(find_the_folder, 3, str(tmp_path))


def refuse(folder: str) -> None:
    from torch_ucx_rpc import checkpoint

    pipe = make_pipe(small_model())
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*there is no such folder"):
        checkpoint.load({"model": pipe}, Path(folder, "nothing"))
    checkpoint.save({"model": pipe}, Path(folder, "ckpt"))
    before = pipe.state_dict()
    with pytest.raises(checkpoint.CheckpointError, match="has nothing under 'net'; it has model"):
        checkpoint.load({"net": pipe}, Path(folder, "ckpt"))
    wider = make_pipe(nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 5)))
    values = wider.state_dict()
    with pytest.raises(checkpoint.CheckpointError, match="is of another model"):
        checkpoint.load({"model": wider}, Path(folder, "ckpt"))
    assert all(torch.equal(value, values[name]) for name, value in wider.state_dict().items())
    with pytest.raises(TypeError, match=r"model must be a dict; got 3 \(int\)"):
        list(checkpoint.parts._walk(("model",), 3))
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


def test_a_misfit_is_refused_before_any_change(tmp_path):
    drive(refuse, 3, str(tmp_path))


def test_without_rpc_a_save_has_the_local_state(tmp_path):
    from torch_ucx_rpc import checkpoint

    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    reference_step(model, F.mse_loss, 1, torch.randn(4, 8), target=torch.randn(4, 4))
    optimizer.step()
    checkpoint.save({"model": model, "optim": optimizer, "step": 3}, tmp_path)
    state: dict[str, Any] = {"model": small_model(1), "step": 0}
    checkpoint.load(state, tmp_path)
    assert state["step"] == 3
    assert torch.equal(state["model"][0].weight, model[0].weight)


def run_programs(folder: str) -> None:
    text = Path(__file__).parents[2].joinpath("docs", "checkpoint.md").read_text(encoding="utf-8")
    across, plainly = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    os.chdir(folder)
    pipe, other_pipe, model = (
        make_pipe(small_model()),
        make_pipe(small_model(1), ["worker2", "worker1"]),
        small_model(2),
    )
    known = {
        "pipe": pipe,
        "optimizer": pipe.optimizer(torch.optim.AdamW),
        "remote_module": RemoteModule("worker1/cpu", Table, args=(10,)),
        "other_pipe": other_pipe,
        "model": model,
        "torch": torch,
    }
    exec(across, known)
    known["future"].wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(plainly, known)
    for found in (other_pipe.state_dict(), model.state_dict()):
        assert all(torch.equal(value, small_model().state_dict()[name]) for name, value in found.items())


def test_programs_of_the_page_run(tmp_path):
    drive(run_programs, 3, str(tmp_path))
