// Feeds arriving bytes to everything that reads them: headers, the assembler, bodies, the replay window. An input is a
// sequence of steps: a byte that names the step, followed by its data. Missing bytes at the end count as zeros.
// libFuzzer looks for inputs that crash, read out of bounds, or make something allocate more than was sent
// (tools/fuzz.sh). tests/cpp/wire/wire_corpus_test.cpp runs the inputs in corpus/, which tests/fuzz/seeds.py writes.

#include "base/bytes.h"
#include "wire/assembler.h"
#include "wire/body.h"
#include "wire/header.h"
#include "wire/replay_window.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <span>
#include <vector>

using namespace torch_ucx_rpc;
using namespace torch_ucx_rpc::wire;

namespace {

void require(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "broken: %s\n", what);
    std::abort();
  }
}

class Input {
 public:
  explicit Input(std::span<const std::byte> bytes) : rest_(bytes) {}

  bool isEmpty() const {
    return rest_.empty();
  }
  // Takes this many bytes, or all that are left.
  std::span<const std::byte> take(size_t bytes) {
    const std::span<const std::byte> taken = rest_.first(std::min(bytes, rest_.size()));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }
  template <typename T>
  T read() {
    T value{};
    const std::span<const std::byte> taken = take(sizeof(T));
    if (!taken.empty()) {
      std::memcpy(&value, taken.data(), taken.size());
    }
    return value;
  }

 private:
  std::span<const std::byte> rest_;
};

// Reads all memory that a view points to, so that AddressSanitizer checks it.
uint64_t sumOf(std::span<const std::byte> bytes) {
  uint64_t sum = 0;
  for (const std::byte byte : bytes) {
    sum += std::to_integer<uint64_t>(byte);
  }
  return sum;
}

void checkView(std::span<const std::byte> body, std::span<const uint64_t> spanBytes, const BodyView& view) {
  volatile uint64_t sum = sumOf(view.payload);
  require(view.payloadSpan == kNowhere || view.payloadSpan < spanBytes.size(), "the payload's span is there");
  require(view.payloadSpan == payloadSpanOf(body), "both readers find the payload");
  for (const BodyView::Storage& storage : view.storages) {
    if (storage.record.span == kNowhere) {
      require(storage.inlineBytes.size() == storage.record.bytes, "an inline storage is whole");
      sum = sum + sumOf(storage.inlineBytes);
    } else {
      require(spanBytes[storage.record.span] == storage.record.bytes, "a span has the size of its storage");
    }
  }
  for (const BodyView::Tensor& tensor : view.tensors) {
    require(tensor.sizes.size() == tensor.record.dims, "a size for each dimension");
    sum = sum + sumOf(std::as_bytes(tensor.sizes)) + sumOf(std::as_bytes(tensor.strides));
    if (tensor.record.storage == kNowhere) {
      continue;
    }
    require(tensor.strides.size() == tensor.record.dims, "a stride for each dimension");
    // This arithmetic cannot overflow. The reader has its own.
    __int128 end = tensor.record.storageOffset;
    bool isEmpty = false;
    for (size_t dim = 0; dim < tensor.sizes.size(); ++dim) {
      isEmpty = isEmpty || tensor.sizes[dim] == 0;
      end += static_cast<__int128>(tensor.sizes[dim] - 1) * tensor.strides[dim];
    }
    end = (end + 1) * tensor.record.itemBytes;
    require(
        isEmpty || (end >= 0 && end <= view.storages[tensor.record.storage].record.bytes),
        "a tensor is in its storage");
  }
}

// Replaces the receiver of an agent: each rendezvous must come back exactly once.
class Receiver {
 public:
  void onFrame(
      std::span<const std::byte> headerBytes,
      std::span<const std::byte> data,
      bool isRendezvous,
      uint64_t rendezvousBytes) {
    Header header;
    if (readHeader(headerBytes, header)) {
      return;
    }
    Piece piece;
    if (isRendezvous) {
      piece.rendezvous = reinterpret_cast<void*>(++lastHandle_);
      piece.rendezvousBytes = rendezvousBytes;
      rendezvous_.insert(piece.rendezvous);
    } else {
      piece.data = Bytes(data);
    }
    Assembled assembled;
    std::vector<Piece> rejected;
    switch (assembler_.add(header, std::move(piece), assembled, rejected)) {
      case Assembler::Outcome::kWhole:
        onMessage(assembled);
        break;
      case Assembler::Outcome::kRejected:
      case Assembler::Outcome::kGivenUp:
        release(rejected);
        break;
      case Assembler::Outcome::kIncomplete:
        break;
    }
    sessions_.insert(header.sourceSession);
    require(assembler_.incomplete() <= ++frames_, "no more messages than frames");
  }

