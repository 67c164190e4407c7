// Warnings of base/warnings.h for Python.

#include "base/warnings.h"

#include "bindings/bindings.h"

#include <string>
#include <utility>

namespace py = pybind11;

namespace torch_ucx_rpc {

namespace {

// Calls `receive` with each warning from now on. None removes it.
void setPythonsReceiver(const py::object& receive) {
  WarningReceiver receiver;
  if (!receive.is_none()) {
    // Never destroyed, since the interpreter may be gone first.
    auto* function = new py::object(receive); // NOLINT(cppcoreguidelines-owning-memory)
    receiver = [function](const std::string& sentence) {
      const py::gil_scoped_acquire gil;
      try {
        (*function)(sentence);
      } catch (py::error_already_set& failure) {
        failure.discard_as_unraisable("torch_ucx_rpc: logging of a warning");
      }
    };
  }
  const WithoutGil noGil; // it waits for a call of the previous receiver, which takes the GIL
  setWarningReceiver(std::move(receiver));
}

} // namespace

void bindWarnings(py::module_& module) {
  module.def("set_warning_receiver", &setPythonsReceiver, py::arg("receive"));
  module.def("flush_warnings", &flushWarnings, py::call_guard<WithoutGil>());
}

} // namespace torch_ucx_rpc
