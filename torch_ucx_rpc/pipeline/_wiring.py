"""The graph of values between stages, as data that travels to the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree as pytree

__all__ = ["DRIVER", "INPUT", "Edge", "Ref", "StageSpec", "Tie", "edges_to", "fill"]

# Sources and targets of values beside the stages, which count from 0.
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
    """A parameter that several stages use. The first of them owns it: it sums the gradients and has the optimizer's
    state."""

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
    """An nn.Module, a `Built`, or an RRef to a module that lives on the worker already."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None
    """Positional and keyword arguments with `Ref` in them; None: the arguments of the batch."""
    output: Any = None
    """In the last stage, the model's output as a structure with `Ref`, if that is more than the stage's output."""
    edges_in: tuple[Edge, ...] = ()
    edges_out: tuple[Edge, ...] = ()
    ties: tuple[Tie, ...] = ()
    prefix: str = ""
    """Prefix of the names of its parameters in the undivided model."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Names of this stage's state, and the other names that the undivided model has for the same tensors."""


def edges_to(target: int, wanted: Any) -> list[Edge]:
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