  void onCancel(uint64_t session, Kind kind, uint64_t callId) {
    std::vector<Piece> dropped;
    assembler_.cancel(session, kind, callId, dropped);
    release(dropped);
  }

  // All peers leave.
  void finish() {
    for (const uint64_t session : sessions_) {
      std::vector<Piece> dropped;
      assembler_.dropSession(session, dropped);
      release(dropped);
    }
    require(assembler_.incomplete() == 0, "nothing is left of those who left");
    require(rendezvous_.empty(), "every rendezvous has come back");
  }

 private:
  void onMessage(Assembled& message) {
    require(message.spans.size() == message.header.spanCount, "all spans are there");
    std::vector<uint64_t> spanBytes;
    std::vector<Piece> pieces;
    for (Assembled::Span& span : message.spans) {
      uint64_t end = 0;
      for (Piece& piece : span.pieces) {
        require(piece.offset == end, "the pieces of a span are all of it, in order");
        end += piece.size();
        pieces.push_back(std::move(piece));
      }
      require(end == span.bytes, "a span has as many bytes as it says");
      spanBytes.push_back(span.bytes);
    }
    BodyView view;
    if (message.body.rendezvous == nullptr && !readBody(message.body.data, spanBytes, view)) {
      checkView(message.body.data, spanBytes, view);
    }
    pieces.push_back(std::move(message.body));
    release(pieces);
  }

  void release(std::vector<Piece>& pieces) {
    for (const Piece& piece : pieces) {
      require(piece.rendezvous == nullptr || rendezvous_.erase(piece.rendezvous) == 1, "a rendezvous comes back once");
    }
  }

  Assembler assembler_;
  uintptr_t lastHandle_ = 0;
  std::set<void*> rendezvous_;
  std::set<uint64_t> sessions_;
  size_t frames_ = 0;
};

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(std::as_bytes(std::span(data, size)));
  Receiver receiver;
  ReplayWindow window;
  std::set<uint64_t> numbers; // the numbers that the window has taken
  while (!input.isEmpty()) {
    switch (input.read<uint8_t>() % 6) {
      case 0: { // a frame that brings its data
        const std::span<const std::byte> header = input.take(sizeof(Header));
        receiver.onFrame(header, input.take(input.read<uint16_t>()), false, 0);
        break;
      }
      case 1: { // a frame that announces it
        const std::span<const std::byte> header = input.take(sizeof(Header));
        receiver.onFrame(header, {}, true, input.read<uint64_t>());
        break;
      }
      case 2: // a header of another length
        receiver.onFrame(input.take(input.read<uint8_t>()), {}, false, 0);
        break;
      case 3: { // a body alone, with spans of the announced sizes
        std::vector<uint64_t> spanBytes(input.read<uint8_t>() % 8);
        for (uint64_t& bytes : spanBytes) {
          bytes = input.read<uint64_t>();
        }
        const Bytes body(input.take(input.read<uint16_t>()));
        BodyView view;
        if (!readBody(body, spanBytes, view)) {
          checkView(body, spanBytes, view);
        }
        break;
      }
      case 4: {
        const auto session = input.read<uint64_t>();
        const auto kind = static_cast<Kind>(input.read<uint8_t>());
        receiver.onCancel(session, kind, input.read<uint64_t>());
        break;
      }
      case 5: {
        const auto number = input.read<uint64_t>();
        const bool isNew = window.accept(number);
        require(!isNew || numbers.insert(number).second, "no number is taken twice");
        require(window.gaps() <= std::min(numbers.size(), ReplayWindow::kMaxGaps), "gaps are bounded");
        break;
      }
    }
  }
  receiver.finish();
  return 0;
}
