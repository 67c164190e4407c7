"""Machine code for `native_op`, by numba; imported when the first operator is defined.

C++ calls the code of an operator with a row of slots that hold its arguments (``csrc/native_op/native_op.h``). An
adapter unpacks the slots. Two intrinsics of numba generate the adapter, and numba compiles it together with the user's
function.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import torch
from numba import types
from numba.core import cgutils, errors
from numba.core.dispatcher import Dispatcher
from numba.core.runtime import _nrt_python
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

_OF_DTYPE = {
    torch.bool: types.bool_,
    torch.uint8: types.uint8,
    torch.uint16: types.uint16,
    torch.uint32: types.uint32,
    torch.uint64: types.uint64,
    torch.int8: types.int8,
    torch.int16: types.int16,
    torch.int32: types.int32,
    torch.int64: types.int64,
    torch.float32: types.float32,
    torch.float64: types.float64,
    torch.complex64: types.complex64,
    torch.complex128: types.complex128,
}
_OF_NUMBA = {of_numba: of_torch for of_torch, of_numba in _OF_DTYPE.items()}
_SCALARS = {"IntType": types.int64, "FloatType": types.float64, "BoolType": types.bool_}
_SLOT = types.int64


class NumbaCode:
    """The code of one operator, compiled for the types of tensors in its calls."""

    # Address of the function that releases the memory of a returned array; it needs no GIL.
    release_address: int = _nrt_python.c_helpers["MemInfo_release"]

    def __init__(self, schema: Any, function: Callable[..., Any]) -> None:
        self._schema = schema
        self._function = function if isinstance(function, Dispatcher) else numba.njit(function)
        options = self._function.targetoptions
        if options.get("parallel") or options.get("forceobj"):
            raise ValueError(
                f"the function of {schema.name} is compiled by numba with options ({options}) that need "
                f"other threads or the GIL; a native operator can have neither parallel nor forceobj"
            )
        # Never freed, like the operator.
        self._entries: list[Any] = []

    @property
    def python_function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = self._function.py_func
        return function

    def compile(self, tensors: Sequence[tuple[torch.dtype, int, bool]]) -> tuple[int, torch.dtype, int]:
        """The address of code for tensor arguments of these dtypes, dimensions and contiguities.

        The second and third values are dtype and number of dimensions of the returned tensor. They are meaningless if
        the code returns no tensor. Raises TypeError for tensors that the function does not compile for.
        """
        described = ", ".join(
            f"{name} {dtype} of {dims} dimension{'s' * (dims != 1)}"
            for name, (dtype, dims, _) in zip(self._names_of_tensors(), tensors, strict=True)
        )
        try:
            arguments = self._types(tensors)
            self._function.compile(arguments)
            result = self._function.overloads[arguments].signature.return_type
            self._check_result(result)
            entry = numba.cfunc(types.bool_(types.CPointer(_SLOT)))(self._entry(arguments, result))
        except (errors.NumbaError, _Unfit) as error:
            raise TypeError(f"{self._schema.name} does not compile for {described}: {error}") from None
        self._entries.append(entry)
        returned = (_OF_NUMBA[result.dtype], result.ndim) if isinstance(result, types.Array) else (torch.uint8, 0)
        return (entry.address, *returned)

    def explain(self, arguments: Sequence[Any]) -> str:
        """The exception that the function raises with these arguments, as text.

        numba keeps nothing of an exception that its code catches. So this calls the function again, from Python, on
        copies of the arguments as the failed call has left them.
        """
        copies = [value.clone().numpy() if isinstance(value, torch.Tensor) else value for value in arguments]
        try:
            self._function(*copies)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "it raised an exception that it does not raise when it is called with the same arguments again"

    def _names_of_tensors(self) -> list[str]:
        return [argument.name for argument in self._schema.arguments if argument.type.kind() == "TensorType"]

    def _types(self, tensors: Sequence[tuple[torch.dtype, int, bool]]) -> tuple[types.Type, ...]:
        remaining = iter(tensors)
        found = []
        for argument in self._schema.arguments:
            kind = argument.type.kind()
            if kind != "TensorType":
                found.append(_SCALARS[kind])
                continue
            dtype, dims, is_contiguous = next(remaining)
            if dtype not in _OF_DTYPE:
                raise _Unfit(f"numba has no {dtype}")
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            layout = "C" if is_contiguous else "A"
            found.append(types.Array(_OF_DTYPE[dtype], dims, layout, readonly=not is_written))
        return tuple(found)

    def _check_result(self, found: types.Type) -> None:
        expected = self._schema.returns[0] if self._schema.returns else None
        if expected is None or expected.alias_info is not None:
            is_right = found == types.none
            what = "nothing" if expected is None else "an argument, so the function must return nothing"
        elif expected.type.kind() == "TensorType":
            is_right = isinstance(found, types.Array) and found.dtype in _OF_NUMBA
            what = "a Tensor"
        else:
            # Numbers convert as in TorchScript: only from int to float.
            wanted = {"IntType": types.Integer, "BoolType": types.Boolean, "FloatType": (types.Float, types.Integer)}
            is_right = isinstance(found, wanted[expected.type.kind()])
            what = f"{expected.type}"
        if not is_right:
            raise _Unfit(f"its function returns {found}, and its schema says that it returns {what}")

    def _entry(self, arguments: tuple[types.Type, ...], result: types.Type) -> Callable[[Any], bool]:
        """The function that C++ will call: true if the user's function returned, false if it raised."""
        function = self._function
        load, slots_used = _loader(arguments)
        wanted = self._schema.returns[0].type.kind() if self._schema.returns else ""
        store = _storer(result, _SCALARS.get(wanted, result), slots_used)

        def entry(slots):
            try:
                store(slots, function(*load(slots)))
            except Exception:
                return False
            return True

        return entry


