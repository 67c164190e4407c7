"""Messages between the driver and its workers: plain values, which travel by pickle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from torch_ucx_rpc.pipeline._values import Packet
from torch_ucx_rpc.pipeline._wiring import StageSpec

__all__ = ["Autocast", "Failure", "HostConfig", "Request"]

# (device type, dtype) of the autocast that was on where the step was called.
Autocast = tuple[tuple[str, torch.dtype], ...]


@dataclasses.dataclass
class HostConfig:
    """The settings with which a worker makes its stages."""

    host: str
    """Name of this host."""
    row: int
    """Its row in the schedule."""
    specs: list[StageSpec]
    device: str
    routes: list[tuple[str, str]]
    """Worker and host of each stage."""
    loss: Callable[..., Any] | None
    rematerialize: bool
    driver: str
    """Name of the worker that gives the orders."""
    driver_session: int
    """Number of that worker's life."""
    driver_box: str
    """The channel of the answers to the driver."""
    tell: Callable[..., None]
    """The function with which a host reports a failure to the driver."""
    epoch: int
    mode: bool | None
    """The mode set for all modules. With None each has the mode in which it was given."""


class Request(NamedTuple):
    """One call as one worker needs it: the payload of the order ``run``."""

    row_key: tuple[Any, ...]
    """The key under which the worker knows its row."""
    call: int
    """The number under which the graphs of forward are kept."""
    micro_batches: int
    inputs: Mapping[int, list[Packet]] = {}
    """Values of the batch, by stage, for each micro-batch."""
    targets: list[tuple[Any, ...]] | None = None
    grad: bool = True
    to_driver: bool = False
    output_gradients: list[list[torch.Tensor | None]] | None = None
    input_gradients: bool = False
    autocast: Autocast = ()
    scale: float | None = None
    record: bool = False
    shows_output: bool = False
    """Whether the driver wants the output, though its backward runs without the driver."""
    apart: bool = False
    """Whether this call's gradients wait for a factor beside those of earlier calls."""

    @property
    def adds_gradients(self) -> bool:
        """Whether it has a backward, after its own forward or an earlier call's."""
        return self.grad and not self.to_driver


class Failure(NamedTuple):
    """The outcome of an order whose code raised."""

    error: str
    """Type and text of the exception."""
    traceback: str
    """The frames of the stage's own code."""
    stage: int | None = None
    micro_batch: int | None = None
    doing: str | None = None
    """The action, such as "the forward". None, like the two before, if no schedule was running."""
