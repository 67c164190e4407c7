"""The parts of a worker's state, for checkpoints and for the driver, under the names of the undivided model.

``part_of(stages, "model")``, ``"optimizer", number``, ``"gradients"`` and ``"random"`` have one interface, that of
`torch_ucx_rpc.checkpoint.Part`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["part_of"]

Path = tuple[Any, ...]


def part_of(stages: Any, kind: str, *arguments: Any) -> Any:
    """Return a part of the state of `Stages`.

    ``collect()`` is the state, with the living tensors. ``room(saved)`` makes tensors to read a checkpoint into, from
    the checkpoint's metadata. ``apply(state)`` takes a state.
    """
    return _KINDS[kind](stages, *arguments)


class _Model:
    def __init__(self, stages: Any) -> None:
        self._stages = [stage for _, stage in sorted(stages.by_index.items())]

    def collect(self) -> dict[str, Any]:
        return {name: value for stage in self._stages for name, value in stage.state_dict().items()}

    def room(self, saved: Mapping[Path, Any]) -> dict[str, Any]:
        return self.collect()

    def apply(self, state: dict[str, Any]) -> None:
        for stage in self._stages:
            own = {name: state.get(stage.spec.prefix + name) for name in stage.module.state_dict()}
            stage.module.load_state_dict({name: one for name, one in own.items() if one is not None}, strict=False)


class _Optimizer:
    def __init__(self, stages: Any, number: int) -> None:
        self._optimizer = stages.optimizers.get(number)
        self._parameters = dict(stages.owned_parameters())

    def collect(self) -> dict[str, Any]:
        state = {} if self._optimizer is None else self._optimizer.state
        return {"state": {name: state[one] for name, one in self._parameters.items() if one in state}}

    def room(self, saved: Mapping[Path, Any]) -> dict[str, Any]:
        from torch_ucx_rpc.checkpoint.optimizers import room_for

        mine = {path: kind for path, kind in saved.items() if path[0] == "state" and path[1] in self._parameters}
        return room_for(mine, self.collect())

    def apply(self, state: dict[str, Any]) -> None:
        if self._optimizer is None:
            return
        names = {id(one): name for name, one in self._parameters.items()}
        parameters = [one for group in self._optimizer.param_groups for one in group["params"]]
        saved = state.get("state", {})
        by_place = {place: saved[names[id(one)]] for place, one in enumerate(parameters) if names[id(one)] in saved}
        groups = self._optimizer.state_dict()["param_groups"]
        # torch's own load puts each tensor on the device and in the type that the optimizer wants.
        self._optimizer.load_state_dict({"state": by_place, "param_groups": groups})


class _Gradients:
    """Gradients that no optimizer has used yet."""

    def __init__(self, stages: Any) -> None:
        self._parameters = dict(stages.owned_parameters())

    def collect(self) -> dict[str, Any]:
        return {name: one.grad for name, one in self._parameters.items() if one.grad is not None}

    def room(self, saved: Mapping[Path, Any]) -> dict[str, Any]:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        return {
            name: torch.empty_like(one.detach()) if isinstance(saved[name,], TensorStorageMetadata) else None
            for name, one in self._parameters.items()
            if (name,) in saved
        }

    def apply(self, state: dict[str, Any]) -> None:
        for name, gradient in state.items():
            one = self._parameters[name]
            one.grad = gradient[0].to(one.device) if isinstance(gradient, tuple) else gradient


class _Random:
    """The generators of the worker, so that dropout continues exactly."""

    def __init__(self, stages: Any) -> None:
        self._key = f"row{stages.config.row}"
        self._device = torch.device(stages.config.device)

    def collect(self) -> dict[str, Any]:
        state = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return {self._key: state}

    def room(self, saved: Mapping[Path, Any]) -> dict[str, Any]:
        # A pipeline with other rows takes the generators that fit.
        mine = {path[1]: kind for path, kind in saved.items() if path[0] == self._key}
        found = {name: torch.empty(kind.size, dtype=torch.uint8) for name, kind in mine.items()}
        return {self._key: found} if found else {}

    def apply(self, state: dict[str, Any]) -> None:
        for kind, value in state.get(self._key, {}).items():
            if kind == "cpu":
                torch.set_rng_state(value)
            elif self._device.type == "cuda":
                torch.cuda.set_rng_state(value, self._device)


_KINDS: dict[str, Any] = {"model": _Model, "optimizer": _Optimizer, "gradients": _Gradients, "random": _Random}
