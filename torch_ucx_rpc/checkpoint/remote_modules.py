"""Methods of nn.Module that torch's RemoteModule refuses; users have asked for them since 2020 (pytorch #50346).

Each method is one call to the module's owner. ``state_dict`` brings the values here. If a module does not fit here,
give the RemoteModule itself to `save`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch.distributed.nn.api.remote_module import _RemoteModule

__all__ = ["METHODS", "install"]


def _call(rref: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    getattr(rref.local_value(), name)(*args, **kwargs)


def _state(rref: Any) -> dict[str, Any]:
    state = rref.local_value().state_dict()
    return {name: value.detach().cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _load(rref: Any, state: dict[str, Any], strict: bool, assign: bool) -> tuple[list[str], list[str]]:
    missing, unexpected = rref.local_value().load_state_dict(state, strict=strict, assign=assign)
    return list(missing), list(unexpected)


def state_dict(self: Any, *, prefix: str = "", **_: Any) -> dict[str, Any]:
    """Return copies of the remote module's state, on the CPU."""
    found = rpc.rpc_sync(self.on, _state, (self.module_rref,))
    return {prefix + name: value for name, value in found.items()}


def load_state_dict(self: Any, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """Do ``nn.Module.load_state_dict`` on the remote module."""
    from torch.nn.modules.module import _IncompatibleKeys

    return _IncompatibleKeys(*rpc.rpc_sync(self.on, _load, (self.module_rref, dict(state_dict), strict, assign)))


def train(self: Any, mode: bool = True) -> Any:
    """Do ``nn.Module.train`` on the remote module."""
    rpc.rpc_sync(self.on, _call, (self.module_rref, "train", (mode,), {}))
    # A plain attribute of the module, which torch does not send along with a RemoteModule.
    self.training = mode
    return self


def eval(self: Any) -> Any:
    """Do ``nn.Module.eval`` on the remote module."""
    return self.train(False)


def requires_grad_(self: Any, requires_grad: bool = True) -> Any:
    """Do ``nn.Module.requires_grad_`` on the remote module."""
    rpc.rpc_sync(self.on, _call, (self.module_rref, "requires_grad_", (requires_grad,), {}))
    return self


def zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Do ``nn.Module.zero_grad`` on the remote module. Gradients of distributed autograd live in their contexts
    instead."""
    rpc.rpc_sync(self.on, _call, (self.module_rref, "zero_grad", (), {"set_to_none": set_to_none}))


METHODS = (state_dict, load_state_dict, train, eval, requires_grad_, zero_grad)


def install() -> None:
    """Give these methods to torch's class; repeating it does no harm."""
    for method in METHODS:
        setattr(_RemoteModule, method.__name__, method)
