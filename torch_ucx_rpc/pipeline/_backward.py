"""The backward of one micro-batch through one stage: whole, or as gradient of the inputs now and of the weights later.

The result equals, bit for bit, the gradients that autograd computes for the undivided model. To that end, if several
stages use a value, this module sums its gradients in autograd's order: last stage first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining import _backward as torchs

__all__ = ["HalfDone", "inputs_half", "sum_by_tensor", "weights_half", "whole"]

Tensors = Sequence[torch.Tensor]


def sum_by_tensor(tensors: Tensors, gradients: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor], list[Any]]:
    """List each tensor once, with the sum of its gradients in the given order. This leaves out tensors without a
    gradient."""
    found: dict[int, int] = {}
    roots: list[torch.Tensor] = []
    sums: list[Any] = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is None:
            continue
        place = found.setdefault(id(tensor), len(roots))
        if place == len(roots):
            roots.append(tensor)
            sums.append(gradient)
        else:
            sums[place] = sums[place] + gradient
    return roots, sums


def whole(roots: Tensors, gradients: Sequence[Any]) -> None:
    """Add the gradients of inputs and weights to their ``grad``."""
    if roots:
        torch.autograd.backward(list(roots), list(gradients))


class HalfDone(NamedTuple):
    """State that `inputs_half` leaves for `weights_half`."""

    roots: list[torch.Tensor]
    gradients: list[Any]
    parts: list[tuple[list[GradientEdge], list[torch.Tensor], set[Any]]]
    """Edges, the gradients that arrive there, and the nodes of the weights whose gradients follow from these."""


def inputs_half(roots: Tensors, gradients: Sequence[Any], inputs: Tensors, weights: Tensors) -> HalfDone:
    """Add the gradients of ``inputs`` to their ``grad``, and put off those of the weights.

    torch's analysis of the graph finds the nodes at which the paths to weights leave the path to the inputs. `HalfDone`
    keeps the gradients that arrive there, so `weights_half` computes nothing twice.
    """
    roots, gradients = list(roots), list(gradients)
    if not roots or not inputs:
        return HalfDone(roots, gradients, [])
    find = torchs._get_grad_fn_or_grad_acc
    ends, begins, own = ([node for node in map(find, some) if node is not None] for some in (roots, inputs, weights))
    reverse = torchs.construct_reverse_graph(ends)
    way_to_inputs, _ = torchs.reverse_closure(begins, set(), reverse)
    # Pass over weights with a path to an output that does not meet the inputs' path: `weights_half` handles them apart.
    beside = _reached_from(node for node in ends if node not in way_to_inputs)
    parts = []
    for group in torchs.get_param_groups(begins, own, reverse):
        nodes = set(group["params"]) - beside
        # Autograd handles a weight that is used at several places: it adds up the gradients in the right order.
        if len(group["intermediates"]) == 1 and nodes:
            [node] = group["intermediates"]
            parts.append(([GradientEdge(node, place) for place in range(len(node._input_metadata))], nodes))
    edges = [edge for some, _ in parts for edge in some]
    wanted: list[Any] = [*inputs, *edges]
    found = torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
    for leaf, gradient in zip(inputs, found, strict=False):
        leaf.grad = gradient
    arrived = iter(zip(edges, found[len(inputs) :], strict=True))
    kept = []
    for some, nodes in parts:
        pairs = [(edge, gradient) for edge, gradient in itertools.islice(arrived, len(some)) if gradient is not None]
        if pairs:
            kept.append(([edge for edge, _ in pairs], [gradient for _, gradient in pairs], nodes))
    return HalfDone(roots, gradients, kept)


def _reached_from(nodes: Iterable[Any]) -> frozenset[Any]:
    """Return these nodes, and all nodes that a backward reaches from them."""
    found: set[Any] = set()
    open_ = list(nodes)
    while open_:
        node = open_.pop()
        if node not in found:
            found.add(node)
            open_ += [following for following, _ in node.next_functions if following is not None]
    return frozenset(found)


def weights_half(half: HalfDone, weights: Tensors) -> None:
    """Add the gradients that `inputs_half` has put off to the ``grad`` of ``weights``."""
    weight_of = {torchs._get_grad_fn_or_grad_acc(weight): weight for weight in weights if weight.requires_grad}
    nodes = {node for _, _, some in half.parts for node in some}
    apart = [weight for node, weight in weight_of.items() if node not in nodes]
    # Unlike grad(), backward() gives each weight a gradient of its own, even if two weights have the same one.
    if half.roots and apart:
        torch.autograd.backward(half.roots, half.gradients, retain_graph=True, inputs=apart)
    for edges, gradients, some in half.parts:
        torch.autograd.backward(edges, gradients, inputs=[weight_of[node] for node in some])
