"""The stages of one pipeline on one worker, and the driver's orders to them (`Stages`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torch_ucx_rpc.pipeline import _build
from torch_ucx_rpc.pipeline._exchange import Exchange
from torch_ucx_rpc.pipeline._messages import HostConfig, Request
from torch_ucx_rpc.pipeline._run import Run
from torch_ucx_rpc.pipeline._schedule import Row
from torch_ucx_rpc.pipeline._stage import Stage

__all__ = ["Stages"]


class Stages:
    """The stages with their optimizers. They belong to the host's thread.

    ``order_<name>(payload)`` carries out the driver's order of that name.
    """

    def __init__(self, config: HostConfig, exchange: Exchange) -> None:
        self._exchange = exchange
        self._device = torch.device(config.device)
        self.by_index = {
            spec.index: Stage(
                spec,
                _build.on_worker(spec, self._device),
                self._device,
                rematerialize=config.rematerialize,
                loss=config.loss,
            )
            for spec in config.specs
        }
        for stage in self.by_index.values():
            stage.train(config.mode)
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._number_of_row = config.row
        self._rows: dict[tuple[Any, ...], Row] = {}
        # Gradients that a failed step has added to: no optimizer may use them.
        self._spoilt = False
        # The last call: the number of its message, its own number, and the parameters that had no gradient before.
        self._last_run: tuple[int, int, list[nn.Parameter]] = (-1, -1, [])
        # While the gradients of the last call wait for their factor: those of earlier calls.
        self._earlier: list[tuple[nn.Parameter, torch.Tensor]] | None = None

    def clear(self) -> None:
        self.by_index.clear()
        self._optimizers.clear()

    def owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by the names of the undivided model, without those that a stage of another worker owns."""
        for _, stage in sorted(self.by_index.items()):
            yield from stage.owned_parameters()

    def forget(self, call: int) -> None:
        """Free what the stages keep of a call for its backward."""
        for stage in self.by_index.values():
            stage.forget(call)

    # --------------------------------------------------------------------------------------------------------- a call

    def order_run(self, request: Request) -> dict[str, Any]:
        if request.apart:
            self._earlier = [(one, one.grad) for one in self._parameters() if one.grad is not None]
            for parameter, _ in self._earlier:
                parameter.grad = None
        # List the parameters without gradients: those that a part of the batch gives them are useless.
        fresh = [one for one in self._parameters() if one.grad is None] if request.adds_gradients else []
        self._last_run = self._exchange.number, request.call, fresh
        return Run(self.by_index, self._exchange, request).carry_out(self._rows[request.row_key])

    def order_rows(self, rows: list[tuple[Any, Sequence[Row]]]) -> None:
        """Learn the rows of calls, by the key of the call."""
        self._rows.update((key, of_all[self._number_of_row]) for key, of_all in rows)

    def order_weigh(self, factor: float) -> None:
        """Multiply the gradients of the last call, and add them to the earlier ones. Repeating this does no harm."""
        if self._earlier is None:
            return
        if factor != 1.0:
            for parameter in self._parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        for parameter, gradient in self._earlier:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._earlier = None

    def _parameters(self) -> Iterator[nn.Parameter]:
        for stage in self.by_index.values():
            yield from stage.module.parameters()

    def end_epoch(self, at: int, spoils: bool) -> None:
        """Undo the call of the message ``at``, or of a later one: the other workers may not have carried it out.

        Gradients that it created are removed. If the call ``spoils`` the others, no optimizer on any worker may use
        them.
        """
        number, call, fresh = self._last_run
        if number >= at:
            self.forget(call)
            for parameter in fresh:
                parameter.grad = None
            for parameter, gradient in self._earlier or ():
                parameter.grad = gradient
            self._earlier = None
        if spoils:
            self._spoilt = any(parameter.grad is not None for parameter in self._parameters())
        self._last_run = (-1, -1, [])

    # ---------------------------------------------------------------------------------------------- other orders

    def order_crew(self, payload: dict[str, Any]) -> None:
        """Workers have been replaced."""
        self._exchange.set_routes(payload["routes"])
        self.order_rows(payload["rows"])
        # A call whose graphs are not on all workers any more cannot go back.
        for stage in self.by_index.values():
            stage.graphs.clear()
        self.order_zero_grad(True)

    def order_forget(self, calls: list[int]) -> None:
        for call in calls:
            self.forget(call)

    def order_train(self, payload: dict[str, Any]) -> None:
        for stage in self.by_index.values():
            stage.train(payload["mode"])

    def order_requires_grad(self, payload: dict[str, bool]) -> None:
        """Set which parameters want a gradient, by name."""
        for stage in self.by_index.values():
            for name, parameter in stage.named_parameters():
                parameter.requires_grad_(payload[name])

    def order_zero_grad(self, set_to_none: bool) -> None:
        self._spoilt = False
        self._earlier = None
        for stage in self.by_index.values():
            stage.module.zero_grad(set_to_none=set_to_none)

    def order_optimizer(self, payload: dict[str, Any] | None) -> None:
        if payload is None:
            return
        parameters = dict(self.owned_parameters())
        groups = []
        for group in payload["groups"]:
            here = [(name, parameters[name]) for name in group["names"] if name in parameters]
            groups.append({**{key: value for key, value in group.items() if key != "names"}, "params": here})
        if any(group["params"] for group in groups):
            self._optimizers[payload["optimizer"]] = payload["class"](
                [{**group, "params": [parameter for _, parameter in group["params"]]} for group in groups],
                **payload["options"],
            )

    def order_optimizer_step(self, payload: dict[str, Any]) -> None:
        optimizer = self._optimizers.get(payload["optimizer"])
        if self._spoilt:
            raise RuntimeError(
                "the last step failed and has left a part of its gradients beside those of earlier steps: call "
                "optimizer.zero_grad() before the next step"
            )
        if optimizer is not None:
            for group, values in zip(optimizer.param_groups, payload["groups"], strict=True):
                group.update(values)
            optimizer.step()
        self._share_tied_values()

    def order_set_values(self, payload: dict[str, Any]) -> None:
        """Copy the owners' values of tied parameters to all their users, after a load."""
        self._share_tied_values()

    def _share_tied_values(self) -> None:
        for stage in self.by_index.values():
            for tie, parameter in stage.ties:
                if tie.owner == stage.index:
                    for user in tie.users:
                        # Send a copy: the optimizer may step again before it has been fetched.
                        value = parameter.detach().clone()
                        self._exchange.send(("V", user, 0, stage.index, tie.number), value)
        for stage in self.by_index.values():
            for tie, parameter in stage.ties:
                if tie.owner != stage.index:
                    value = self._exchange.take(("V", stage.index, 0, tie.owner, tie.number))
                    with torch.no_grad():
                        parameter.copy_(value)

    def order_gradient_norms(self, payload: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Norm of each gradient, by the parameter's name."""
        named = [(name, one.grad) for name, one in self.owned_parameters() if one.grad is not None]
        if not named:
            return {}
        norms = torch._foreach_norm([gradient for _, gradient in named], payload["norm_type"])
        return {name: norm.cpu() for (name, _), norm in zip(named, norms, strict=True)}

    def order_scale_gradients(self, payload: dict[str, Any]) -> bool:
        """Multiply all gradients, or those of an optimizer's parameters. Returns for the latter whether all are
        finite."""
        if "optimizer" not in payload:
            self._scale_gradients((one for _, one in self.owned_parameters()), payload["factor"])
            return True
        optimizer = self._optimizers.get(payload["optimizer"])
        groups = [] if optimizer is None else optimizer.param_groups
        scaled = self._scale_gradients((one for group in groups for one in group["params"]), payload["factor"])
        return all(bool(gradient.isfinite().all()) for gradient in scaled)

    @staticmethod
    def _scale_gradients(parameters: Iterable[nn.Parameter], factor: torch.Tensor) -> list[torch.Tensor]:
        gradients = [one.grad for one in parameters if one.grad is not None]
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
        return gradients

    def order_gradients(self, payload: dict[str, Any]) -> dict[str, torch.Tensor | None]:
        return {name: _copy(one.grad) for name, one in self.owned_parameters()}

    def order_state_dict(self, payload: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for stage in self.by_index.values():
            for name, value in stage.state_dict().items():
                found[name] = _copy(value)
        return found

    def order_load_state_dict(self, payload: dict[str, Any]) -> None:
        for stage in self.by_index.values():
            prefix = stage.spec.prefix
            own = stage.module.state_dict()
            stage.module.load_state_dict({name: payload["state"][prefix + name] for name in own})

    def order_synchronize(self, payload: dict[str, Any]) -> None:
        """Do nothing: the answer shows that all earlier orders have been carried out."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    # ------------------------------------------------------------------------------------ gradients and optimizers

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that optimizers may use, by the parameter's name."""
        if self._spoilt:
            return {}
        return {name: one.grad for name, one in self.owned_parameters() if one.grad is not None}

    def optimizer_state(self, number: int) -> dict[str, dict[str, Any]]:
        """Return the state of a worker's part of an optimizer, by parameter, with the optimizer's own tensors."""
        optimizer = self._optimizers.get(number)
        if optimizer is None:
            return {}
        return {name: optimizer.state[one] for name, one in self.owned_parameters() if one in optimizer.state}

    def set_optimizer_state(self, number: int, states: dict[str, dict[str, Any]]) -> None:
        """Give a worker's part the states of its parameters."""
        optimizer = self._optimizers.get(number)
        if optimizer is None:
            return
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        places = {id(one): place for place, one in enumerate(parameters)}
        state = {
            places[id(one)]: states[name]
            for name, one in self.owned_parameters()
            if name in states and id(one) in places
        }
        groups = optimizer.state_dict()["param_groups"]
        # Torch's own load puts each tensor on the device and in the type that the optimizer wants.
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def order_optimizer_state(self, payload: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {
            name: {key: _copy(value) for key, value in state.items()}
            for name, state in self.optimizer_state(payload["optimizer"]).items()
        }

    def order_set_optimizer_state(self, payload: dict[str, Any]) -> None:
        self.set_optimizer_state(payload["optimizer"], payload["state"])


def _copy(value: Any) -> Any:
    """Copy a tensor's value to the CPU: the answer with it may leave after the next order has begun."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
