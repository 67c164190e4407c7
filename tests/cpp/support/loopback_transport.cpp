#include "loopback_transport.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace torch_ucx_rpc {

// The network's mutex guards everything that goes between transports, and so between threads. Callbacks run without it.
class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(LoopbackNetwork* network, std::string name)
      : network_(network), name_(std::move(name)), eventFd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (eventFd_ < 0) {
      throw std::runtime_error("eventfd failed: no file descriptors left");
    }
  }
  ~LoopbackTransport() override {
    close(0);
    ::close(eventFd_);
  }

  void setListener(TransportListener* listener) override {
    listener_ = listener;
  }
  const std::string& address() const override {
    return name_;
  }
  int eventFd() const override {
    return eventFd_;
  }
  std::vector<std::pair<std::string, std::string>> description() const override {
    return {{"transport", "loopback"}};
  }

  Error connect(const std::string& address, EndpointId& endpoint) override {
    const std::lock_guard lock(network_->mutex_);
    if (!network_->transports_.contains(address)) {
      return {ErrorCode::kPeerFailed, "loopback: no transport is called '" + address + "'"};
    }
    endpoint = static_cast<EndpointId>(endpoints_.size());
    endpoints_.push_back({address, {}});
    return {};
  }

  void send(
      EndpointId endpointId,
      const wire::Header& header,
      std::span<const std::byte> bytes,
      SendMode mode,
      OperationDone done,
      Memory memory) override {
    Error failure = endpoints_[endpointId].failure;
    if (!failure && memory == Memory::kDevice) {
      failure = deviceMemoryRefusal();
    }
    if (!failure) {
      const std::lock_guard lock(network_->mutex_);
      using Fate = LoopbackNetwork::Fate;
      const Fate fate = network_->fault_ ? network_->fault_(header, mode) : Fate::kDeliver;
      LoopbackNetwork::Delivery delivery{header, {}, nullptr, name_, endpoints_[endpointId].address};
      if (mode == SendMode::kRendezvous && fate != Fate::kFail) {
        const uint64_t operation = nextOperation_++;
        delivery.rendezvous = std::make_shared<LoopbackNetwork::Rendezvous>();
        *delivery.rendezvous = {this, operation, bytes, memory, endpointId};
        operations_.emplace(operation, Operation{endpointId, delivery.rendezvous, std::move(done)});
      } else {
        delivery.eager = Bytes(bytes);
      }
      switch (fate) {
        case Fate::kDeliver:
          network_->deliverLocked(std::move(delivery));
          break;
        case Fate::kDuplicate: {
          LoopbackNetwork::Delivery copy{
              header,
              Bytes(std::span<const std::byte>(delivery.eager)),
              delivery.rendezvous,
              delivery.from,
              delivery.to};
          network_->deliverLocked(std::move(copy));
          network_->deliverLocked(std::move(delivery));
          break;
        }
        case Fate::kHold:
          network_->held_.push_back(std::move(delivery));
          break;
        case Fate::kDrop:
          break;
        case Fate::kFail:
          failure = {ErrorCode::kPeerFailed, "loopback: the send was made to fail"};
          break;
      }
    }
    if (done) { // a rendezvous in flight has moved it into its operation
      done(std::move(failure));
    }
  }

  bool canShare(const void* /*deviceMemory*/, uint64_t /*bytes*/) const override {
    return network_->isDeviceMemoryShared_.load();
  }
  const Error& deviceMemoryRefusal() const override {
    return network_->deviceMemoryRefusal_;
  }

  void receive(void* handle, void* into, uint64_t bytes, OperationDone done, Memory memory) override {
    const std::shared_ptr<LoopbackNetwork::Rendezvous> rendezvous = takeHandle(handle);
    Error failure;
    {
      const std::lock_guard lock(network_->mutex_);
      if (rendezvous == nullptr) {
        failure = {ErrorCode::kOutOfMemory, "loopback: there was no memory for the message"};
      } else if (memory == Memory::kDevice && deviceMemoryRefusal()) {
        failure = deviceMemoryRefusal();
        completeLocked(*rendezvous, {});
      } else if (network_->areReceivesStalled_.load()) {
        stalled_.emplace(rendezvous->sender->name_, std::move(done));
        return;
      } else if (rendezvous->isCompleted) {
        failure = {ErrorCode::kPeerFailed, "loopback: the sender is gone"};
      } else {
        network_->mixedRendezvous_.fetch_add(rendezvous->memory != memory ? 1 : 0);
        std::copy_n(rendezvous->bytes.data(), bytes, static_cast<std::byte*>(into));
        completeLocked(*rendezvous, {});
      }
    }
    done(std::move(failure));
  }

  void release(void* handle) override {
    if (const std::shared_ptr<LoopbackNetwork::Rendezvous> rendezvous = takeHandle(handle)) {
      const std::lock_guard lock(network_->mutex_);
      completeLocked(*rendezvous, {});
    }
  }
  const void* originOf(void* handle) const override {
    const auto& rendezvous = *static_cast<const std::shared_ptr<LoopbackNetwork::Rendezvous>*>(handle);
    return rendezvous != nullptr ? reinterpret_cast<const void*>(rendezvous->endpoint + 1) : nullptr;
  }
  bool closeOrigin(const void* /*origin*/) override {
    if (!network_->areOriginsInternal_.load()) {
      return false;
    }
    for (auto& [sender, done] : std::exchange(stalled_, {})) {
      done({ErrorCode::kCanceled, "the endpoint was closed"});
    }
    return true;
  }

  // A callback may throw. So each item is taken out before its callback runs, and the next call handles the rest. Items
  // that callbacks add also wait for the next call.
  unsigned progress() override {
    size_t completedBefore = 0;
    size_t arrivedBefore = 0;
    {
      const std::lock_guard lock(network_->mutex_);
      completedBefore = completed_.size();
      arrivedBefore = arrived_.size();
    }
    unsigned told = 0;
    for (; completedBefore != 0; --completedBefore) {
      auto completed = take(completed_);
      ++told;
      if (auto operation = operations_.extract(completed->first)) {
        operation.mapped().done(std::move(completed->second));
      }
    }
    for (; arrivedBefore != 0; --arrivedBefore) {
      auto delivery = take(arrived_);
      ++told;
      deliver(*delivery);
    }
    while (auto dead = take(dead_)) {
      for (EndpointId id = 0; id < endpoints_.size(); ++id) {
        if (endpoints_[id].address == dead->first && !endpoints_[id].failure) {
          failing_.emplace_back(id, dead->second);
        }
      }
    }
    while (!failing_.empty()) {
      const auto [id, how] = failing_.front();
      failing_.pop_front();
      ++told;
      fail(id, {ErrorCode::kPeerFailed, "loopback: '" + endpoints_[id].address + "' " + how});
      listener_->onEndpointFailed(id, endpoints_[id].failure);
    }
    return told;
  }

  bool arm() override {
    uint64_t count = 0; // read it before checking: later items signal again
    (void)!read(eventFd_, &count, sizeof(count));
    const std::lock_guard lock(network_->mutex_);
    return arrived_.empty() && completed_.empty() && dead_.empty() && failing_.empty();
  }

  size_t operationsInFlight() const override {
    return operations_.size();
  }

  std::vector<std::string> lanes(EndpointId /*endpoint*/) const override {
    return {"loopback/memory"};
  }

  RepairState repairState() override {
    return network_->isDeaf_.load() ? RepairState::kUnrepairable : RepairState::kWhole;
  }
  void abandon(EndpointId endpoint) override {
    if (!endpoints_[endpoint].failure) {
      fail(endpoint, {ErrorCode::kCanceled, "the endpoint was abandoned"});
    }
  }

  void close(int64_t /*limitMs*/) override {
    if (std::exchange(isClosed_, true)) {
      return;
    }
    {
      const std::lock_guard lock(network_->mutex_);
      network_->transports_.erase(name_);
    }
    while (!handles_.empty()) {
      release(*handles_.begin());
    }
    for (EndpointId id = 0; id < endpoints_.size(); ++id) {
      abandon(id);
    }
    const std::lock_guard lock(network_->mutex_);
    for (auto& delivery : arrived_) {
      if (delivery.rendezvous != nullptr) {
        completeLocked(*delivery.rendezvous, {});
      }
    }
    arrived_.clear();
  }

 private:
  friend class LoopbackNetwork;

  struct Endpoint {
    std::string address;
    Error failure;
  };
  struct Operation {
    EndpointId endpoint;
    std::shared_ptr<LoopbackNetwork::Rendezvous> rendezvous;
    OperationDone done;
  };

  // Takes the first item that peers have put there.
  template <class T>
  std::optional<T> take(std::deque<T>& things) {
    const std::lock_guard lock(network_->mutex_);
    if (things.empty()) {
      return std::nullopt;
    }
    std::optional<T> first(std::move(things.front()));
    things.pop_front();
    return first;
  }

  void deliver(LoopbackNetwork::Delivery& delivery) {
    const auto header = std::as_bytes(std::span(&delivery.header, 1));
    if (delivery.rendezvous == nullptr) {
      try {
        listener_->onEager(header, delivery.eager);
      } catch (const std::exception&) { // the message is lost
      }
      return;
    }
    auto handle = std::make_unique<std::shared_ptr<LoopbackNetwork::Rendezvous>>(delivery.rendezvous);
    handles_.insert(handle.get());
    auto* const announced = handle.release();
    try {
      listener_->onRendezvous(header, announced, delivery.rendezvous->bytes.size());
    } catch (const std::exception&) {
      const std::lock_guard lock(network_->mutex_);
      completeLocked(*delivery.rendezvous, {ErrorCode::kOutOfMemory, "loopback: the receiver had no memory"});
      announced->reset(); // the listener may have kept the handle, which is now void
    }
  }

  void signal() const {
    const uint64_t one = 1;
    (void)!write(eventFd_, &one, sizeof(one));
  }

  std::shared_ptr<LoopbackNetwork::Rendezvous> takeHandle(void* handle) {
    handles_.erase(handle);
    const std::unique_ptr<std::shared_ptr<LoopbackNetwork::Rendezvous>> owner(
        static_cast<std::shared_ptr<LoopbackNetwork::Rendezvous>*>(handle));
    return *owner;
  }

  // The sender learns of it in its next progress(). Its bytes are not read afterwards.
  static void completeLocked(LoopbackNetwork::Rendezvous& rendezvous, Error error) {
    if (!std::exchange(rendezvous.isCompleted, true)) {
      rendezvous.sender->completed_.emplace_back(rendezvous.operation, std::move(error));
      rendezvous.sender->signal();
    }
  }

  // Ends the operations of an endpoint with `error`.
  void fail(EndpointId endpoint, const Error& error) {
    endpoints_[endpoint].failure = error;
    std::vector<Operation> ended;
    {
      const std::lock_guard lock(network_->mutex_);
      for (auto entry = operations_.begin(); entry != operations_.end();) {
        if (entry->second.endpoint == endpoint) {
          entry->second.rendezvous->isCompleted = true; // the receiver must not read bytes that are about to be freed
          ended.push_back(std::move(entry->second));
          entry = operations_.erase(entry);
        } else {
          ++entry;
        }
      }
    }
    for (Operation& operation : ended) {
      operation.done(error);
    }
    while (auto receive = stalled_.extract(endpoints_[endpoint].address)) {
      receive.mapped()(error);
    }
  }

  LoopbackNetwork* const network_;
  const std::string name_;
  const int eventFd_;
  TransportListener* listener_ = nullptr;
  bool isClosed_ = false;
  std::vector<Endpoint> endpoints_;
  uint64_t nextOperation_ = 0;
  std::unordered_map<uint64_t, Operation> operations_;
  std::deque<std::pair<EndpointId, std::string>> failing_; // failures to be reported, with the reasons
  std::unordered_set<void*> handles_;
  std::unordered_multimap<std::string, OperationDone> stalled_; // receives, by sender

  // Peers write these; the network's mutex guards them.
  std::deque<LoopbackNetwork::Delivery> arrived_;
  std::deque<std::pair<uint64_t, Error>> completed_;
  std::deque<std::pair<std::string, std::string>> dead_; // endpoints to this name fail, with this reason
};

