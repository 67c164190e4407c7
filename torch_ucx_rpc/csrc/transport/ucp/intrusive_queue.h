#pragma once

namespace torch_ucx_rpc {

// A queue of items that are linked through their member `Next`. It needs no memory, so UCX's callbacks may push. An
// item is in one queue at most.
template <class T, T* T::* Next>
class IntrusiveQueue {
 public:
  bool isEmpty() const {
    return first_ == nullptr;
  }
  // The oldest item. Null if there is none.
  T* first() const {
    return first_;
  }
  void push(T* item) noexcept {
    item->*Next = nullptr;
    (first_ != nullptr ? last_->*Next : first_) = item;
    last_ = item;
  }
  // Takes the oldest item out. Null if there is none.
  T* pop() noexcept {
    T* const item = first_;
    if (item != nullptr) {
      first_ = item->*Next;
    }
    return item;
  }

 private:
  T* first_ = nullptr;
  T* last_ = nullptr; // valid unless the queue is empty
};

} // namespace torch_ucx_rpc
