"""What tests of pipelines have in common."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn


def make_pipe(model: Any, workers: Any = ("worker1", "worker2"), **options: Any) -> Any:
    from torch_ucx_rpc import pipeline

    return pipeline.DistributedPipeline(model, list(workers), **{"loss": F.mse_loss, "chunks": 4, **options})


def assert_equal_gradients(pipe: Any, model: nn.Module) -> None:
    found = pipe.gradients()
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert (found[name] is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            assert torch.equal(found[name], parameter.grad), f"{name}: {(found[name] - parameter.grad).abs().max()}"