std::unique_ptr<Transport> LoopbackNetwork::makeTransport(const std::string& name) {
  auto transport = std::make_unique<LoopbackTransport>(this, name);
  const std::lock_guard lock(mutex_);
  transports_[name] = transport.get();
  return transport;
}

void LoopbackNetwork::setFault(Fault fault) {
  const std::lock_guard lock(mutex_);
  fault_ = std::move(fault);
}

void LoopbackNetwork::deliverLocked(Delivery delivery) {
  const auto target = transports_.find(delivery.to);
  if (target != transports_.end() &&
      transports_.contains(delivery.from)) { // else the delivery is lost, as on a real network
    target->second->arrived_.push_back(std::move(delivery));
    target->second->signal();
  }
}

void LoopbackNetwork::releaseHeld() {
  const std::lock_guard lock(mutex_);
  while (!held_.empty()) {
    Delivery delivery = std::move(held_.back());
    held_.pop_back();
    deliverLocked(std::move(delivery));
  }
}

void LoopbackNetwork::reset(const std::string& from, const std::string& to) {
  const std::lock_guard lock(mutex_);
  if (const auto target = transports_.find(to); target != transports_.end()) {
    std::erase_if(target->second->arrived_, [&](const Delivery& delivery) { return delivery.from == from; });
  }
  if (const auto source = transports_.find(from); source != transports_.end()) {
    source->second->dead_.emplace_back(to, "has reset the connection");
    source->second->signal();
  }
}

void LoopbackNetwork::kill(const std::string& name) {
  const std::lock_guard lock(mutex_);
  transports_.erase(name);
  for (auto& [peer, transport] : transports_) {
    transport->dead_.emplace_back(name, "was killed");
    transport->signal();
  }
}

} // namespace torch_ucx_rpc
