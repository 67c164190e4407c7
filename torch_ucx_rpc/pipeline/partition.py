"""Which layers make a stage: by hand, by parameters, by measured time, at split points, or by tracing."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C._distributed_rpc import PyRRef
from torch.distributed.nn.api.remote_module import _RemoteModule

from torch_ucx_rpc.pipeline.build import Built
from torch_ucx_rpc.pipeline.errors import PipelineError
from torch_ucx_rpc.pipeline.values import batch_size, split, tensors_of
from torch_ucx_rpc.pipeline.wiring import INPUT, Edge, Ref, StageSpec, Tie, edges_to

__all__ = ["Partition", "StageInfo", "balanced", "divide", "profile"]


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
    """Parameters in the order of the undivided model; None: that of the stages."""
    bind: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    """Of a traced model: the arguments of a call, flat, as the stages count them."""


def divide(
    model: Any,
    stages: int,
    *,
    balance: Sequence[int] | str | None,
    sample: Any,
    split_spec: Mapping[str, Any] | None,
    chunks: int,
) -> Partition:
    """``model`` as ``stages`` stages. Raises ValueError, TypeError or PipelineError with the cure."""
    if isinstance(model, (list, tuple)):
        return _given(model, stages, balance)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"a pipeline is made of an nn.Module or of a list of stages, and not of a {type(model).__name__}"
        )
    args, kwargs = _sample(sample, chunks)
    if split_spec is not None or type(model).forward is not nn.Sequential.forward:
        from torch_ucx_rpc.pipeline import tracing

        if isinstance(balance, (list, tuple)):
            raise ValueError(
                "balance as a list counts the layers of an nn.Sequential; say where another model is divided with "
                'split_spec={"layers.4": SplitPoint.BEGINNING}, or give balance="profile" or "parameters"'
            )
        if sample is None:
            raise ValueError(
                f"{type(model).__name__} is no plain nn.Sequential, so it must be traced to be "
                "divided: give sample=, a "
                f"batch such as step() will get. Or give a list of stages, one module each."
            )
        return tracing.divide(model, stages, args, kwargs, split_spec, balance)
    assert isinstance(model, nn.Sequential)
    return _sequential(model, stages, balance, args, kwargs, sample is not None)


def _sample(sample: Any, chunks: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A micro-batch of the sample, as arguments of the model."""
    if sample is None:
        return (), {}
    args = sample if isinstance(sample, tuple) else (sample,)
    kwargs: dict[str, Any] = {}
    if isinstance(sample, dict):
        args, kwargs = (), sample
    size = batch_size((args, kwargs))
    # A dimension of size 1 would be taken for one that always is when a model is traced.
    if size is not None and size >= 2 * chunks:
        args, kwargs = split((args, kwargs), chunks)[0]
    return args, kwargs


# ------------------------------------------------------------------------------------------------------ nn.Sequential


def _sequential(
    model: nn.Sequential,
    stages: int,
    balance: Sequence[int] | str | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_sample: bool,
) -> Partition:
    # Not named_children(): a layer that stands there twice is two layers.
    layers = [(name, layer) for name, layer in model._modules.items() if layer is not None]
    if len(layers) < stages:
        raise ValueError(
            f"{stages} stages need {stages} layers at least, but the model has {len(layers)}: give fewer workers, or "
            f"divide the layers (a nested nn.Sequential counts as one layer: flatten it)."
        )
    times: list[float] | None = None
    if isinstance(balance, (list, tuple)):
        counts = _counts(balance, stages, len(layers))
    elif balance in (None, "parameters", "params"):
        counts = balanced([_parameter_count([layer]) for _, layer in layers], stages)
    elif balance == "profile":
        if not has_sample:
            raise ValueError('balance="profile" measures the layers on a batch: give one as sample=')
        times = profile([layer for _, layer in layers], args)
        counts = balanced(times, stages)
    else:
        raise ValueError(
            "balance must be a list with the number of layers of each stage, "
            f'"profile" or "parameters", and not {balance!r}'
        )
    specs, infos = [], []
    place = 0
    for index, count in enumerate(counts):
        mine = layers[place : place + count]
        module = nn.Sequential(OrderedDict(mine))
        module.training = model.training
        specs.append(_chained(index, stages, module))
        infos.append(
            StageInfo(
                _named([name for name, _ in mine], [layer for _, layer in mine]),
                _parameter_count([layer for _, layer in mine]),
                None if times is None else 1e3 * sum(times[place : place + count]),
            )
        )
        place += count
    tie(specs, dict(model.named_parameters(remove_duplicate=False)))
    return Partition(specs, infos, [name for name, _ in model.named_parameters()])


def _named(names: Sequence[str], layers: Sequence[nn.Module]) -> str:
    kinds: list[str] = []
    for layer in layers:
        kind = type(layer).__name__
        if kinds and kinds[-1].split(" x")[0] == kind:
            count = int(kinds[-1].partition(" x")[2] or 1) + 1
            kinds[-1] = f"{kind} x{count}"
        else:
            kinds.append(kind)
    where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"{where}: {', '.join(kinds if len(kinds) < 5 else [*kinds[:2], '...', kinds[-1]])}"