class _Unfit(Exception):
    """numba lacks the dtype of an argument, or the function's result does not fit the schema."""


def _loader(arguments: tuple[types.Type, ...]) -> tuple[Any, int]:
    """An intrinsic that makes a tuple of arguments from slots, and the number of slots that it reads."""
    tuple_type = types.Tuple(arguments)

    @intrinsic
    def load(typing_context, slots):
        def generate(context, builder, signature, values):
            remaining = (_slot(builder, values[0], index) for index in range(slots_used))

            def take():
                return builder.load(next(remaining))

            def make(type_):
                if isinstance(type_, types.Array):
                    array = make_array(type_)(context, builder)
                    data = builder.inttoptr(take(), array.data.type)
                    sizes = [take() for _ in range(type_.ndim)]
                    strides = [take() for _ in range(type_.ndim)]
                    itemsize = context.get_abi_sizeof(context.get_data_type(type_.dtype))
                    populate_array(array, data=data, shape=sizes, strides=strides, itemsize=itemsize, meminfo=None)
                    return array._getvalue()
                if isinstance(type_, types.Float):
                    return builder.bitcast(take(), context.get_value_type(type_))
                return context.cast(builder, take(), _SLOT, type_)

            return context.make_tuple(builder, tuple_type, [make(type_) for type_ in arguments])

        return tuple_type(slots), generate

    slots_used = sum(1 + 2 * type_.ndim if isinstance(type_, types.Array) else 1 for type_ in arguments)
    return load, slots_used


def _storer(result: types.Type, wanted: types.Type, first: int) -> Any:
    """An intrinsic that stores a result, converted to ``wanted``, in the slots from ``first`` on."""

    @intrinsic
    def store(typing_context, slots, value):
        def generate(context, builder, signature, values):
            pointer, returned = values
            slot = context.get_value_type(_SLOT)
            if isinstance(result, types.Array):
                # C++ owns the array from here on.
                context.nrt.incref(builder, result, returned)
                array = make_array(result)(context, builder, returned)
                fields = [builder.ptrtoint(field, slot) for field in (array.meminfo, array.data)]
                fields += [*cgutils.unpack_tuple(builder, array.shape), *cgutils.unpack_tuple(builder, array.strides)]
            elif result == types.none:
                fields = []
            else:
                number = context.cast(builder, returned, result, wanted)
                is_float = isinstance(wanted, types.Float)
                fields = [builder.bitcast(number, slot) if is_float else context.cast(builder, number, wanted, _SLOT)]
            for index, field in enumerate(fields, start=first):
                builder.store(field, _slot(builder, pointer, index))
            return context.get_dummy_value()

        return types.void(slots, value), generate

    return store


def _slot(builder: Any, slots: Any, index: int) -> Any:
    return cgutils.gep_inbounds(builder, slots, index)
