#pragma once

// This header leaves out torch's pybind.h, which takes long to compile: sources that need its conversions include it.
// Every source gets the conversions of the standard library: without them it would compile, and its conversions would
// throw.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <unistd.h>

// Each function binds one source of this folder to Python. torch_ucx_rpc/_C.pyi declares what they bind.
namespace torch_ucx_rpc {

inline bool isInterpreterFinalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// While Python ends, no other thread gets the GIL any more. Before 3.14 Python unwinds a thread that wants it. Where
// the unwinding reaches a destructor, or the handler of an exception, the process aborts. In the scope of this object
// such a thread sleeps until the process is over instead, as it does from 3.14 on.
class SleepWhilePythonEnds {
 public:
  SleepWhilePythonEnds() = default;
  SleepWhilePythonEnds(const SleepWhilePythonEnds&) = delete;
  SleepWhilePythonEnds& operator=(const SleepWhilePythonEnds&) = delete;
  ~SleepWhilePythonEnds() {
    while (isInterpreterFinalizing() && PyGILState_Check() == 0) {
      pause();
    }
  }
};

// Releases the GIL, like py::gil_scoped_release. With the latter, the process would abort when a daemon thread comes
// back while Python ends.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() noexcept(false) { // Python may unwind the thread here
    const SleepWhilePythonEnds sleep;
    PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

// Turns C++ exceptions into exceptions of torch_ucx_rpc.errors, or into the one that a callee raised.
void bindErrors(pybind11::module_& module);

// The agents, their options and members, their statistics, and the devices of futures.
void bindAgents(pybind11::module_& module);

// The values that an agent sends and receives under tags.
void bindChannels(pybind11::module_& module);

// Operators of torch whose kernels a Python compiler makes.
void bindNativeOps(pybind11::module_& module);

// Checks of tensors for the pickler, and a context in which modes do not apply.
void bindTensors(pybind11::module_& module);

// The agent's warnings.
void bindWarnings(pybind11::module_& module);

} // namespace torch_ucx_rpc
