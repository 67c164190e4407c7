#include "base/rpc_failure.h"
#include "bindings/bindings.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <exception>
#include <stdexcept>
#include <utility>

namespace py = pybind11;

namespace torch_ucx_rpc {

namespace {

// Python functions that turn C++ exceptions into the exceptions that programs see. Never destroyed, since the
// interpreter may be gone first.
struct Translators {
  // Makes the callee's Python exception again from the text of a C++ exception, instead of a RuntimeError.
  py::object original;
  py::object failure; // makes the exception that an RpcFailure becomes
};
Translators& translators() {
  static auto* functions = new Translators(); // NOLINT(cppcoreguidelines-owning-memory)
  return *functions;
}

// The kind's name in errors.py.
const char* nameOf(RpcFailure::Kind kind) {
  switch (kind) {
    case RpcFailure::Kind::kWorkerLost:
      return "worker_lost";
    case RpcFailure::Kind::kWorkerLeft:
      return "worker_left";
    case RpcFailure::Kind::kShutDown:
      return "shut_down";
    case RpcFailure::Kind::kTimedOut:
      return "timed_out";
    case RpcFailure::Kind::kMessageRefused:
      return "message_refused";
    case RpcFailure::Kind::kNotSent:
      return "not_sent";
    case RpcFailure::Kind::kOutOfResources:
      return "out_of_resources";
    case RpcFailure::Kind::kUnknownWorker:
      return "unknown_worker";
    case RpcFailure::Kind::kRRefLost:
      return "rref_lost";
    case RpcFailure::Kind::kBarrierFailed:
      return "barrier_failed";
    case RpcFailure::Kind::kForked:
      return "forked";
    case RpcFailure::Kind::kEpochEnded:
      return "epoch_ended";
  }
  return "";
}

py::object exceptionOf(const RpcFailure& failure) {
  using py::operator""_a;
  const RpcFailure::Details& details = failure.details();
  py::dict fields(
      "name"_a = details.name,
      "rank"_a = details.rank,
      "host"_a = details.host,
      "cause"_a = details.cause,
      "resource"_a = details.resource,
      "group"_a = details.group,
      "epoch"_a = details.epoch);
  if (details.timeout) {
    fields["timeout"] = std::chrono::duration<double>(*details.timeout).count();
  }
  return translators().failure(nameOf(failure.kind()), failure.what(), fields);
}

// Raises the Python exception that `make` returns. For None, rethrows the C++ exception that is being handled.
template <typename Make>
void raiseInstead(const Make& make) {
  py::object exception = py::none();
  try {
    exception = make();
  } catch (py::error_already_set& failure) {
    failure.discard_as_unraisable("torch_ucx_rpc: what the callee raised");
  }
  if (exception.is_none()) {
    throw;
  }
  py::set_error(py::type::of(exception), exception);
}

// pybind11 calls this for every C++ exception that leaves torch's bindings or these. An exception thrown here goes on
// to the next translator.
void translateRuntimeError(std::exception_ptr thrown) {
  const SleepWhilePythonEnds sleep; // the Python functions may release the GIL
  try {
    std::rethrow_exception(std::move(thrown));
  } catch (const RpcFailure& failure) {
    raiseInstead([&] { return exceptionOf(failure); });
  } catch (const std::runtime_error& error) {
    raiseInstead([&] { return translators().original(error.what()); });
  } catch (const c10::Error& error) {
    raiseInstead([&] { return translators().original(error.what_without_backtrace()); });
  }
}

} // namespace

void bindErrors(py::module_& module) {
  module.def("translate_runtime_errors", [](py::object original, py::object failure) {
    const bool isFirst = !translators().original;
    translators() = {std::move(original), std::move(failure)};
    if (isFirst) { // pybind11 would call a second registration as well
      py::register_exception_translator(&translateRuntimeError);
    }
  });
}

} // namespace torch_ucx_rpc
