// The functions of tensors/ that the Python side of pickling needs. They run under the GIL.

#include "bindings/bindings.h"
#include "tensors/outside_modes.h"
#include "tensors/sendable.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

namespace py = pybind11;

namespace torch_ucx_rpc {

namespace {

using FunctionModes = at::impl::PythonTorchFunctionTLS;

// Turns off the modes that OutsideModes turns off, and those of torch's functions in Python, such as a default device.
class OutsideAllModes {
 public:
  void enter() {
    before_ = FunctionModes::get_disabled_state();
    FunctionModes::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
    modes_.emplace();
  }
  void exit() {
    modes_.reset();
    FunctionModes::set_disabled_state(before_);
  }

 private:
  std::optional<OutsideModes> modes_;
  at::impl::TorchFunctionDisabledState before_ = at::impl::TorchFunctionDisabledState::ENABLED;
};

} // namespace

void bindTensors(py::module_& module) {
  py::class_<OutsideAllModes>(module, "OutsideModes")
      .def(py::init())
      .def("__enter__", &OutsideAllModes::enter)
      .def("__exit__", [](OutsideAllModes& self, const py::args& /*error*/) { self.exit(); });
  module.def("why_beyond_storage", &whyBeyondStorage, py::arg("tensor"));
}

} // namespace torch_ucx_rpc
