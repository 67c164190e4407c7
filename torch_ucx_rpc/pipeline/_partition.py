"""A model divided into stages (`Partition`), as data that travels to the workers: tied weights, and the graph of values
between stages."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from torch_ucx_rpc.pipeline._errors import PipelineError

__all__ = [
    "DRIVER",
    "INPUT",
    "Edge",
    "Partition",
    "Ref",
    "StageInfo",
    "StageSpec",
    "Tie",
    "close_to",
    "connect",
    "fill",
    "lent_names",
    "listed",
    "parameter_count",
    "tie",
]

# Sources and targets of values that are not stages. Stages count from 0.
INPUT = -1
DRIVER = -2


@dataclasses.dataclass(frozen=True)
class Ref:
    """A value of another stage (or of the batch, `INPUT`): the whole output, or an item of it."""

    source: int
    item: int | None = None


@dataclasses.dataclass(frozen=True)
class Edge:
    """A value that one stage sends another for each micro-batch: its whole output, or some items of it."""

    source: int
    target: int
    items: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Tie:
    """A parameter that several stages use. The first of these stages owns the parameter: it sums the gradients and has
    the optimizer's state."""

    number: int
    name: str
    """Name in the state of the stage that gets this description."""
    owner: int
    users: tuple[int, ...]
    """The other stages, last first, as autograd sums gradients in one process."""


@dataclasses.dataclass
class StageSpec:
    """The description of a stage, for its worker."""

    index: int
    module: Any
    """An nn.Module, a `Built`, or an RRef to a module that lives on the worker already. For a spare, a `Skeleton`."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None
    """Positional and keyword arguments with `Ref` in them; None: the arguments of the batch."""
    output: Any = None
    """In the last stage, the model's output as a structure with `Ref`, if that is more than the stage's output."""
    edges_in: tuple[Edge, ...] = ()
    edges_out: tuple[Edge, ...] = ()
    ties: tuple[Tie, ...] = ()
    prefix: str = ""
    """Prefix of the names of the stage's parameters in the undivided model."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Names of this stage's state, and the other names that the undivided model has for the same tensors."""


def _edges_to(target: int, wanted: Any) -> list[Edge]:
    """Return the edges to ``target`` that the references in ``wanted`` (a structure) need."""
    items: dict[int, set[int] | None] = {}
    for leaf in pytree.tree_leaves(wanted, is_leaf=lambda value: isinstance(value, Ref)):
        if isinstance(leaf, Ref) and leaf.source != target:
            if leaf.item is None:
                items[leaf.source] = None
            elif (known := items.setdefault(leaf.source, set())) is not None:
                known.add(leaf.item)
    return [
        Edge(source, target, None if some is None else tuple(sorted(some))) for source, some in sorted(items.items())
    ]


def fill(wanted: Any, edges: Sequence[Edge], arrived: dict[int, Any]) -> Any:
    """Return ``wanted`` with values in place of the references; ``arrived`` has the values of each edge, by source."""
    places = {edge.source: edge.items for edge in edges}

    def look_up(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        value = arrived[leaf.source]
        if leaf.item is None:
            return value
        items = places.get(leaf.source)
        return value[leaf.item] if items is None else value[items.index(leaf.item)]

    return pytree.tree_map(look_up, wanted, is_leaf=lambda value: isinstance(value, Ref))


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
    names: list[str] | None = None
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
    """Return the full names of tied parameters in their owners, by their full names in the other stages."""
    owned = {one.number: spec.prefix + one.name for spec in specs for one in spec.ties if one.owner == spec.index}
    return {spec.prefix + one.name: owned[one.number] for spec in specs for one in spec.ties if one.owner != spec.index}


def connect(specs: Sequence[StageSpec]) -> None:
    """Fill in the edges between stages, from the references in their arguments and in the output."""
    outgoing: dict[int, list[Edge]] = {}
    for spec in specs:
        edges = _edges_to(spec.index, (spec.arguments, spec.output))
        if not edges:
            raise PipelineError(
                f"stage {spec.index} takes nothing from the batch nor from an earlier stage, so it cannot be part of a "
                f"pipeline: put its code into the stage that uses it."
            )
        spec.edges_in = tuple(edges)
        for edge in edges:
            outgoing.setdefault(edge.source, []).append(edge)
    for spec in specs[:-1]:
        spec.edges_out = tuple(outgoing.get(spec.index, ()))
    specs[-1].edges_out = ()


def listed(names: Sequence[str]) -> str:
    """Return a list for ``print(pipe)``."""
    return ", ".join(names if len(names) < 5 else [*names[:2], "...", names[-1]])


def close_to(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
