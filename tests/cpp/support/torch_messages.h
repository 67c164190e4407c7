#pragma once

// Messages of torch, their futures, and handlers of requests, for tests.

#include "base/rpc_failure.h"
#include "eventually.h"
#include "memory/host_pool.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;
using rpc::JitFuture;
using rpc::Message;
using rpc::MessageType;
using std::chrono::milliseconds;
using Future = c10::intrusive_ptr<JitFuture>;
using Handler = std::function<Future(Message&)>;

inline constexpr uint64_t kKiB = 1024;
inline constexpr uint64_t kMiB = 1024 * kKiB;

inline c10::intrusive_ptr<Message> makeMessage(
    MessageType type, const std::string& text, std::vector<at::Tensor> tensors = {}) {
  return c10::make_intrusive<Message>(std::vector<char>(text.begin(), text.end()), std::move(tensors), type);
}

inline std::string textOf(const Message& message) {
  return {message.payload().begin(), message.payload().end()};
}

inline Future newFuture() {
  return c10::make_intrusive<JitFuture>(at::AnyClassType::get());
}

inline void complete(const Future& future, const std::string& text, std::vector<at::Tensor> tensors = {}) {
  c10::intrusive_ptr<Message> message = makeMessage(MessageType::PYTHON_RET, text, std::move(tensors));
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages = message->getStorages();
  future->markCompleted(std::move(message), std::move(storages));
}

inline Future completed(const std::string& text, std::vector<at::Tensor> tensors = {}) {
  Future future = newFuture();
  complete(future, text, std::move(tensors));
  return future;
}

inline Future echo(Message& request) {
  return completed(textOf(request), request.tensors());
}

// Waits for the answer; throws the failure of the call.
inline c10::intrusive_ptr<Message> answer(const Future& future) {
  if (!eventually([&] { return future->completed(); })) {
    throw std::runtime_error("no answer, and no error either");
  }
  if (future->hasError()) {
    throw std::runtime_error(future->tryRetrieveErrorMessage());
  }
  return future->constValue().toCustomClass<Message>();
}

// Waits for the call to fail, and returns the text of the failure.
inline std::string failure(const Future& future) {
  EXPECT_TRUE(eventually([&] { return future->completed(); })) << "neither an answer nor an error";
  return future->hasError() ? future->tryRetrieveErrorMessage() : "no error";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Returns a tensor of this many bytes, with all elements `value`.
inline at::Tensor tensorOf(uint64_t bytes, double value = 1) {
  return at::full({static_cast<int64_t>(bytes / sizeof(float))}, value);
}

inline bool isAll(const at::Tensor& tensor, double value) {
  return tensor.eq(value).all().item<bool>();
}

inline uint64_t poolBytesInUse() {
  return HostPool::instance().statistics().inUseBytes;
}

class Callback final : public rpc::RequestCallback {
 public:
  explicit Callback(Handler handler) : handler_(std::move(handler)) {}

 protected:
  Future processMessage(Message& request, std::vector<c10::Stream> /*streams*/) const override {
    return handler_(request);
  }

 private:
  const Handler handler_;
};

// This exception ends the wait of a caller, as Ctrl-C does.
struct Interrupted {};

// Waits until the call fails with one of RPC's own failures, and returns that. Returns nothing if it ends otherwise.
inline std::optional<RpcFailure> rpcFailure(const Future& future) {
  EXPECT_TRUE(eventually([&] { return future->completed(); })) << "neither an answer nor an error";
  if (future->hasError()) {
    try {
      std::rethrow_exception(future->exception_ptr());
    } catch (const RpcFailure& failed) {
      return failed;
    } catch (const std::exception& other) {
      ADD_FAILURE() << "another exception: " << other.what();
    }
  }
  return std::nullopt;
}

// Returns the failure of RPC that an operation throws, or nothing.
template <typename Operation>
std::optional<RpcFailure> rpcFailureOf(Operation operation) {
  try {
    operation();
  } catch (const RpcFailure& failed) {
    return failed;
  }
  return std::nullopt;
}

} // namespace torch_ucx_rpc
