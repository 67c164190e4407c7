"""Tensors of classes derived from `torch.Tensor`.

torch's RPC pickler collects tensors of the class itself. Python pickles all others: `torch.Tensor.__reduce_ex__` copies
their storage. If a tensor reaches beyond its storage, the copy has only the storage's bytes, and the rest is undefined
on the other worker. So this module refuses such tensors. The agent's encoder refuses such tensors of the class itself.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from torch_ucx_rpc import _agent
from torch_ucx_rpc._native import _C


def reducer(type_: type) -> Callable[[Any], Any] | None:
    """The reducer for objects of ``type_``, if Python pickles their memory."""
    # A Parameter hands its data to the pickler, as a tensor.
    if torch.Tensor not in type_.__mro__ or type_ is torch.nn.Parameter:
        return None
    return _refuse_fake if type_.__name__ == "FakeTensor" and type_.__module__ == _FAKE else _reduce


_FAKE = "torch._subclasses.fake_tensor"


def _reduce(tensor: torch.Tensor) -> Any:
    if _agent.current is not None and tensor.layout is torch.strided:
        why = _C.why_beyond_storage(tensor)
        if why is not None:
            raise RuntimeError(_text(tensor, why))
    return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def _refuse_fake(tensor: torch.Tensor) -> Any:
    if _agent.current is None:
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    raise RuntimeError(_text(tensor, "has no memory of its own (it is a fake tensor); send a tensor that has values"))


def _text(tensor: torch.Tensor, why: str) -> str:
    return f"the UCX RPC backend cannot pickle a {type(tensor).__name__} in this call or answer: it {why}."
