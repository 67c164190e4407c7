"""Methods of nn.Module that torch's RemoteModule refuses, as functions (pytorch #50346).

    >>> from torch_ucx_rpc.checkpoint import remote_modules
    >>> remote_modules.train(module, False)
    >>> values = remote_modules.state_dict(module)

``module`` is a ``torch.distributed.nn.RemoteModule``. Each function is one call to its owner, and raises the errors of
``rpc_sync``, as after ``rpc_timeout``. `state_dict` brings the values into this process. If a module does not fit into
its memory, give the RemoteModule itself to `save`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.rpc as rpc

__all__ = ["eval", "load_state_dict", "requires_grad_", "state_dict", "train", "zero_grad"]


def _call(rref: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    getattr(rref.local_value(), name)(*args, **kwargs)


def _state(rref: Any) -> dict[str, Any]:
    state = rref.local_value().state_dict()
    return {name: value.detach().cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _load(rref: Any, state: dict[str, Any], strict: bool, assign: bool) -> tuple[list[str], list[str]]:
    missing, unexpected = rref.local_value().load_state_dict(state, strict=strict, assign=assign)
    return list(missing), list(unexpected)


def state_dict(module: Any, *, prefix: str = "", **_: Any) -> dict[str, Any]:
    """Return copies of the remote module's state, on the CPU, as a dict. ``prefix`` comes before each name (default:
    ""). Other arguments are ignored."""
    found = rpc.rpc_sync(module.on, _state, (module.module_rref,))
    return {prefix + name: value for name, value in found.items()}


def load_state_dict(module: Any, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """Do ``nn.Module.load_state_dict`` on the remote module, and return its result: the missing and the unexpected
    names. Raises RuntimeError for other shapes, and with ``strict`` (the default) for other names."""
    from torch.nn.modules.module import _IncompatibleKeys

    return _IncompatibleKeys(*rpc.rpc_sync(module.on, _load, (module.module_rref, dict(state_dict), strict, assign)))


def train(module: Any, mode: bool = True) -> Any:
    """Do ``nn.Module.train`` on the remote module, and return ``module``."""
    rpc.rpc_sync(module.on, _call, (module.module_rref, "train", (mode,), {}))
    # A plain attribute of the module, which torch does not send along with a RemoteModule.
    module.training = mode
    return module


def eval(module: Any) -> Any:
    """Do ``nn.Module.eval`` on the remote module, and return ``module``."""
    return train(module, False)


def requires_grad_(module: Any, requires_grad: bool = True) -> Any:
    """Do ``nn.Module.requires_grad_`` on the remote module, and return ``module``."""
    rpc.rpc_sync(module.on, _call, (module.module_rref, "requires_grad_", (requires_grad,), {}))
    return module


def zero_grad(module: Any, set_to_none: bool = True) -> None:
    """Do ``nn.Module.zero_grad`` on the remote module. Distributed autograd keeps its gradients in its contexts
    instead."""
    rpc.rpc_sync(module.on, _call, (module.module_rref, "zero_grad", (), {"set_to_none": set_to_none}))
