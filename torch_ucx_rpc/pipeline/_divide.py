"""Division of layers into stages: by hand, by parameters, by measured time, at split points, or by tracing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch._C._distributed_rpc import PyRRef
from torch.distributed.nn.api.remote_module import _RemoteModule

from torch_ucx_rpc._arguments import wrong_type, wrong_value
from torch_ucx_rpc.pipeline._balance import balanced, timed
from torch_ucx_rpc.pipeline._build import Built
from torch_ucx_rpc.pipeline._partition import (
    INPUT,
    Edge,
    Partition,
    Ref,
    StageInfo,
    StageSpec,
    listed,
    parameter_count,
    tie,
)
from torch_ucx_rpc.pipeline._values import batch_size, map_tensors, split

__all__ = ["divide"]


def divide(
    model: Any,
    stages: int,
    *,
    balance: Sequence[int] | str | None,
    sample: Any,
    split_spec: Mapping[str, Any] | None,
    chunks: int,
) -> Partition:
    """Divide ``model`` into ``stages`` stages. Raises ValueError, TypeError or PipelineError with the cure."""
    if isinstance(model, (list, tuple)):
        return _given(model, stages, balance)
    args, kwargs = _sample(sample, chunks)
    if split_spec is not None or type(model).forward is not nn.Sequential.forward:
        # The tracer imports torch.export, which most models do not need.
        from torch_ucx_rpc.pipeline import _tracing

        if isinstance(balance, (list, tuple)):
            raise ValueError(
                "balance as a list counts the layers of an nn.Sequential; divide another model with "
                'split_spec={"layers.4": SplitPoint.BEGINNING}, or give balance="profile" or "parameters"'
            )
        if sample is None:
            raise ValueError(
                f"{type(model).__name__} is no plain nn.Sequential, so it must be traced to be divided: give sample=, "
                f"a batch such as step() will get. Or give a list of stages, one module each."
            )
        return _tracing.divide(model, stages, args, kwargs, split_spec, balance)
    assert isinstance(model, nn.Sequential)
    return _sequential(model, stages, balance, args, kwargs, sample is not None)


def _sample(sample: Any, chunks: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a micro-batch of the sample, as arguments of the model."""
    if sample is None:
        return (), {}
    args = sample if isinstance(sample, tuple) else (sample,)
    kwargs: dict[str, Any] = {}
    if isinstance(sample, dict):
        args, kwargs = (), sample
    size = batch_size((args, kwargs))
    # Leave at least two samples: tracing would treat a dimension of size 1 as a constant.
    if size is not None and size >= 2 * chunks:
        args, kwargs = split((args, kwargs), chunks)[0]
    elif size == 1:
        args, kwargs = map_tensors(lambda one: torch.cat([one, one]) if one.dim() > 0 else one, (args, kwargs))
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
    if any((model._forward_pre_hooks, model._forward_hooks, model._backward_pre_hooks, model._backward_hooks)):
        raise ValueError("the model has hooks, and no stage is the whole model: register them on its layers")
    # named_children() would list a layer that occurs twice only once.
    layers = [(name, layer) for name, layer in model._modules.items() if layer is not None]
    if len(layers) < stages:
        raise ValueError(
            f"{stages} stages need at least {stages} layers, but the model has {len(layers)}: give fewer workers, or "
            f"divide the layers (a nested nn.Sequential counts as one layer: flatten it)."
        )
    times: list[float] | None = None
    if isinstance(balance, (list, tuple)):
        counts = _counts(balance, stages, len(layers))
    elif balance in (None, "parameters", "params"):
        counts = balanced([parameter_count([layer]) for _, layer in layers], stages)
    elif balance == "profile":
        if not has_sample:
            raise ValueError('balance="profile" measures the layers on a batch: give one as sample=')
        # A layer that occurs twice also runs twice: hook it once.
        once = {id(layer): (name, layer) for name, layer in layers}.values()
        times = [seconds for _, seconds in timed(model, once, args, kwargs)]
        counts = balanced(times, stages)
    else:
        expected = 'a list with the number of layers of each stage, "profile" or "parameters"'
        raise wrong_value("balance", expected, balance)
    modules, infos = [], []
    place = 0
    for count in counts:
        mine = layers[place : place + count]
        module = nn.Sequential(OrderedDict(mine))
        module.training = model.training
        modules.append(module)
        time = None if times is None else 1e3 * sum(times[place : place + count])
        infos.append(StageInfo(_named(mine), parameter_count([module]), time))
        place += count
    return _chain(modules, infos, [""] * stages)


def _named(layers: Sequence[tuple[str, nn.Module]]) -> str:
    groups = [(kind, len(list(some))) for kind, some in groupby(type(layer).__name__ for _, layer in layers)]
    names = [layers[0][0], layers[-1][0]][: len(layers)]
    return f"{' to '.join(names)}: {listed([kind if count == 1 else f'{kind} x{count}' for kind, count in groups])}"


def _counts(balance: Sequence[int], stages: int, layers: int) -> list[int]:
    if len(balance) != stages:
        raise ValueError(
            f"balance={list(balance)} is for {len(balance)} stages, but there are {stages}: give a number for each."
        )
    if any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in balance):
        raise ValueError(f"balance={list(balance)}: each stage needs at least one layer, as a whole number.")
    if sum(balance) != layers:
        raise ValueError(
            f"balance={list(balance)} is for {sum(balance)} layers, but the model has {layers}: the sum must be "
            f"{layers}."
        )
    return list(balance)


# --------------------------------------------------------------------------------------------------- a list of stages


def _given(given: Sequence[Any], stages: int, balance: Any) -> Partition:
    if len(given) != stages:
        raise ValueError(
            f"the list has {len(given)} stages, but the workers run {stages}: give a stage for each worker, or "
            f"stages_per_worker=."
        )
    if balance is not None:
        raise ValueError("a list of stages is divided already: leave out balance=.")
    modules = [one.get_module_rref() if isinstance(one, _RemoteModule) else one for one in given]
    infos = []
    for index, one in enumerate(modules):
        if not isinstance(one, (nn.Module, Built, PyRRef)):
            expected = "an nn.Module, pipeline.Built(...), or an RRef to a module on its worker"
            raise wrong_type(f"stage {index}", expected, one)
        if isinstance(one, nn.Module):
            infos.append(StageInfo(type(one).__name__, parameter_count([one])))
        else:
            infos.append(StageInfo(repr(one) if isinstance(one, Built) else "RRef", None))
    return _chain(modules, infos, [f"{index}." for index in range(stages)])


def _chain(modules: Sequence[Any], infos: list[StageInfo], prefixes: Sequence[str]) -> Partition:
    """Return stages that each take the whole output of the one before."""
    specs = [
        StageSpec(
            index=index,
            module=module,
            arguments=None if index == 0 else ((Ref(index - 1),), {}),
            edges_in=(Edge(INPUT if index == 0 else index - 1, index),),
            edges_out=(Edge(index, index + 1),) if index + 1 < len(modules) else (),
            prefix=prefix,
        )
        for index, (module, prefix) in enumerate(zip(modules, prefixes, strict=True))
    ]
    named = {}
    for spec in specs:
        if isinstance(spec.module, nn.Module):
            own = spec.module.named_parameters(remove_duplicate=False)
            named.update({spec.prefix + name: parameter for name, parameter in own})
    tie(specs, named)
    return Partition(specs, infos)
