"""`native_op`: operators of torch that are written in Python and run without the GIL."""

# mypy: allow-untyped-calls

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torch_ucx_rpc._arguments import check_callable, check_str, got
from torch_ucx_rpc._native import _C

if TYPE_CHECKING:
    from torch_ucx_rpc._native_op.numba_code import NumbaCode

_KINDS = ("Tensor", "Int", "Float", "Bool")


def native_op(schema: str) -> Callable[[Callable[..., Any]], torch._ops.OpOverloadPacket]:
    """Decorator that makes a Python function an operator of torch, compiled by numba and called without the GIL.

    ::

        @torch_ucx_rpc.native_op("ps::accumulate(Tensor(a!) self, Tensor other) -> ()")
        def accumulate(self, other):
            if self.shape != other.shape:
                raise ValueError("shapes differ")  # numba checks no indices
            for i in range(self.shape[0]):
                self[i] += other[i]

        torch.ops.ps.accumulate(torch.zeros(3), torch.ones(3))   # or accumulate(...)

    On another worker the operator runs within a TorchScript function, which RPC also runs without the GIL::

        @torch.jit.script
        def update(parameter: RRef[Tensor], gradient: Tensor) -> None:
            torch.ops.ps.accumulate(parameter.local_value(), gradient)

        rpc.rpc_async("ps", update, args=(parameter, gradient))

    The function gets each tensor as an array on the tensor's memory. All tensors must be on the CPU. numba compiles the
    function at the first call with given dtypes, numbers of dimensions and layouts (contiguous or not). Compiling takes
    the GIL, and about a second. Arrays of arguments that the schema does not mark as written (``Tensor(a!)``) are
    read-only. A function that writes to such an array does not compile. Calls that write to the same storage take
    turns.

    Args:
        schema (str): the operator's schema in torch's language, with a namespace. Arguments are ``Tensor``, ``int``,
            ``float`` and ``bool``, with any defaults, and at least one of them is a tensor. The result is ``()``,
            ``int``, ``float``, ``bool``, ``Tensor`` for an array that the function makes, or ``Tensor(a!)`` for the
            argument with that mark. With ``Tensor(a!)`` the function itself returns nothing.

    Returns the operator of ``torch.ops``. TorchScript accepts it as ``torch.ops.ps.accumulate`` and as ``accumulate``.

    The decorated function may already come from ``numba.njit``, with options of its own, but not with ``parallel`` or
    ``forceobj``. With ``parallel``, numba's default threads abort a process if two calls run at once.

    Raises ValueError for any other schema or options, a function with other parameters, or an operator that exists.
    Raises ImportError without numba. A call raises TypeError for tensors that the function does not compile for. A call
    raises RuntimeError if the function raises (``raise ValueError("shapes differ")``). It raises RuntimeError also for
    tensors that require grad outside ``torch.no_grad()``, and for written tensors that partly overlap with others. From
    another worker all of these errors arrive as RuntimeError.
    """
    check_str("schema", schema)
    try:
        parsed = torch._C.parse_schema(schema)
    except RuntimeError as error:
        raise ValueError(f"schema must be that of an operator; {got(schema)}: {error}") from None
    _check(schema, parsed)

    def define(function: Callable[..., Any]) -> torch._ops.OpOverloadPacket:
        check_callable("function", "a function that numba compiles", function)
        code = _load_compiler()(parsed, function)
        expected = [argument.name for argument in parsed.arguments]
        found = list(inspect.signature(code.python_function).parameters)
        if found != expected:
            raise ValueError(f"{parsed.name} has the arguments {expected}, and its function the parameters {found}")
        namespace, name = parsed.name.split("::")
        if torch._C._jit_get_schemas_for_operator(parsed.name):
            raise ValueError(f"{parsed.name} is an operator already: a process can define it only once")
        _C.define_native_op(schema, code.compile, code.explain, code.release_address)
        packet: torch._ops.OpOverloadPacket = getattr(getattr(torch.ops, namespace), name)
        return packet

    return define


def _load_compiler() -> type[NumbaCode]:
    try:
        importlib.import_module("numba")
    except ImportError as error:
        raise ImportError(
            f"native_op compiles with numba, which cannot be imported ({error}): pip install numba"
        ) from None
    from torch_ucx_rpc._native_op.numba_code import NumbaCode

    return NumbaCode


def _check(text: str, schema: Any) -> None:
    def refuse(why: str) -> ValueError:
        return ValueError(f"native_op cannot make {text!r}: {why}")

    if "::" not in schema.name:
        raise refuse("its name has no namespace, as in ns::name")
    for argument in schema.arguments:
        if _kind(argument) not in _KINDS:
            raise refuse(
                f"its argument {argument.name} is of type {_kind(argument)}; a native operator takes "
                f"Tensor, int, float and bool"
            )
    if not any(_kind(argument) == "Tensor" for argument in schema.arguments):
        raise refuse("it has no tensor among its arguments")
    if not schema.returns:
        return
    if len(schema.returns) > 1:
        raise refuse(f"it returns {len(schema.returns)} values, and a native operator one or none")
    (result,) = schema.returns
    if _kind(result) not in _KINDS:
        raise refuse(f"it returns a {_kind(result)}; a native operator returns (), Tensor, int, float or bool")
    if result.alias_info is not None and not any(
        argument.alias_info is not None
        and argument.alias_info.is_write
        and argument.alias_info.before_set == result.alias_info.before_set
        for argument in schema.arguments
    ):
        raise refuse("the tensor it returns is said to be memory of an argument, but no written argument has that mark")


def _kind(argument: Any) -> str:
    # Do not use the type's full name, in which torch calls a SymInt an int.
    return str(argument.real_type.kind()).removesuffix("Type")
