#include "base/unique_function.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>

namespace torch_ucx_rpc {
namespace {

// Counts its living copies.
template <size_t kBytes, bool kNoexceptMove = true>
class Counted {
 public:
  explicit Counted(int& alive) : alive_(&alive) {
    ++*alive_;
  }
  Counted(Counted&& other) noexcept(kNoexceptMove) : alive_(other.alive_), calls_(other.calls_) {
    ++*alive_;
  }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  Counted& operator=(Counted&&) = delete;
  ~Counted() {
    --*alive_;
  }
  int operator()() {
    return ++calls_;
  }

 private:
  int* alive_;
  int calls_ = 0;
  std::array<char, kBytes> room_{};
};

template <typename Callable>
class UniqueFunctionStorageTest : public testing::Test {};

using Callables = testing::Types<Counted<1>, Counted<200>, Counted<1, false>>; // inline, large, throwing move
TYPED_TEST_SUITE(UniqueFunctionStorageTest, Callables);

TYPED_TEST(UniqueFunctionStorageTest, OwnsItsCallableExactlyOnce) {
  int alive = 0;
  {
    UniqueFunction<int()> first = TypeParam(alive);
    EXPECT_EQ(alive, 1);
    EXPECT_EQ(first(), 1);
    UniqueFunction<int()> second = std::move(first);
    EXPECT_EQ(alive, 1);
    EXPECT_FALSE(first); // NOLINT(bugprone-use-after-move)
    EXPECT_EQ(second(), 2); // the callable itself was moved, with its state
    first = std::move(second);
    EXPECT_EQ(first(), 3);
    EXPECT_EQ(alive, 1);
  }
  EXPECT_EQ(alive, 0);
}

TYPED_TEST(UniqueFunctionStorageTest, AssignmentDestroysWhatWasThere) {
  int replaced = 0;
  int kept = 0;
  UniqueFunction<int()> function = TypeParam(replaced);
  function = TypeParam(kept);
  EXPECT_EQ(replaced, 0);
  EXPECT_EQ(kept, 1);
  function = {};
  EXPECT_EQ(kept, 0);
  EXPECT_FALSE(function);
}

TYPED_TEST(UniqueFunctionStorageTest, SurvivesAssignmentToItself) {
  int alive = 0;
  UniqueFunction<int()> function = TypeParam(alive);
  UniqueFunction<int()>& same = function;
  function = std::move(same);
  EXPECT_EQ(alive, 1);
  EXPECT_EQ(function(), 1);
}

TEST(UniqueFunctionTest, IsEmptyAtFirst) {
  EXPECT_FALSE(UniqueFunction<void()>());
}

TEST(UniqueFunctionTest, PassesArgumentsAndResultsThroughUncopied) {
  UniqueFunction<std::unique_ptr<int>(std::unique_ptr<int>, int&)> function = [](std::unique_ptr<int> owned,
                                                                                 int& referred) {
    referred = *owned;
    *owned += 1;
    return owned;
  };
  int referred = 0;
  const std::unique_ptr<int> result = function(std::make_unique<int>(41), referred);
  EXPECT_EQ(referred, 41);
  EXPECT_EQ(*result, 42);
}

TEST(UniqueFunctionTest, TakesACallableThatCannotBeCopied) {
  UniqueFunction<int()> function = [owned = std::make_unique<int>(7)] { return *owned; };
  EXPECT_EQ(function(), 7);
}

TEST(UniqueFunctionTest, LetsExceptionsThrough) {
  UniqueFunction<void()> function = [] { throw std::runtime_error("no"); };
  EXPECT_THROW(function(), std::runtime_error);
}

TEST(UniqueFunctionTest, AlignsItsCallable) {
  struct alignas(64) Aligned {
    char byte = 0;
    bool operator()() const {
      return reinterpret_cast<uintptr_t>(this) % 64 == 0;
    }
  };
  UniqueFunction<bool()> function = Aligned{};
  UniqueFunction<bool()> moved = std::move(function);
  EXPECT_TRUE(moved());
}

} // namespace
} // namespace torch_ucx_rpc
