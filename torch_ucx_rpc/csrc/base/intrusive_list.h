#pragma once

namespace torch_ucx_rpc {

// A list of items that are linked through their members `before` and `after`. It allocates no memory, so UCX's
// callbacks may change it. An item is in one list at most.
template <class T>
class IntrusiveList {
 public:
  bool isEmpty() const {
    return first_ == nullptr;
  }
  // The oldest item and the newest one, or null.
  T* first() const {
    return first_;
  }
  T* last() const {
    return last_;
  }
  void push(T* item) noexcept {
    item->before = last_;
    item->after = nullptr;
    (last_ != nullptr ? last_->after : first_) = item;
    last_ = item;
  }
  void remove(T* item) noexcept {
    (item->before != nullptr ? item->before->after : first_) = item->after;
    (item->after != nullptr ? item->after->before : last_) = item->before;
  }
  // Takes the oldest item out, and returns it, or null.
  T* pop() noexcept {
    T* const item = first_;
    if (item != nullptr) {
      remove(item);
    }
    return item;
  }

 private:
  T* first_ = nullptr;
  T* last_ = nullptr;
};

} // namespace torch_ucx_rpc
