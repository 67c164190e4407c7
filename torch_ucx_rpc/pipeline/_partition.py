"""A model divided into stages (`Partition`), and the links between them: tied weights and edges."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from torch_ucx_rpc.pipeline._errors import PipelineError
from torch_ucx_rpc.pipeline._wiring import Edge, StageSpec, Tie, edges_to

__all__ = ["Partition", "StageInfo", "close_to", "connect", "lent_names", "parameter_count", "tie"]


@dataclasses.dataclass
class StageInfo:
    """A line of the table that ``print(pipe)`` shows."""

    layers: str
    parameters: int | None
    milliseconds: float | None = None


@dataclasses.dataclass
class Partition:
    """A model divided into stages."""

    specs: list[StageSpec]
    infos: list[StageInfo]
    names: list[str] | None
    """Parameters in the order of the undivided model; None: in the order of the stages."""
    bind: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    """For a traced model, returns the arguments of a call, flat, as the stages count them."""

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call in the order of the stages. Raises TypeError or ValueError if they do not
        fit."""
        return (args, kwargs) if self.bind is None else self.bind(args, kwargs)


def parameter_count(modules: Iterable[nn.Module]) -> int:
    return sum(one.numel() for one in {id(one): one for part in modules for one in part.parameters()}.values())


def tie(specs: Sequence[StageSpec], named: Mapping[str, nn.Parameter]) -> None:
    """Tell the stages which of their parameters, by the names in ``named``, are the same tensor in the model."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in named.items():
        names_of.setdefault(id(parameter), []).append(name)
    homes: dict[int, dict[int, str]] = {}
    present: set[str] = set()
    for spec in specs:
        if isinstance(spec.module, nn.Module):
            for name, _ in spec.module.named_parameters(remove_duplicate=False):
                full = spec.prefix + name
                present.add(full)
                if full in named:
                    homes.setdefault(id(named[full]), {}).setdefault(spec.index, name)
    number = 0
    for identity, by_stage in homes.items():
        owner = min(by_stage)
        spare = [name for name in names_of[identity] if name not in present]
        if spare:
            spec = specs[owner]
            spec.aliases += tuple((spec.prefix + by_stage[owner], name) for name in spare)
        if len(by_stage) > 1:
            users = tuple(sorted(by_stage.keys() - {owner}, reverse=True))
            for stage, name in by_stage.items():
                specs[stage].ties += (Tie(number, name, owner, users),)
            number += 1


def lent_names(specs: Sequence[StageSpec]) -> dict[str, str]:
    """Map the full name of a tied parameter in each stage that does not own it to its name in the owner."""
    owned = {one.number: spec.prefix + one.name for spec in specs for one in spec.ties if one.owner == spec.index}
    return {spec.prefix + one.name: owned[one.number] for spec in specs for one in spec.ties if one.owner != spec.index}


def connect(specs: Sequence[StageSpec]) -> None:
    """Fill in the edges between stages, from the references in their arguments and in the output."""
    outgoing: dict[int, list[Edge]] = {}
    for spec in specs:
        edges = edges_to(spec.index, (spec.arguments, spec.output))
        if not edges:
            raise PipelineError(
                f"stage {spec.index} takes nothing from the batch nor from an earlier stage, so it cannot be part of a "
                f"pipeline: put its code into the stage that uses it."
            )
        spec.edges_in = tuple(edges)
        for edge in edges:
            if edge.source > spec.index:
                raise PipelineError(f"stage {spec.index} needs what stage {edge.source} makes, which comes later")
            outgoing.setdefault(edge.source, []).append(edge)
    for spec in specs[:-1]:
        spec.edges_out = tuple(outgoing.get(spec.index, ()))
    specs[-1].edges_out = ()


def close_to(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
