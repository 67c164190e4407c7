"""How a stage's module comes to its worker: shipped, built there from a name, or there already behind an RRef."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._C._distributed_rpc import PyRRef
from torch.distributed.rpc.internal import _internal_rpc_pickler

from torch_ucx_rpc._arguments import check_callable, wrong_value
from torch_ucx_rpc.pipeline._errors import PipelineError
from torch_ucx_rpc.pipeline._wiring import StageSpec

__all__ = ["Built", "evaluation_module", "on_worker", "share_evaluation_state", "skeleton", "travels"]


class Built:
    """A stage that its worker builds: the driver needs neither its code nor its parameters.

    Args:
        what: a class or function that returns an nn.Module, or its name, ``"package.module:name"``.
            Only the worker looks up a name.
        *args: its positional arguments.
        **kwargs: its keyword arguments.

    Example::

        >>> stages = [nn.Linear(8, 8), Built("their_code.models:Tail", width=8)]
    """

    def __init__(self, what: str | Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        expected = "a callable, or its name as 'package.module:name'"
        if not isinstance(what, str):
            check_callable("what", expected, what)
        elif ":" not in what:
            raise wrong_value("what", expected, what)
        self.what = what
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        name = self.what if isinstance(self.what, str) else getattr(self.what, "__name__", repr(self.what))
        return f"Built({name})"

    def build(self) -> nn.Module:
        """Make the module on this worker. Raises TypeError if it is not an nn.Module."""
        make = self.what
        if isinstance(make, str):
            module, _, name = make.partition(":")
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            make = found
        return _a_module(make(*self.args, **self.kwargs), repr(self))


def travels(value: Any) -> bool:
    """Whether RPC can pickle this."""
    try:
        _internal_rpc_pickler.serialize(value)  # type: ignore[no-untyped-call]
    except Exception:
        return False
    return True


def _a_module(made: Any, what: str) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise TypeError(f"{what} must give an nn.Module, and gave a {type(made).__name__}")
    return made


def on_worker(spec: StageSpec, device: torch.device) -> nn.Module:
    """Make the module of a stage on this worker."""
    made = spec.module
    if isinstance(made, Built):
        made = made.build()
    elif isinstance(made, PyRRef):
        made = _a_module(made.local_value(), "the RRef of a stage")
    elif isinstance(made, Skeleton):
        made = made.build(device)
    _add(made, spec.unused)
    placed: nn.Module = made.to(device)
    _separate(placed, [tie.name for tie in spec.ties if tie.owner != spec.index])
    return placed


def _add(module: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Give a module tensors by their full names. (Pickling a traced module drops the tensors that it does not compute
    with.)"""
    for full, tensor in tensors.items():
        *path, name = full.split(".")
        holder = module
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            holder.register_parameter(name, tensor)
        else:
            holder.register_buffer(name, tensor)


def _separate(module: nn.Module, names: Iterable[str]) -> None:
    """Give tied parameters copies of their own: pickled together, stages of one worker would share them."""
    named = dict(module.named_parameters(remove_duplicate=False))
    copies = {id(named[name]): nn.Parameter(named[name].detach().clone(), named[name].requires_grad) for name in names}
    for part in module.modules():
        for name, one in part._parameters.items():
            if one is not None and id(one) in copies:
                part._parameters[name] = copies[id(one)]


def evaluation_module(spec: StageSpec, device: torch.device) -> nn.Module | None:
    if spec.evaluation_module is None:
        return None
    made = spec.evaluation_module
    placed: nn.Module = made.build(device) if isinstance(made, Skeleton) else made.to(device)
    return placed


def share_evaluation_state(stages: Iterable[Any]) -> None:
    """Let the module that evaluates use the very parameters and buffers of the one that trains."""
    for stage in stages:
        if stage.evaluation_module is None:
            continue
        tensors = {**dict(stage.module.named_parameters(remove_duplicate=False)), **dict(stage.module.named_buffers())}
        for path, part in stage.evaluation_module.named_modules(remove_duplicate=False):
            for kind in (part._parameters, part._buffers):
                for name in list(kind):
                    if (full := f"{path}.{name}" if path else name) in tensors:
                        kind[name] = tensors[full]


class Skeleton:
    """A module without the values that a checkpoint has: parameters and persistent buffers are on the meta device.

    It is pickled, since RPC would try to send a tensor on the meta device.
    """

    def __init__(self, module: nn.Module) -> None:
        memo: dict[int, Any] = {}
        for part in module.modules():
            for one in part._parameters.values():
                if one is not None:
                    memo[id(one)] = nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad)
            for name, buffer in part._buffers.items():
                if buffer is not None and name not in part._non_persistent_buffers_set:
                    memo[id(buffer)] = torch.empty_like(buffer, device="meta")
        self._pickled = pickle.dumps(copy.deepcopy(module, memo))

    def build(self, device: torch.device) -> nn.Module:
        return materialized(pickle.loads(self._pickled), device)


def skeleton(module: Any) -> Any:
    """Return a recipe that remakes a stage, which a checkpoint then fills."""
    if not isinstance(module, nn.Module):
        return module
    try:
        return Skeleton(module)
    except RuntimeError:
        # It holds a tensor with a graph, as torch.nn.utils.weight_norm makes: pickle takes it, deepcopy does not.
        return module


def materialized(module: nn.Module, device: torch.device) -> nn.Module:
    """Allocate memory for the tensors on the meta device only. Parts that share a tensor go on sharing it."""
    made: dict[int, Any] = {}
    for part in module.modules():
        for kind in (part._parameters, part._buffers):
            for name, one in kind.items():
                if one is not None and one.is_meta:
                    if id(one) not in made:
                        empty = torch.empty_like(one, device=device)
                        made[id(one)] = nn.Parameter(empty, one.requires_grad) if kind is part._parameters else empty
                    kind[name] = made[id(one)]
    return module


def cannot_be_rebuilt(spec: StageSpec) -> PipelineError | None:
    """Say why a stage cannot move to another worker, if so."""
    if isinstance(spec.module, PyRRef):
        return PipelineError(
            f"stage {spec.index} was given as an RRef, which died with its owner: give it as Built(...), or as a "
            f"module, so that another worker can build it"
        )
    return None
