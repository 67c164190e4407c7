#include "rpc/profiled_spans.h"

#include "base/trace.h"

#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace torch_ucx_rpc {

namespace {

constexpr trace::Recorder kProfilers{
    [](const char* name) -> void* {
      std::optional<at::StepCallbacks> callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
      if (!callbacks) {
        return nullptr;
      }
      auto recorded = std::make_unique<at::RecordFunction>(std::move(*callbacks));
      recorded->before(std::string("torch_ucx_rpc: ") + name);
      return recorded.release();
    },
    [](void* begun) { std::unique_ptr<at::RecordFunction>(static_cast<at::RecordFunction*>(begun)).reset(); }};

} // namespace

void recordSpansInProfilers() {
  trace::setRecorder(&kProfilers);
}

} // namespace torch_ucx_rpc
