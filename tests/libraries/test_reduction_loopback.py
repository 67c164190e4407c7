"""A trainer that is a host itself: its own host reads its tensors where they are, and not for longer than it may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tests.support.workers import Steps
from torch_ucx_rpc import reduction
from torch_ucx_rpc.reduction import _round
from torch_ucx_rpc.reduction._host import Host
from torch_ucx_rpc.reduction._hosts import absent
from torch_ucx_rpc.reduction._loopback import lend, push_lent
from torch_ucx_rpc.reduction._messages import Answer, Push, Spec, Trainer
from torch_ucx_rpc.reduction._results import result_of

from ._training import process_group

RunWorkers = Callable[..., list]


def test_gradients_are_not_copied_for_the_own_host(run_on_both: RunWorkers) -> None:
    run_on_both(1, push_to_oneself)


def push_to_oneself(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        came: list[Tensor] = []
        push = Host.push

        def note(host: Host, pushed: Push, is_owned: bool) -> Future[Answer]:
            came.extend(pushed.tensors)
            return push(host, pushed, is_owned)

        patched.setattr(Host, "push", note)
        gradient = torch.ones(1000)
        mean = reduction.push_pull(reduction.serve("worker0", trainers=1), gradient)
    assert [tensor.data_ptr() for tensor in came] == [gradient.data_ptr()]
    assert torch.equal(mean, gradient)
    assert mean.data_ptr() != gradient.data_ptr()


def test_gradients_may_be_written_to_after_a_timeout(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, write_after_a_timeout, Steps(tmp_path), options={"rpc_timeout": 2})


def write_after_a_timeout(rank: int, steps: Steps) -> None:
    server = reduction.serve("worker0", trainers=["worker0", "worker1"])
    if rank == 0:
        gradient = torch.ones(2)
        with pytest.raises(RuntimeError, match="it waited for worker1"):
            reduction.push_pull(server, gradient)
        gradient.fill_(100.0)
        steps.done("written")
    else:
        steps.wait_for("written")
        assert torch.equal(reduction.push_pull(server, torch.full((2,), 3.0)), torch.full((2,), 2.0))
    steps.meet("done", rank, 2)


def test_a_hook_that_writes_to_its_result_changes_no_others(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, double_the_result, Steps(tmp_path))


def double_the_result(rank: int, steps: Steps) -> None:
    with process_group(rank, 2, steps.directory):
        server = reduction.serve()
        model = nn.Linear(8, 1, bias=False)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(reduction.state(server), doubled)
        ddp(torch.full((1, 8), float(rank))).backward()
        assert torch.equal(model.weight.grad, torch.full((1, 8), 1.0))
        steps.meet("doubled", rank, 2)
        if rank == 0:
            # What another host would be told, if this one were lost now.
            kept = result_of(server.name, "ddp0/step0/0/0", 0, "worker9", ()).wait()
            assert kept is not None
            assert torch.equal(kept[0], torch.full((8,), 0.5))
        steps.meet("done", rank, 2)


# DistributedDataParallel looks at annotations, and takes no texts.
def doubled(state, bucket):  # type: ignore[no-untyped-def]
    return reduction.hook(state, bucket).then(lambda mean: mean.value().mul_(2))


def test_tensors_in_an_addition_are_returned_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    is_adding, may_go_on = threading.Event(), threading.Event()
    add = _round._add

    def wait_and_add(*arguments: Any) -> None:
        is_adding.set()
        assert may_go_on.wait(20)
        add(*arguments)

    monkeypatch.setattr(_round, "_add", wait_and_add)
    life: Any = SimpleNamespace(info=SimpleNamespace(name="ps"))
    host = Host(Spec("ps", ("ps",), 2), life, SimpleNamespace())  # type: ignore[arg-type]
    own, other = (
        Push("ps", "tensors/0", 0, Trainer(rank, name, rank), 0, None, 0, False, [torch.full((2,), float(rank))])
        for rank, name in enumerate(("ps", "worker1"))
    )
    pushed = host.push(own, False)
    adding = threading.Thread(target=host.push, args=(other, True))
    adding.start()
    assert is_adding.wait(20)
    giving_back = threading.Thread(target=host.keep_copy, args=(own,))
    giving_back.start()
    giving_back.join(0.2)
    assert giving_back.is_alive(), "the tensors are still being read"
    may_go_on.set()
    giving_back.join()
    adding.join()
    assert torch.equal(pushed.wait().tensors[0], torch.full((2,), 0.5))


def test_a_push_that_comes_after_its_time_is_not_made(run_on_both: RunWorkers) -> None:
    run_on_both(1, push_too_late)


def push_too_late(rank: int) -> None:
    server = reduction.serve("worker0", trainers=2)
    gradient = torch.ones(2)
    lent = lend(server.next_push("tensors/0", 0, [gradient], None))
    lent.take_back()
    # The call comes now, when the trainer has its tensors back.
    rpc.rpc_sync("worker0", push_lent, args=(lent.number,))
    assert absent("worker0", "tensors/0") == []
