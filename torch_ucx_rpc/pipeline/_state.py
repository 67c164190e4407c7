"""The parts of a pipeline in a checkpoint: each worker writes its own, under the names of the undivided model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_ucx_rpc.checkpoint import Part
from torch_ucx_rpc.checkpoint.optimizers import check_groups, room_for
from torch_ucx_rpc.pipeline import _host
from torch_ucx_rpc.pipeline._crew import Place

__all__ = ["gradients", "model_parts", "optimizer_parts", "random_state"]

Path = tuple[Any, ...]


class Parts(NamedTuple):
    """What `torch_ucx_rpc.checkpoint` saves and loads by its parts."""

    parts: list[Part]

    def checkpoint_parts(self) -> list[Part]:
        return self.parts


def model_parts(places: Sequence[Place]) -> list[Part]:
    return [Part(place.worker, _model_state, _model_template, _set_model_state, (place.host,)) for place in places]


def _model_state(name: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for _, stage in sorted(_host.find(name).by_index.items()):
        state.update(stage.state_dict())
    return state


def _model_template(name: str, saved: Mapping[Path, Any]) -> dict[str, Any]:
    # Return the tensors themselves, since the checkpoint is read into them.
    return _model_state(name)


def _set_model_state(name: str, state: dict[str, Any]) -> None:
    for stage in _host.find(name).by_index.values():
        # A value that is not a tensor, such as a module's extra state, could not be read into.
        prefix = stage.spec.prefix
        extra = {
            key: state[prefix + key]
            for key, value in stage.module.state_dict().items()
            if not isinstance(value, torch.Tensor) and prefix + key in state
        }
        if extra:
            stage.module.load_state_dict(extra, strict=False)


def optimizer_parts(places: Sequence[Place], number: int, optimizer: Any) -> list[Part]:
    """The parts of a `PipelineOptimizer`: its groups are with the driver, and its state on the workers."""

    def groups() -> dict[str, Any]:
        return {"param_groups": optimizer.groups_by_name()}

    def groups_room(saved: Mapping[Path, Any]) -> dict[str, Any]:
        check_groups(len(optimizer.param_groups), saved)
        return room_for({path: kind for path, kind in saved.items() if path[0] == "param_groups"}, {})

    def set_groups(state: dict[str, Any]) -> None:
        if "param_groups" in state:
            optimizer.load_groups(state["param_groups"])

    return [
        Part(None, groups, groups_room, set_groups),
        *(
            Part(place.worker, _optimizer_state, _optimizer_room, _set_optimizer_state, (place.host, number))
            for place in places
        ),
    ]


def _optimizer_state(name: str, number: int) -> dict[str, Any]:
    return {"state": _host.find(name).optimizer_state(number)}


def _optimizer_room(name: str, number: int, saved: Mapping[Path, Any]) -> dict[str, Any]:
    mine = {parameter for parameter, _ in _host.find(name).owned_parameters()}
    of_mine = {path: kind for path, kind in saved.items() if path[0] == "state" and len(path) > 1 and path[1] in mine}
    return room_for(of_mine, _optimizer_state(name, number))


def _set_optimizer_state(name: str, number: int, state: dict[str, Any]) -> None:
    _host.find(name).set_optimizer_state(number, state.get("state", {}))


def gradients(places: Sequence[Place]) -> Parts:
    """Gradients that no optimizer has used yet."""
    return Parts(
        [Part(place.worker, _gradients, _gradients_room, _set_gradients, (place.host,), True) for place in places]
    )


def _gradients(name: str) -> dict[str, Any]:
    # DCP has no sparse tensors. In a tuple they are pickled, and a pickle should not need a device.
    return {
        parameter: gradient if gradient.layout == torch.strided else (gradient.cpu(),)
        for parameter, gradient in _host.find(name).gradients().items()
    }


def _gradients_room(name: str, saved: Mapping[Path, Any]) -> dict[str, Any]:
    return {
        parameter: torch.empty_like(one.detach()) if isinstance(saved[parameter,], TensorStorageMetadata) else None
        for parameter, one in _host.find(name).owned_parameters()
        if (parameter,) in saved
    }


def _set_gradients(name: str, state: dict[str, Any]) -> None:
    for parameter, one in _host.find(name).owned_parameters():
        if parameter in state:
            gradient = state[parameter]
            one.grad = gradient[0].to(one.device) if isinstance(gradient, tuple) else gradient


def random_state(places: Sequence[Place], here: bool) -> Parts:
    """The generators of the workers, so that dropout continues exactly. ``here``: also those of the driver's process,
    if it runs a stage."""
    return Parts(
        [
            Part(place.worker, _random_state, _random_template, _set_random_state, (row, place.device), True)
            for row, place in enumerate(places)
            if here or not place.is_here
        ]
    )


def _random_state(row: int, device: str) -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return {f"row{row}": state}


def _random_template(row: int, device: str, saved: Mapping[Path, Any]) -> dict[str, Any]:
    # A pipeline with other rows takes the generators that fit.
    found = {
        path[1]: torch.empty(kind.size, dtype=torch.uint8) for path, kind in saved.items() if path[0] == f"row{row}"
    }
    return {f"row{row}": found} if found else {}


def _set_random_state(row: int, device: str, state: dict[str, Any]) -> None:
    for kind, value in state.get(f"row{row}", {}).items():
        if kind == "cpu":
            torch.set_rng_state(value)
        elif torch.device(device).type == "cuda":
            torch.cuda.set_rng_state(value, device)
