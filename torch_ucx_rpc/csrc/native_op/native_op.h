#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Operators of torch whose CPU kernels are machine code that a Python compiler made at run time (numba, see
// _native_op/op.py). They need no GIL when Python, TorchScript or the RPC agent calls them.
namespace torch_ucx_rpc {

// The type of a tensor argument, as the compiler sees it.
struct TensorType {
  c10::ScalarType dtype;
  int64_t dims;
  bool isContiguous;
  bool operator==(const TensorType&) const = default;
};

// The code for arguments of given types. It is called with slots of 8 bytes, and returns whether it succeeded. The
// slots of each argument, in the order of the schema, are:
//
//   of a tensor         its address, its sizes, its strides in bytes
//   of an int or bool   its value
//   of a float          its bits
//
// The slots of the result follow, and the code fills them. Their layout is the same, but a tensor has its owner in
// front, which `release` gives back.
struct NativeCode {
  using Function = bool (*)(int64_t* slots);
  Function function;
  TensorType result; // of the new tensor, if one is returned
};

struct NativeCompiler {
  // Makes the code for tensor arguments of these types, in the order of the schema. Throws the error that the caller of
  // the operator should see. Called once for each such list; threads that need a list at the same time may each
  // call it. The code must stay valid.
  std::function<NativeCode(const std::vector<TensorType>&)> compile;
  // Says why the code failed with these arguments.
  std::function<std::string(const std::vector<c10::IValue>&)> explain;
  // Gives back the owner of a tensor that was returned; never called with null. Needs no GIL.
  void (*release)(void* owner);
};

// Defines the operator of this schema, for good. Its arguments are tensors, ints, floats and bools. It returns nothing,
// or one value of these types. A returned tensor is new, or is the argument that has the result's alias set. The caller
// must have checked this.
//
// The kernel refuses two kinds of arguments. A written tensor must not have elements that share memory with each other
// or, in part, with another argument. Where gradients are enabled, no tensor may require one, since there is no
// derivative. Calls that write to the same storage take turns, across all operators of this kind, so that no update is
// lost. Throws c10::Error.
void defineNativeOp(const std::string& schema, NativeCompiler compiler);

} // namespace torch_ucx_rpc
