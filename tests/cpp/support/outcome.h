#pragma once

#include "base/error.h"
#include "transport/transport.h"

#include <gtest/gtest.h>

#include <atomic>

namespace torch_ucx_rpc {

// The outcome of one transport operation. The destructor checks that the callback was called exactly once, so declare
// it before the transports.
class Outcome {
 public:
  Outcome() = default;
  Outcome(const Outcome&) = delete;
  Outcome& operator=(const Outcome&) = delete;
  ~Outcome() {
    EXPECT_EQ(calls_.load(), 1) << "callbacks of one operation";
  }

  OperationDone callback() {
    return [this](Error error) {
      error_ = std::move(error);
      calls_.fetch_add(1);
    };
  }
  bool isDone() const {
    return calls_.load() != 0;
  }
  // Call it once the operation is done.
  const Error& error() const {
    return error_;
  }

 private:
  std::atomic<int> calls_{0};
  Error error_;
};

} // namespace torch_ucx_rpc
