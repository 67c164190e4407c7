"""How a worker gets the module of its stage. The driver ships it, the worker builds it from a name, or the worker has
it already, behind an RRef."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import pickle
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._C._distributed_rpc import PyRRef
from torch.fx.graph_module import _format_import_block, _forward_from_src
from torch.package.importer import sys_importer

from torch_ucx_rpc._arguments import check_callable, wrong_value
from torch_ucx_rpc.pipeline._partition import StageSpec

__all__ = ["Built", "Skeleton", "Traced", "on_worker", "restored"]


class Built:
    """A stage that its worker builds: the driver does not need its parameters, nor with a name its code.

    Args:
        what (callable or str): a class or function that returns an nn.Module, or its name, ``"package.module:name"``.
            Only the worker looks up a name.
        *args: its positional arguments.
        **kwargs: its keyword arguments.

    Raises TypeError for anything else, and ValueError for a name without a colon. If the result is not an nn.Module,
    `DistributedPipeline` raises PipelineError.

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
        make = pkgutil.resolve_name(self.what) if isinstance(self.what, str) else self.what
        return _a_module(make(*self.args, **self.kwargs), repr(self))


def _a_module(made: Any, what: str) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise TypeError(f"{what} must give an nn.Module, and gave a {type(made).__name__}")
    return made


def on_worker(spec: StageSpec, device: torch.device) -> nn.Module:
    """Make the module of a stage on this worker."""
    made = spec.module
    if isinstance(made, (Built, Skeleton)):
        made = made.build()
    elif isinstance(made, PyRRef):
        made = _a_module(made.local_value(), "the RRef of a stage")
    placed: nn.Module = made.to(device)
    _separate(placed, [tie.name for tie in spec.ties if tie.owner != spec.index])
    return placed


def _separate(module: nn.Module, names: Iterable[str]) -> None:
    """Give tied parameters copies of their own. Stages of one worker are pickled together, and would share them."""
    named = dict(module.named_parameters(remove_duplicate=False))
    copies = {id(named[name]): nn.Parameter(named[name].detach().clone(), named[name].requires_grad) for name in names}
    for part in module.modules():
        for name, one in part._parameters.items():
            if one is not None and id(one) in copies:
                part._parameters[name] = copies[id(one)]


@contextlib.contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Keep all buffers as they are: a second forward must not count, in batch norms or elsewhere."""
    before = [(part._buffers, dict(part._buffers)) for part in module.modules() if part._buffers]
    values = [(one, one.detach().clone()) for _, named in before for one in named.values() if one is not None]
    try:
        yield
    finally:
        for buffers, named in before:
            # A forward may replace a buffer by another tensor.
            buffers.update(named)
        for buffer, old in values:
            # A write to .data is hidden from autograd, which may have kept the buffer.
            buffer.data.copy_(old)


class Traced(nn.Module):
    """A stage of a traced model: its tensors by their names in the model, and its code for training and evaluation.

    Like a GraphModule, it pickles graphs as code. A traced graph cannot switch by ``eval()`` itself.
    """

    def __init__(self, trains: fx.GraphModule, evaluates: fx.GraphModule) -> None:
        super().__init__()
        # Whether an operator writes into its input. Layers such as nn.ReLU have the same attribute.
        self.inplace = any(_writes(node) for graph in (trains.graph, evaluates.graph) for node in graph.nodes)
        self._code = {True: _source(trains), False: _source(evaluates)}
        for module in (evaluates, trains):
            for node in module.graph.nodes:
                if node.op == "get_attr":
                    self.add(node.target, operator.attrgetter(node.target)(module))

    def add(self, full: str, value: Any) -> None:
        """Hold a parameter, a buffer, or another value that the code reads, by its full name."""
        *path, name = full.split(".")
        holder: nn.Module = self
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            holder.register_buffer(name, value)
        else:
            setattr(holder, name, value)

    def forward(self, *args: Any) -> Any:
        return _function(self._code[self.training])(self, *args)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _source(module: fx.GraphModule) -> str:
    code = module.graph.python_code("self")
    return f"{_format_import_block(code.globals, sys_importer)}\n{code.src}"


@functools.cache
def _function(source: str) -> Callable[..., Any]:
    return _forward_from_src(source, {})


class Skeleton:
    """A module without the values that a checkpoint has: those of parameters and persistent buffers."""

    def __init__(self, module: nn.Module) -> None:
        file = io.BytesIO()
        _WithoutValues(file, module).dump(module)
        self._pickled = file.getvalue()

    def build(self) -> nn.Module:
        module: nn.Module = pickle.loads(self._pickled)
        return module


class _WithoutValues(pickle.Pickler):
    def __init__(self, file: io.BytesIO, module: nn.Module) -> None:
        super().__init__(file)
        self._without = {id(one) for one in module.state_dict(keep_vars=True).values()}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) in self._without:
            is_parameter = isinstance(value, nn.Parameter)
            return _empty, (is_parameter, value.shape, value.stride(), value.dtype, value.requires_grad)
        return NotImplemented


def _empty(is_parameter: bool, size: Any, stride: Any, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    made = torch.empty_strided(size, stride, dtype=dtype)
    return nn.Parameter(made, requires_grad) if is_parameter else made
