"""What of a pipeline a checkpoint holds, part by part: each worker its own, under the names of the undivided model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from torch_ucx_rpc.checkpoint import Part
from torch_ucx_rpc.pipeline import host
from torch_ucx_rpc.pipeline.optimizer import named_state, set_state

if TYPE_CHECKING:
    from torch_ucx_rpc.pipeline.driver import DistributedPipeline
    from torch_ucx_rpc.pipeline.optimizer import PipelineOptimizer

__all__ = ["RandomState", "model_parts", "optimizer_parts"]

Path = tuple[Any, ...]


def model_parts(pipe: DistributedPipeline) -> list[Part]:
    return [
        Part(place.worker, _model_state, _model_template, _set_model_state, (place.host,))
        for place in pipe._crew.places
    ]


def _model_state(name: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for _, stage in sorted(host.find(name).stages.items()):
        state.update(stage.state_dict())
    return state


def _model_template(name: str, saved: Mapping[Path, Any]) -> dict[str, Any]:
    # The tensors themselves: they are read into.
    return _model_state(name)


def _set_model_state(name: str, state: dict[str, Any]) -> None:
    for stage in host.find(name).stages.values():
        # A value that is no tensor could not be read into: a module's extra state.
        prefix = stage.spec.prefix
        extra = {
            key: state[prefix + key]
            for key, value in stage.module.state_dict().items()
            if not isinstance(value, torch.Tensor) and prefix + key in state
        }
        if extra:
            stage.module.load_state_dict(extra, strict=False)


def optimizer_parts(optimizer: PipelineOptimizer) -> list[Part]:
    pipe = optimizer._pipe
    parts = [
        Part(place.worker, _optimizer_state, _optimizer_template, _set_optimizer_state, (place.host, optimizer._number))
        for place in pipe._crew.places
    ]
    return [
        Part(None, lambda: _groups(optimizer), _any_groups, lambda state: _set_groups(optimizer, state), ()),
        *parts,
    ]


def _groups(optimizer: PipelineOptimizer) -> dict[str, Any]:
    return {"param_groups": optimizer.groups_by_name()}


def _any_groups(saved: Mapping[Path, Any]) -> dict[str, Any]:
    # A placeholder for each entry, in the structure in which they were saved.
    found: dict[str, Any] = {}
    for path in saved:
        if path[0] == "param_groups":
            if len(path) == 1:
                return {"param_groups": []}
            groups = found.setdefault("param_groups", [])
            while len(groups) <= path[1]:
                groups.append({})
            groups[path[1]][path[2]] = None
    return found


def _set_groups(optimizer: PipelineOptimizer, state: dict[str, Any]) -> None:
    if "param_groups" in state:
        optimizer.load_groups(state["param_groups"])


def _optimizer_state(name: str, number: int) -> dict[str, Any]:
    return {"state": named_state(host.find(name), number)}


def _optimizer_template(name: str, number: int, saved: Mapping[Path, Any]) -> dict[str, Any]:
    mine = {parameter for parameter, _ in host.find(name)._owned_parameters()}
    state: dict[str, dict[str, Any]] = {}
    for path, kind in saved.items():
        if len(path) == 3 and path[0] == "state" and path[1] in mine:
            empty = torch.empty(kind.size, dtype=kind.properties.dtype) if hasattr(kind, "size") else None
            state.setdefault(path[1], {})[path[2]] = empty
    return {"state": state}


def _set_optimizer_state(name: str, number: int, state: dict[str, Any]) -> None:
    set_state(host.find(name), number, state.get("state", {}))


class RandomState:
    """The generators of a pipeline's workers, so that dropout goes on as it would have.

    Args:
        pipe: whose.
        here: also of the driver's process, if that runs a stage.
    """

    def __init__(self, pipe: DistributedPipeline, here: bool = True) -> None:
        self._pipe = pipe
        self._here = here

    def checkpoint_parts(self) -> list[Part]:
        return [
            Part(place.worker, _random_state, _random_template, _set_random_state, (row, place.device), True)
            for row, place in enumerate(self._pipe._crew.places)
            if self._here or not place.is_here
        ]


def _random_state(row: int, device: str) -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return {f"row{row}": state}


def _random_template(row: int, device: str, saved: Mapping[Path, Any]) -> dict[str, Any]:
    # A pipeline with other rows takes those that fit.
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
