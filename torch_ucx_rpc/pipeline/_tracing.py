"""Models other than nn.Sequential, divided by torch's own splitter (``torch.distributed.pipelining``)."""

from __future__ import annotations

import contextlib
import inspect
import operator
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.distributed.pipelining import SplitPoint
from torch.distributed.pipelining._IR import Pipe, annotate_split_points
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils import _pytree as pytree

from torch_ucx_rpc._arguments import wrong_value
from torch_ucx_rpc.pipeline._balance import balanced, timed
from torch_ucx_rpc.pipeline._build import Traced
from torch_ucx_rpc.pipeline._errors import PipelineError
from torch_ucx_rpc.pipeline._partition import (
    INPUT,
    Partition,
    Ref,
    StageInfo,
    StageSpec,
    close_to,
    connect,
    listed,
    parameter_count,
    tie,
)
from torch_ucx_rpc.pipeline._values import equal, map_tensors

__all__ = ["divide"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def divide(
    model: nn.Module,
    stages: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_spec: Mapping[str, SplitPoint] | None,
    balance: Any,
) -> Partition:
    """Divide a traced model into stages. ``args`` and ``kwargs`` are a micro-batch."""
    if split_spec is None:
        split_spec = _split_points(model, stages, args, kwargs, balance)
    _check(model, split_spec)
    # Copy each tensor: torch.export would treat two places with the same tensor as one.
    args, kwargs = map_tensors(torch.clone, _bound(inspect.signature(model.forward), args, kwargs))
    specs, program = _traced(model, args, kwargs, split_spec)
    if len(specs) != stages:
        raise ValueError(
            f"the split points make {len(specs)} stages, but the workers run {stages}: give {stages - 1} split points "
            f"that are not at the very beginning or end."
        )
    with _in_the_other_mode(model):
        others, _ = _traced(model, args, kwargs, split_spec)
    if [(spec.arguments, spec.output) for spec in specs] != [(spec.arguments, spec.output) for spec in others]:
        raise PipelineError(
            "the model passes other values between these stages when it trains than when it evaluates, so one "
            "pipeline cannot do both: move the split points."
        )
    infos = []
    for spec, other in zip(specs, others, strict=True):
        graphs = {model.training: spec.module, not model.training: other.module}
        infos.append(StageInfo(_layers_of(graphs[True]), parameter_count([graphs[True]])))
        spec.module = Traced(graphs[True], graphs[False])
        spec.module.training = model.training
    tie(specs, dict(model.named_parameters(remove_duplicate=False)))
    _keep_unused(specs, model)
    names = [name for name, _ in model.named_parameters()]
    signature = inspect.signature(model.forward)
    in_spec = program.call_spec.in_spec
    fixed = _fixed(program, signature.bind(*args, **kwargs).arguments)

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = _flat(*_bound(signature, args, kwargs), in_spec)
        for leaf, one in zip(leaves, fixed, strict=True):
            one.check(leaf)
        return leaves, {}

    return Partition(specs, infos, names, bind)


def _check(model: nn.Module, split_spec: Mapping[str, SplitPoint]) -> None:
    names = dict(model.named_modules())
    for name, point in split_spec.items():
        if name not in names:
            raise ValueError(f"the split point {name!r} is no module of the model{close_to(name, names)}")
        if not isinstance(point, SplitPoint):
            raise ValueError(
                f"split_spec has {point!r} for {name!r}: give pipeline.SplitPoint.BEGINNING or pipeline.SplitPoint.END"
            )


@contextlib.contextmanager
def _in_the_other_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into the opposite mode, and restore the mode of each module afterwards."""
    before = [(part, part.training) for part in model.modules()]
    model.train(not model.training)
    try:
        yield
    finally:
        for part, mode in before:
            part.training = mode


def _traced(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], split_spec: Mapping[str, SplitPoint]
) -> tuple[list[StageSpec], Any]:
    with _annotated(model, split_spec), warnings.catch_warnings():
        # torch warns about its own code.
        warnings.simplefilter("ignore")
        program = _export(model, args, kwargs)
        pipe = Pipe._from_traced(model, program)
    refs: dict[fx.Node, Any] = {}
    specs: list[StageSpec] = []
    output: Any = None
    for node in pipe.split_gm.graph.nodes:
        if node.op == "placeholder":
            refs[node] = Ref(INPUT, len(refs))
        elif node.op == "call_module":
            arguments = fx.node.map_arg((tuple(node.args), dict(node.kwargs)), refs.__getitem__)
            # Fx's immutable lists and dicts cannot be pickled.
            plain = tuple(arguments[0]), dict(arguments[1])
            index = len(specs)
            refs[node] = Ref(index)
            specs.append(StageSpec(index, _flat_module(pipe.split_gm.get_submodule(node.target)), plain))
        elif node.op == "call_function" and node.target is operator.getitem:
            refs[node] = Ref(refs[node.args[0]].source, node.args[1])
        elif node.op == "output":
            output = fx.node.map_arg(node.args[0], refs.__getitem__)
    leaves = list(output) if isinstance(output, (tuple, list)) else [output]
    whole = pytree.tree_unflatten(leaves, program.call_spec.out_spec)
    if whole != Ref(len(specs) - 1):
        specs[-1].output = whole
    connect(specs)
    return specs, program


class _FlatTracer(fx.Tracer):
    """Trace through all modules, down to the operators."""

    # Otherwise torch would carry out writes to a buffer once, while it traces, and leave them out of the graph.
    proxy_buffer_attributes = True

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return False


def _flat_module(stage: nn.Module) -> fx.GraphModule:
    """Make the stage one graph of operators. torch nests interpreters, one for each module. They cannot be pickled, and
    are slower."""
    flat = fx.GraphModule(stage, _FlatTracer().trace(stage), "Stage")
    flat.meta = {}
    return flat


@contextlib.contextmanager
def _annotated(model: nn.Module, split_spec: Mapping[str, SplitPoint]) -> Iterator[None]:
    annotate_split_points(model, dict(split_spec))
    try:
        yield
    finally:
        for name in split_spec:
            part = model.get_submodule(name)
            part.__dict__.pop("forward", None)
            part.__dict__.pop("_orig_forward", None)


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def dynamic(value: Any) -> Any:
        # A dimension of 1 or 0 always becomes a constant, and torch warns of it.
        if not isinstance(value, torch.Tensor):
            return None
        return {place: Dim.AUTO if size > 1 else Dim.STATIC for place, size in enumerate(value.shape)}

    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    shapes = {name: pytree.tree_map(dynamic, value) for name, value in bound.items()}
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise PipelineError(
            f"torch.export cannot trace {type(model).__name__}: {error}\nDivide it by hand: give a list of stages, one "
            f"module each."
        ) from error


def _bound(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Bring a call into one form, for arguments by position and by name."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"the call does not fit the model's forward{signature}: {error}") from None
    return bound.args, bound.kwargs


class _Fixed(NamedTuple):
    """A value of an argument, or of a leaf in it, that tracing has made a part of the model."""

    name: str
    value: Any
    """The value, unless it is a tensor."""
    shape: tuple[int | None, ...] | None
    """None stands for a size that may change: always in dimension 0, that of the micro-batch."""

    def check(self, leaf: Any) -> None:
        """Raise ValueError if a call gives another value."""
        if (difference := self._difference(leaf)) is not None:
            part, was, found = difference
            raise ValueError(
                f"{part}{self.name} was {was} when the model was traced, and is {found} in this call: values other "
                f"than tensors, and sizes that the model depends on, are parts of a traced model. Make a pipeline with "
                f"sample= for each of them, or divide the model by hand: a list of stages takes anything."
            )

    def _difference(self, leaf: Any) -> tuple[str, Any, Any] | None:
        if self.shape is None:
            return None if equal(leaf, self.value) else ("", self.value, leaf)
        if not isinstance(leaf, torch.Tensor) or leaf.dim() != len(self.shape):
            found = f"one of {leaf.dim()}" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
            return "", f"a tensor of {len(self.shape)} dimensions", found
        sizes = enumerate(zip(self.shape, leaf.shape, strict=True))
        return next(
            ((f"dimension {place} of ", *pair) for place, pair in sizes if pair[0] not in {None, pair[1]}), None
        )


def _fixed(program: Any, arguments: Mapping[str, Any]) -> list[_Fixed]:
    """Return a `_Fixed` for each leaf of the arguments."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    leaves = [(name, leaf) for name, value in arguments.items() for leaf in pytree.tree_leaves(value)]
    found = []
    for (name, leaf), known in zip(leaves, program.graph_signature.user_inputs, strict=True):
        if isinstance(leaf, torch.Tensor):
            sizes = enumerate(values[known].shape)
            shape = tuple(int(size) if place > 0 and is_concrete_int(size) else None for place, size in sizes)
            found.append(_Fixed(name, None, shape))
        else:
            found.append(_Fixed(name, leaf, None))
    return found


def _keep_unused(specs: list[StageSpec], model: nn.Module) -> None:
    """Give the last stage the parts of the model's state that no graph uses."""
    used = {name for spec in specs for name in spec.module.state_dict(keep_vars=True)}
    used |= {name for spec in specs for _, name in spec.aliases}
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in used and isinstance(value, torch.Tensor):
            specs[-1].module.add(name, value)


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any], in_spec: Any) -> tuple[Any, ...]:
    leaves, found = pytree.tree_flatten((tuple(args), kwargs))
    if found != in_spec:
        raise TypeError(
            f"the model was traced with other arguments: sample= had the structure {in_spec}, and "
            f"this call has {found}. "
            f"Give them in the same order and by the same names."
        )
    return tuple(leaves)