def _chained(index: int, stages: int, module: Any, prefix: str = "") -> StageSpec:
    return StageSpec(
        index=index,
        module=module,
        arguments=None if index == 0 else ((Ref(index - 1),), {}),
        edges_in=(Edge(INPUT if index == 0 else index - 1, index),),
        edges_out=(Edge(index, index + 1),) if index + 1 < stages else (),
        prefix=prefix,
    )


def _counts(balance: Sequence[int], stages: int, layers: int) -> list[int]:
    if len(balance) != stages:
        raise ValueError(
            f"balance={list(balance)} is for {len(balance)} stages, but there are {stages}: give a number for each."
        )
    if any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in balance):
        raise ValueError(f"balance={list(balance)}: each stage needs one layer at least, as a whole number.")
    if sum(balance) != layers:
        left = layers - sum(balance)
        place = sum(balance)
        raise ValueError(
            f"balance={list(balance)} is for {sum(balance)} layers, but the model has {layers}: "
            + (
                f"layer {place} and those behind it fit no stage; add {left}."
                if left > 0
                else f"take {-left} away somewhere."
            )
        )
    return list(balance)


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """How many neighbours of ``costs`` go into each stage so that the dearest stage is as cheap as can be.

    Exactly, by dynamic programming; among equals the sum of squares decides, so that the others are even too.
    """
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
    for stage in range(1, stages + 1):
        row: dict[int, tuple[float, float, int]] = {}
        for end in range(stage, count - (stages - stage) + 1):
            row[end] = min(
                (max(top, sums[end] - sums[begin]), squares + (sums[end] - sums[begin]) ** 2, begin)
                for begin, (top, squares, _) in best[-1].items()
                if begin < end
            )
        best.append(row)
    counts: list[int] = []
    end = count
    for row in reversed(best[1:]):
        begin = row[end][2]
        counts.append(end - begin)
        end = begin
    return counts[::-1]


def profile(layers: Sequence[nn.Module], args: tuple[Any, ...], repeats: int = 3) -> list[float]:
    """Seconds of a forward and backward of each layer in turn, the median of ``repeats``; the layers stay as they
    are."""
    times = []
    values: Any = args
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for place, layer in enumerate(layers):
            try:
                # Statistics and gradients are those of the copy.
                seconds, values = _measure(copy.deepcopy(layer), values, repeats)
            except Exception as error:
                raise PipelineError(
                    f"layer {place} ({type(layer).__name__}) raised when it was profiled on the "
                    f"sample: {error}. Give as "
                    f"sample= a batch such as step() will get."
                ) from error
            times.append(seconds)
    return times


def _measure(layer: nn.Module, args: tuple[Any, ...], repeats: int) -> tuple[float, tuple[Any, ...]]:
    durations = []
    output: Any = None
    for _ in range(repeats + 1):
        inputs = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda one: one.detach().requires_grad_(one.is_floating_point()), args
        )
        begin = time.perf_counter()
        output = layer(*inputs)
        wanting = [one for one in tensors_of(output) if one.requires_grad]
        if wanting:
            torch.autograd.backward(wanting, [torch.ones_like(one) for one in wanting])
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations[1:]), (output,)


def _parameter_count(modules: Iterable[nn.Module]) -> int:
    return sum(one.numel() for one in {id(one): one for part in modules for one in part.parameters()}.values())


# --------------------------------------------------------------------------------------------------- a list of stages


def _given(stages_given: Sequence[Any], stages: int, balance: Any) -> Partition:
    if len(stages_given) != stages:
        raise ValueError(
            f"the list has {len(stages_given)} stages, but the workers run {stages}: give a stage for each worker, or "
            f"stages_per_worker=."
        )
    if balance is not None:
        raise ValueError("a list of stages is divided already: leave balance= away.")
    specs, infos = [], []
    named: dict[str, nn.Parameter] = {}
    for index, one in enumerate(stages_given):
        if isinstance(one, _RemoteModule):
            one = one.get_module_rref()
        if not isinstance(one, (nn.Module, Built, PyRRef)):
            raise TypeError(
                f"stage {index} is a {type(one).__name__}: a stage is an nn.Module, "
                "pipeline.Built(...), or an RRef to a "
                f"module on its worker."
            )
        specs.append(_chained(index, stages, one, f"{index}."))
        if isinstance(one, nn.Module):
            infos.append(StageInfo(type(one).__name__, _parameter_count([one])))
            named.update({f"{index}.{name}": value for name, value in one.named_parameters(remove_duplicate=False)})
        else:
            infos.append(StageInfo(repr(one) if isinstance(one, Built) else "RRef", None))
    tie(specs, named)
    return Partition(specs, infos, None)


# ------------------------------------------------------------------------------------------------------ tied weights


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


def connect(specs: Sequence[StageSpec]) -> None:
    """Fill in which stage sends what to which, from the references in their arguments and in the output."""
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
