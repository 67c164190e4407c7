"""PyTorch's parts on top of RPC: distributed autograd and optimizers, RemoteModule, the profiler."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer

from tests.support.workers import eventually, in_every_worker, in_worker0


def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.sin(a @ b) * b.sum()


def combine_there(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Make one more hop: the gradients must come back the same way."""
    return rpc.rpc_sync(name, combine, args=(a, 2 * b)) + a.sum()


def leaves(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return tuple(torch.randn(n, n, generator=generator, requires_grad=True) for _ in range(2))


def assert_gradients_equal(remote: object, local: object, n: int) -> None:
    a, b = leaves(n)
    with dist_autograd.context() as context:
        loss = remote(a, b).sum()
        dist_autograd.backward(context, [loss])
        gradients = dist_autograd.get_gradients(context)
    local(a, b).sum().backward()
    assert set(gradients) == {a, b}
    torch.testing.assert_close(gradients[a], a.grad)
    torch.testing.assert_close(gradients[b], b.grad)


@in_worker0(of=3)
def test_gradients_through_calls_equal_local_ones() -> None:
    for n in (3, 600):
        assert_gradients_equal(lambda a, b: rpc.rpc_sync("worker1", combine, args=(a, b)), combine, n)
        assert_gradients_equal(lambda a, b: rpc.rpc_async("worker1", combine, args=(a, b)).wait(), combine, n)
        assert_gradients_equal(lambda a, b: rpc.remote("worker1", combine, args=(a, b)).to_here(), combine, n)
        assert_gradients_equal(lambda a, b: rpc.rpc_sync("worker0", combine, args=(a, b)), combine, n)
        assert_gradients_equal(
            lambda a, b: rpc.rpc_sync("worker1", combine_there, args=("worker2", a, b)),
            lambda a, b: combine(a, 2 * b) + a.sum(),
            n,
        )
        # This worker and two others use both operands again.
        assert_gradients_equal(
            lambda a, b: (
                rpc.rpc_sync("worker1", torch.mm, args=(a, b)) + rpc.rpc_sync("worker2", torch.mm, args=(b, a)) * a
            ),
            lambda a, b: a @ b + (b @ a) * a,
            n,
        )


@in_every_worker(of=3)
def test_contexts_of_several_workers_do_not_mix(rank: int) -> None:
    peer = f"worker{(rank + 1) % 3}"
    for _ in range(5):
        assert_gradients_equal(lambda a, b: rpc.rpc_sync(peer, combine, args=(a, b)), combine, 20 + rank)


def autograd_contexts() -> int:
    return int(dist_autograd._get_debug_info()["num_autograd_contexts"])


@in_worker0(of=2)
def test_an_autograd_context_ends_on_every_worker() -> None:
    a, b = leaves(4)
    with dist_autograd.context():
        rpc.rpc_sync("worker1", combine, args=(a, b))
        assert rpc.rpc_sync("worker1", autograd_contexts) == 1
    assert autograd_contexts() == 0
    eventually(lambda: rpc.rpc_sync("worker1", autograd_contexts) == 0, "the context is cleaned up on worker1")


class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no way back")


def go_there(tensor: torch.Tensor) -> torch.Tensor:
    return NoWayBack.apply(tensor)


@in_worker0(of=2, silent=False)
def test_an_error_in_a_remote_backward_is_raised_here() -> None:
    a, _ = leaves(4)
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync("worker1", go_there, args=(a,)).sum()
        with pytest.raises(RuntimeError, match="no way back"):
            dist_autograd.backward(context, [loss])


class Layer(torch.nn.Module):
    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))

    def parameter_rrefs(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def state(self) -> dict[str, torch.Tensor]:
        return self.state_dict()


def batch(width: int) -> torch.Tensor:
    return torch.randn(16, width, generator=torch.Generator().manual_seed(width))


# Not silent: torch always warns, against the filters, when a worker makes its optimizer.
@in_worker0(of=3, silent=False)
def test_a_model_over_two_workers_trains_as_a_local_one() -> None:
    width, steps = 64, 5
    local = torch.nn.Sequential(Layer(width, 1), Layer(width, 2))
    local_optimizer = torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    local_losses = []
    for _ in range(steps):
        local_optimizer.zero_grad()
        loss = local(batch(width)).square().mean()
        loss.backward()
        local_optimizer.step()
        local_losses.append(loss.item())

    layers = [rpc.remote(f"worker{i}", Layer, args=(width, i)) for i in (1, 2)]
    parameters = [rref for layer in layers for rref in layer.rpc_sync().parameter_rrefs()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        with dist_autograd.context() as context:
            x = batch(width)
            for layer in layers:
                x = layer.rpc_sync().forward(x)
            loss = x.square().mean()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
            losses.append(loss.item())

    torch.testing.assert_close(losses, local_losses)
    for layer, local_layer in zip(layers, local, strict=True):
        torch.testing.assert_close(layer.rpc_sync().state(), local_layer.state())


@in_worker0(of=2)
def test_a_remote_module_computes_as_a_local_one() -> None:
    x, local = batch(8), Layer(8, 5)
    module = RemoteModule("worker1/cpu", Layer, args=(8, 5))
    torch.testing.assert_close(module(x), local(x))
    torch.testing.assert_close(module.forward_async(x).wait(), local(x))
    for rref, parameter in zip(module.remote_parameters(), local.parameters(), strict=True):
        assert rref.owner_name() == "worker1"
        assert torch.equal(rref.to_here(), parameter)
    assert_gradients_equal(lambda a, b: module(a @ b), lambda a, b: local(a @ b), 8)


def forward_there(module: RemoteModule, x: torch.Tensor) -> torch.Tensor:
    # Not module(x): torch sends a RemoteModule without the attributes that Module.__call__ reads.
    return module.forward(x)


@in_worker0(of=3)
def test_a_remote_module_can_be_sent_to_another_worker() -> None:
    x, local = batch(8), Layer(8, 5)
    module = RemoteModule("worker1/cpu", Layer, args=(8, 5))
    torch.testing.assert_close(rpc.rpc_sync("worker2", forward_there, args=(module, x)), local(x))


@torch.jit.script
def scripted_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)


def python_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)


# The legacy profiler, since torch's newer profiler warns that it does not profile the callee.
@in_worker0(of=2)
def test_the_profiler_sees_remote_work() -> None:
    a, b = torch.randn(50, 50), torch.randn(50, 50)
    for function in (torch.mm, python_matmul, scripted_matmul):
        for call in (rpc.rpc_sync, lambda *args, **kwargs: rpc.rpc_async(*args, **kwargs).wait()):
            with torch.autograd.profiler_legacy.profile() as profile:
                call("worker1", function, args=(a, b))
            remote = [event for event in profile.function_events if event.is_remote]
            assert any("aten::mm" in event.name for event in remote), [e.name for e in profile.function_events]
            assert {event.node_id for event in remote} == {1}
            assert all("worker0 -> worker1" in event.name for event in remote)
