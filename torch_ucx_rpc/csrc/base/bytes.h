#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <utility>

namespace torch_ucx_rpc {

// A growable byte buffer that owns its memory. Unlike std::vector it does not zero memory that its owner is about to
// overwrite. So a body of a quarter of a MiB is written only once. A moved-from buffer is empty. Not thread-safe.
class Bytes {
 public:
  Bytes() = default;
  explicit Bytes(size_t size) {
    resizeUninitialized(size);
  }
  explicit Bytes(std::span<const std::byte> from) {
    append(from.data(), from.size());
  }
  Bytes(Bytes&& other) noexcept
      : data_(std::move(other.data_)),
        size_(std::exchange(other.size_, 0)),
        capacity_(std::exchange(other.capacity_, 0)) {}
  Bytes& operator=(Bytes&& other) noexcept {
    data_ = std::move(other.data_);
    size_ = std::exchange(other.size_, 0);
    capacity_ = std::exchange(other.capacity_, 0);
    return *this;
  }

  std::byte* data() {
    return data_.get();
  }
  const std::byte* data() const {
    return data_.get();
  }
  size_t size() const {
    return size_;
  }
  operator std::span<const std::byte>() const { // NOLINT(google-explicit-constructor): it is a run of bytes
    return {data(), size_};
  }

  // Makes room for `capacity` bytes. Throws std::bad_alloc, as do the methods that call it.
  void reserve(size_t capacity) {
    if (capacity <= capacity_) {
      return;
    }
    void* grown = std::realloc(data_.get(), capacity);
    if (grown == nullptr) {
      throw std::bad_alloc();
    }
    (void)data_.release(); // NOLINT(bugprone-unused-return-value): realloc owns and has freed or kept the old block
    data_.reset(static_cast<std::byte*>(grown));
    capacity_ = capacity;
  }

  // Sets the size. New bytes at the end are uninitialized.
  void resizeUninitialized(size_t size) {
    if (size > capacity_) {
      reserve(std::max(size, 2 * capacity_));
    }
    size_ = size;
  }

  void append(const void* from, size_t size) {
    const size_t at = size_;
    resizeUninitialized(at + size);
    if (size != 0) {
      std::memcpy(data_.get() + at, from, size);
    }
  }

 private:
  struct Free {
    void operator()(std::byte* data) const {
      std::free(data);
    }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

} // namespace torch_ucx_rpc
