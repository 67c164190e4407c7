#pragma once

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

namespace torch_ucx_rpc {

// A callable that is moved, never copied, so that it can own what it needs (std::move_only_function is C++23).
// Callables of up to kInlineBytes live inside it: queueing a small message allocates nothing. Calling an empty
// UniqueFunction is an error: test it first. Not thread-safe.
template <typename Signature>
class UniqueFunction;

template <typename Result, typename... Args>
class UniqueFunction<Result(Args...)> {
 public:
  // Room for a `this` pointer, an owning pointer and a few words of arguments.
  static constexpr size_t kInlineBytes = 48;

  UniqueFunction() = default;

  template <
      typename Callable,
      typename = std::enable_if_t<
          !std::is_same_v<std::decay_t<Callable>, UniqueFunction> &&
          std::is_invocable_r_v<Result, std::decay_t<Callable>&, Args...>>>
  UniqueFunction(Callable&& callable) { // NOLINT(google-explicit-constructor): a lambda is passed as it is
    using Stored = std::decay_t<Callable>;
    if constexpr (fitsInline<Stored>()) {
      ::new (storage()) Stored(std::forward<Callable>(callable));
    } else {
      ::new (storage()) Stored*(new Stored(std::forward<Callable>(callable)));
    }
    operations_ = &operationsFor<Stored>;
  }

  UniqueFunction(UniqueFunction&& other) noexcept {
    takeFrom(other);
  }
  UniqueFunction& operator=(UniqueFunction&& other) noexcept {
    if (this != &other) {
      reset();
      takeFrom(other);
    }
    return *this;
  }
  UniqueFunction(const UniqueFunction&) = delete;
  UniqueFunction& operator=(const UniqueFunction&) = delete;
  ~UniqueFunction() {
    reset();
  }

  explicit operator bool() const {
    return operations_ != nullptr;
  }

  Result operator()(Args... args) {
    return operations_->call(storage(), std::forward<Args>(args)...);
  }

 private:
  struct Operations {
    Result (*call)(void*, Args&&...);
    void (*move)(void* from, void* to) noexcept;
    void (*destroy)(void*) noexcept;
  };

  // A callable whose move may throw lives on the heap, so that moving this object never throws.
  template <typename Stored>
  static constexpr bool fitsInline() {
    return sizeof(Stored) <= kInlineBytes && alignof(Stored) <= alignof(std::max_align_t) &&
        std::is_nothrow_move_constructible_v<Stored>;
  }

  template <typename Stored>
  static Stored& get(void* storage) {
    if constexpr (fitsInline<Stored>()) {
      return *std::launder(static_cast<Stored*>(storage));
    } else {
      return **std::launder(static_cast<Stored**>(storage));
    }
  }

  template <typename Stored>
  static constexpr Operations operationsFor = {
      [](void* storage, Args&&... args) -> Result { return get<Stored>(storage)(std::forward<Args>(args)...); },
      [](void* from, void* to) noexcept {
        if constexpr (fitsInline<Stored>()) {
          ::new (to) Stored(std::move(get<Stored>(from)));
          get<Stored>(from).~Stored();
        } else {
          ::new (to) Stored*(&get<Stored>(from));
        }
      },
      [](void* storage) noexcept {
        if constexpr (fitsInline<Stored>()) {
          get<Stored>(storage).~Stored();
        } else {
          delete &get<Stored>(storage);
        }
      },
  };

  void* storage() {
    return static_cast<void*>(storage_);
  }

  void takeFrom(UniqueFunction& other) {
    operations_ = std::exchange(other.operations_, nullptr);
    if (operations_ != nullptr) {
      operations_->move(other.storage(), storage());
    }
  }

  void reset() {
    if (const Operations* operations = std::exchange(operations_, nullptr)) {
      operations->destroy(storage());
    }
  }

  const Operations* operations_ = nullptr;
  alignas(std::max_align_t) std::byte storage_[kInlineBytes];
};

} // namespace torch_ucx_rpc
