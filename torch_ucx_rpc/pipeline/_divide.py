"""Division of layers into stages: by hand, by parameters, by measured time, at split points, or by tracing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch._C._distributed_rpc import PyRRef
from torch.distributed.nn.api.remote_module import _RemoteModule

from torch_ucx_rpc.pipeline._balance import balanced, timed
from torch_ucx_rpc.pipeline._build import Built
from torch_ucx_rpc.pipeline._partition import INPUT, Edge, Partition, Ref, StageInfo, StageSpec, parameter_count, tie
from torch_ucx_rpc.pipeline._values import batch_size, split

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
                "balance as a list counts the layers of an nn.Sequential; say where another model is divided with "
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
    # Tracing would take a dimension of size 1 for a constant.
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
    # named_children() would list a layer that occurs twice only once.
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
        counts = balanced([parameter_count([layer]) for _, layer in layers], stages)
    elif balance == "profile":
        if not has_sample:
            raise ValueError('balance="profile" measures the layers on a batch: give one as sample=')
        # A layer that occurs twice also runs twice: hook it once.
        once = {id(layer): (name, layer) for name, layer in layers}.values()
        times = [seconds for _, seconds in timed(model, once, args, kwargs)]
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
                parameter_count([layer for _, layer in mine]),
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
                f"stage {index} is a {type(one).__name__}: a stage is an nn.Module, pipeline.Built(...), or an RRef to "
                f"a module on its worker."
            )
        specs.append(_chained(index, stages, one, f"{index}."))
        if isinstance(one, nn.Module):
            infos.append(StageInfo(type(one).__name__, parameter_count([one])))
            named.update({f"{index}.{name}": value for name, value in one.named_parameters(remove_duplicate=False)})
        else:
            infos.append(StageInfo(repr(one) if isinstance(one, Built) else "RRef", None))
    tie(specs, named)
    return Partition(specs, infos, None)
