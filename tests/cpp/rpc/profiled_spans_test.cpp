#include "rpc/profiled_spans.h"

#include "base/trace.h"

#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace torch_ucx_rpc {
namespace {

std::vector<std::string> events;

std::unique_ptr<at::ObserverContext> noteBegin(const at::RecordFunction& function) {
  events.emplace_back(std::string("+ ") + function.name());
  return nullptr;
}

void noteEnd(const at::RecordFunction& function, at::ObserverContext* /*unused*/) {
  events.emplace_back(std::string("- ") + function.name());
}

TEST(ProfiledSpansTest, AreSeenByProfilersOfTheirThread) {
  recordSpansInProfilers();
  events.clear();
  {
    const trace::Span before("early");
  }
  const at::CallbackHandle profiler =
      at::addThreadLocalCallback(at::RecordFunctionCallback(&noteBegin, &noteEnd).scopes({at::RecordScope::FUNCTION}));
  {
    const trace::Span outer("send request");
    const trace::Span inner("encode");
    std::thread([] { const trace::Span elsewhere("elsewhere"); }).join();
  }
  at::removeCallback(profiler);
  {
    const trace::Span after("late");
  }
  EXPECT_EQ(
      events,
      (std::vector<std::string>{
          "+ torch_ucx_rpc: send request",
          "+ torch_ucx_rpc: encode",
          "- torch_ucx_rpc: encode",
          "- torch_ucx_rpc: send request"}));
}

} // namespace
} // namespace torch_ucx_rpc
