#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Operators of torch whose CPU kernels are machine code that a compiler of Python made at run time (numba, see
// _native_op/op.py). Called from Python, TorchScript or the RPC agent they need no GIL.
namespace torch_ucx_rpc {

// What code is made for: a tensor argument as the compiler types it.
struct TensorType {
  c10::ScalarType dtype;
  int64_t dims;
  bool isContiguous;
  bool operator==(const TensorType&) const = default;
};

// The code for arguments of given types. It is called with slots of 8 bytes:
//
//   of each argument, in the order of the schema   a tensor: address, sizes, strides in bytes; an int or bool: its value;
//                                                  a float: its bits
//   of the result, filled by the code              the same; a tensor has its owner in front, which `release` gives back
//
// and returns whether it succeeded.
struct NativeCode {
  using Function = bool (*)(int64_t* slots);
  Function function;
  TensorType result; // if a new tensor is returned
};

struct NativeCompiler {
  // Makes the code for tensor arguments of these types, in the order of the schema, or throws what the caller of the
  // operator shall see. Asked once for each such list, or a few times when threads are the first together; the code must
  // stay.
  std::function<NativeCode(const std::vector<TensorType>&)> compile;
  // Says why the code failed with these arguments.
  std::function<std::string(const std::vector<c10::IValue>&)> explain;
  // Gives back the owner of a tensor that was returned. Needs no GIL; null ones are not passed.
  void (*release)(void* owner);
};

// Defines the operator of this schema, for good. Its arguments are tensors, ints, floats and bools; it returns nothing, one of
// these (a tensor is a new one), or the tensor that an argument with its alias set is. The caller has checked that.
//
// The kernel refuses what the schema does not promise: written tensors with elements that share memory with each other or,
// in part, with another argument; and tensors that require grad, since there is no derivative. Calls that write to the same
// storage take turns, whatever operator of this kind they are of, so that no update is lost. Throws c10::Error.
void defineNativeOp(const std::string& schema, NativeCompiler compiler);

} // namespace torch_ucx_rpc
