"""Gradients with device maps, and tensors without memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

from tests.support.workers import in_worker0

# ---- In a job --------------------------------------------------------------------------------------------------------

TO_THE_CPU = {"device_maps": {"worker0": {"cpu": "cpu"}, "worker1": {"cpu": "cpu"}}}


# torch sends gradients by the inverse of a map, and their receiver checks their devices.
@in_worker0(of=2, options=TO_THE_CPU)
def test_gradients_follow_device_maps() -> None:
    with dist_autograd.context() as context:
        a, b = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
        product = rpc.rpc_sync("worker1", torch.mul, args=(a, b))
        dist_autograd.backward(context, [product.sum()])
        gradients = dist_autograd.get_gradients(context)
        assert torch.equal(gradients[a], torch.full((3,), 2.0))
        assert torch.equal(gradients[b], torch.ones(3))


@in_worker0(of=2, options=TO_THE_CPU)
def test_meta_tensor_is_refused_naming_its_place_and_worker() -> None:
    with pytest.raises(RuntimeError, match=r"tensor 1 of 1 in this call to worker 'worker1'.*is on the meta device"):
        rpc.rpc_sync("worker1", torch.add, args=(torch.empty(3, device="meta"), 1))
