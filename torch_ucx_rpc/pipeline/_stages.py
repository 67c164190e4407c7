"""The stages of one pipeline on one worker, and the driver's orders to them (`Stages`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from torch_ucx_rpc.pipeline import _build
from torch_ucx_rpc.pipeline._exchange import Exchange
from torch_ucx_rpc.pipeline._partition import StageSpec
from torch_ucx_rpc.pipeline._run import Run
from torch_ucx_rpc.pipeline._schedule import Schedules
from torch_ucx_rpc.pipeline._stage import Request, Stage
from torch_ucx_rpc.pipeline._state import part_of
from torch_ucx_rpc.pipeline._values import map_tensors

__all__ = ["HostConfig", "Stages"]


@dataclasses.dataclass
class HostConfig:
    """The settings with which a worker makes its stages."""

    host: str
    """Name of this host."""
    row: int
    """Its row in the schedule."""
    schedules: Schedules
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
    optimizers: list[tuple[Any, ...]]
    """Arguments of the order ``optimizer``, for each optimizer."""


class Stages:
    """The stages with their optimizers. They belong to the host's thread.

    ``order_<name>(*arguments)`` carries out the driver's order of that name.
    """

    def __init__(self, config: HostConfig, exchange: Exchange) -> None:
        self.config = config
        self._exchange = exchange
        self._device = torch.device(config.device)
        loss = config.loss
        if isinstance(loss, nn.Module) and any(spec.index == exchange.last_stage for spec in config.specs):
            # It may have tensors, such as the weights of classes. This host has a copy of its own.
            loss = loss.to(self._device)
        self.by_index = {
            spec.index: Stage(
                spec,
                _build.on_worker(spec, self._device),
                self._device,
                rematerialize=config.rematerialize,
                loss=loss,
            )
            for spec in config.specs
        }
        self.order_train(config.mode)
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        for arguments in config.optimizers:
            self.order_optimizer(*arguments)
        # The last call: number of its message, and its own number.
        self._last_run = (-1, -1)
        # The gradients before the last call that adds to them.
        self._before: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        # Whether the gradients of that call wait for their factor, apart from the earlier gradients.
        self._is_apart = False

    def clear(self) -> None:
        self.by_index.clear()
        self.optimizers.clear()
        self._before = []

    def owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by the names of the undivided model, without those that a stage of another worker owns."""
        for _, stage in sorted(self.by_index.items()):
            yield from stage.owned_parameters()

    # --------------------------------------------------------------------------------------------------------- a call

    def order_run(self, request: Request) -> dict[str, Any]:
        self._last_run = self._exchange.number, request.call
        if not self._is_apart:
            self._before = []
        if request.adds_gradients:
            self._is_apart = request.is_apart
            self._before = [(one, one.grad) for stage in self.by_index.values() for one in stage.module.parameters()]
            for parameter, gradient in self._before:
                if gradient is not None:
                    # The call adds to a copy, so it can be undone.
                    parameter.grad = None if request.is_apart else gradient.clone()
        row = self.config.schedules.rows(request.kind, request.micro_batches)[self.config.row]
        return Run(self.by_index, self._exchange, request).carry_out(row)

    def order_weigh(self, factor: float) -> None:
        """Multiply the gradients of the last call, and add them to the earlier ones. Repeating this does no harm."""
        if not self._is_apart:
            return
        self._is_apart = False
        for parameter, earlier in self._before:
            if parameter.grad is not None and factor != 1.0:
                parameter.grad.mul_(factor)
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._before = []

    def undo(self, at: int) -> None:
        """Undo the call of the message ``at``, or of a later one: the other workers may not have carried it out."""
        number, call = self._last_run
        if number >= at:
            self.order_forget([call])
            for parameter, gradient in self._before:
                parameter.grad = gradient
            self._before, self._is_apart = [], False
        self._last_run = (-1, -1)

    def order_forget(self, calls: list[int]) -> None:
        """Free the state that the stages keep for the backward of calls."""
        for call in calls:
            for stage in self.by_index.values():
                stage.forget(call)

    # ---------------------------------------------------------------------------------------------- other orders

    def order_routes(self, routes: list[tuple[str, str]]) -> None:
        """Take the stages' workers and hosts after some have been replaced."""
        self._exchange.set_routes(routes)
        # A call whose graphs are not on all workers any more cannot go back.
        for stage in self.by_index.values():
            stage.graphs.clear()

    def order_train(self, mode: bool | None) -> None:
        for stage in self.by_index.values():
            stage.train(mode)

    def order_requires_grad(self, wanted: dict[str, bool]) -> None:
        """Set which parameters want a gradient, by name."""
        for stage in self.by_index.values():
            for name, parameter in stage.named_parameters():
                parameter.requires_grad_(wanted[name])

    def order_zero_grad(self, set_to_none: bool) -> None:
        self._before, self._is_apart = [], False
        for stage in self.by_index.values():
            stage.module.zero_grad(set_to_none=set_to_none)

    def order_optimizer(self, number: int, cls: Any, options: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Make this worker's part of an optimizer, whose groups have names for parameters."""
        parameters = dict(self.owned_parameters())
        here = [{**one, "params": [parameters[name] for name in one["params"] if name in parameters]} for one in groups]
        if any(group["params"] for group in here):
            self.optimizers[number] = cls(here, **options)

    def order_optimizer_step(self, number: int, groups: list[dict[str, Any]]) -> None:
        if (optimizer := self.optimizers.get(number)) is not None:
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
            optimizer.step()
        self.order_share_tied_values()

    def order_share_tied_values(self) -> None:
        """Copy the owners' values of tied parameters to all their users."""
        for stage in self.by_index.values():
            for tie, parameter in stage.ties:
                if tie.owner == stage.index:
                    for user in tie.users:
                        # Send a copy: the optimizer may step again before the receiver has fetched the value.
                        value = parameter.detach().clone()
                        self._exchange.send(("V", user, 0, stage.index, tie.number), value)
        for stage in self.by_index.values():
            for tie, parameter in stage.ties:
                if tie.owner != stage.index:
                    value = self._exchange.take(("V", stage.index, 0, tie.owner, tie.number))
                    with torch.no_grad():
                        parameter.copy_(value)

    def order_gradient_norms(self, norm_type: float) -> dict[str, torch.Tensor]:
        """Norm of each gradient, by the parameter's name."""
        named = [(name, one.grad) for name, one in self.owned_parameters() if one.grad is not None]
        if not named:
            return {}
        norms = torch._foreach_norm([gradient for _, gradient in named], norm_type)
        return {name: norm.cpu() for (name, _), norm in zip(named, norms, strict=True)}

    def order_scale_gradients(self, factor: torch.Tensor) -> None:
        _scale_gradients((one for _, one in self.owned_parameters()), factor)

    def order_divide_gradients(self, number: int, factor: torch.Tensor) -> bool:
        """Multiply the gradients of an optimizer's parameters. Returns whether all are finite."""
        optimizer = self.optimizers.get(number)
        groups = [] if optimizer is None else optimizer.param_groups
        scaled = _scale_gradients((one for group in groups for one in group["params"]), factor)
        return all(bool(gradient.isfinite().all()) for gradient in scaled)

    def order_state(self, *what: Any) -> dict[str, Any]:
        """Return a part of the state: see `_state`. This copies it, since the answer may leave after the next order has
        begun."""
        state = part_of(self, *what).collect()
        return {name: map_tensors(lambda one: one.detach().to("cpu", copy=True), one) for name, one in state.items()}

    def order_set_state(self, state: dict[str, Any], *what: Any) -> None:
        part_of(self, *what).apply(state)

    def order_synchronize(self) -> None:
        """Wait for the device of the stages. The answer shows that all earlier orders have been carried out."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _scale_gradients(parameters: Iterable[nn.Parameter], factor: torch.Tensor) -> list[torch.Tensor]:
    gradients = [one.grad for one in parameters if one.grad is not None]
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
    return gradients
