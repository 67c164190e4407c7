#include "bindings/bindings.h"
#include "native_op/native_op.h"

#include <torch/csrc/jit/python/pybind_utils.h>

#include <pybind11/functional.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace torch_ucx_rpc {

namespace {

// Never destroyed: operators stay until the process ends, and the interpreter does not.
const py::function* forGood(py::function function) {
  return new py::function(std::move(function)); // NOLINT(cppcoreguidelines-owning-memory)
}

void definePythonsNativeOp(const std::string& schema, py::function compile, py::function explain, uintptr_t release) {
  const py::function* compileInPython = forGood(std::move(compile));
  const py::function* explainInPython = forGood(std::move(explain));
  NativeCompiler compiler;
  compiler.compile = [compileInPython](const std::vector<TensorType>& types) {
    const py::gil_scoped_acquire gil;
    py::list described;
    for (const TensorType& type : types) {
      described.append(py::make_tuple(type.dtype, type.dims, type.isContiguous));
    }
    try {
      const auto [address, dtype, dims] =
          (*compileInPython)(described).cast<std::tuple<uintptr_t, at::ScalarType, int64_t>>();
      // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast, performance-no-int-to-ptr)
      return NativeCode{reinterpret_cast<NativeCode::Function>(address), {dtype, dims, false}};
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) {
        throw;
      }
      // torch's errors reach callers on other workers with their text alone.
      C10_THROW_ERROR(TypeError, std::string(py::str(error.value())));
    }
  };
  compiler.explain = [explainInPython](const std::vector<at::IValue>& arguments) {
    const py::gil_scoped_acquire gil;
    py::list given;
    for (const at::IValue& argument : arguments) {
      given.append(torch::jit::toPyObject(argument));
    }
    return (*explainInPython)(given).cast<std::string>();
  };
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast, performance-no-int-to-ptr)
  compiler.release = reinterpret_cast<void (*)(void*)>(release);
  defineNativeOp(schema, std::move(compiler));
}

} // namespace

void bindNativeOps(py::module_& module) {
  module.def(
      "define_native_op",
      &definePythonsNativeOp,
      py::arg("schema"),
      py::arg("compile"),
      py::arg("explain"),
      py::arg("release"));
}

} // namespace torch_ucx_rpc