def _layers_of(stage: nn.Module) -> str:
    names = [name for name, _ in stage.named_modules() if name]
    tops = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    return listed(tops) or "(no modules)"


# ------------------------------------------------------------------------------------------------- where to split


def _split_points(
    model: nn.Module, stages: int, args: tuple[Any, ...], kwargs: dict[str, Any], balance: Any
) -> dict[str, SplitPoint]:
    """Choose split points before blocks of the model, in the order in which they run, so that the stages are even."""
    if balance not in (None, "parameters", "params", "profile"):
        raise wrong_value("balance", '"profile" or "parameters" for a traced model', balance)
    blocks = _blocks_in_order(model, args, kwargs)
    if len(blocks) < stages:
        raise ValueError(
            f"{stages} stages need at least {stages} blocks, but the model has {len(blocks)} that run one after the "
            f"other ({', '.join(name for name, _ in blocks)}): give fewer workers, or split_spec= with modules further "
            f"inside."
        )
    costs = [
        seconds if balance == "profile" else float(parameter_count([model.get_submodule(name)]))
        for name, seconds in blocks
    ]
    place = 0
    points = {}
    for count in balanced(costs, stages)[:-1]:
        place += count
        points[blocks[place][0]] = SplitPoint.BEGINNING
    return points


def _blocks_in_order(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, float]]:
    """Return name and seconds of each block that runs exactly once: children, with the children of containers in place
    of the containers."""

    def walk(parent: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in parent.named_children():
            if isinstance(child, _CONTAINERS):
                yield from walk(child, f"{prefix}{name}.")
            else:
                yield prefix + name, child

    found = timed(model, walk(model, ""), args, kwargs)
    names = [name for name, _ in found]
    return [(name, seconds) for name, seconds in found if names.count(name) == 1]
