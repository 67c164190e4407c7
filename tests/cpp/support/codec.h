#pragma once

#include "loopback_transport.h"
#include "memory/host_pool.h"
#include "tensors/tensor_codec.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

// Messages that are encoded for the worker 'ps' (rank 3) and decoded, without a transport between.
namespace torch_ucx_rpc {

namespace rpc = torch::distributed::rpc;

inline const Peer& codecPeer() {
  static const Peer* const peer = [] {
    Member member;
    member.rank = 3;
    member.name = "ps";
    member.host = "node07";
    return new Peer(std::move(member));
  }();
  return *peer;
}

inline std::unique_ptr<OutgoingMessage> encode(
    std::vector<at::Tensor> tensors,
    std::vector<char> payload = {'p'},
    rpc::MessageType type = rpc::MessageType::PYTHON_CALL) {
  LoopbackNetwork network;
  const std::unique_ptr<Transport> transport = network.makeTransport("sender");
  return encodeMessage(
      c10::make_intrusive<Message>(std::move(payload), std::move(tensors), type), codecPeer(), {}, transport.get());
}

// Delivers a message without a transport.
inline IncomingMessage arrive(const OutgoingMessage& outgoing) {
  IncomingMessage incoming;
  incoming.header = outgoing.header;
  incoming.eagerBody = Bytes(std::span<const std::byte>(outgoing.body));
  for (const OutgoingMessage::Span& span : outgoing.spans) {
    c10::DataPtr data = HostPool::instance().allocate(span.bytes.size());
    std::memcpy(data.get(), span.bytes.data(), span.bytes.size());
    incoming.spans.push_back({std::move(data), span.bytes.size()});
  }
  return incoming;
}

inline c10::intrusive_ptr<Message> decode(IncomingMessage incoming) {
  DecodedMessage decoded;
  const Error error = decodeMessage(std::move(incoming), {}, decoded);
  EXPECT_FALSE(error) << error.message();
  return decoded.message;
}

inline std::vector<at::Tensor> travel(std::vector<at::Tensor> tensors) {
  const std::unique_ptr<OutgoingMessage> outgoing = encode(std::move(tensors));
  return decode(arrive(*outgoing))->tensors();
}

inline at::Tensor travel(const at::Tensor& tensor) {
  return travel(std::vector<at::Tensor>{tensor}).at(0);
}

inline void expectSame(const at::Tensor& sent, const at::Tensor& received) {
  ASSERT_TRUE(received.defined());
  EXPECT_EQ(received.dtype(), sent.dtype());
  EXPECT_EQ(received.layout(), sent.layout());
  EXPECT_EQ(received.sizes(), sent.sizes());
  EXPECT_EQ(received.requires_grad(), sent.requires_grad());
  EXPECT_TRUE(received.is_leaf());
  EXPECT_EQ(received.is_conj(), sent.is_conj());
  EXPECT_EQ(received.is_neg(), sent.is_neg());
  at::Tensor a = sent.detach();
  at::Tensor b = received.detach();
  if (a.layout() != at::kStrided) {
    a = a.to_dense();
    b = b.to_dense();
  }
  if (a.is_quantized()) {
    EXPECT_EQ(a.qscheme(), b.qscheme());
    a = a.dequantize();
    b = b.dequantize();
  }
  EXPECT_TRUE(a.equal(b)) << a << "\n" << b;
}

} // namespace torch_ucx_rpc
