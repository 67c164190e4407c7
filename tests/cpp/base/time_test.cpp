#include "base/time.h"

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>

namespace torch_ucx_rpc {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

TEST(TimeTest, SecondsAreRoundedToMilliseconds) {
  EXPECT_EQ(toMilliseconds(0), milliseconds(0));
  EXPECT_EQ(toMilliseconds(-0.0), milliseconds(0));
  EXPECT_EQ(toMilliseconds(1.5), milliseconds(1500));
  EXPECT_EQ(toMilliseconds(0.0016), milliseconds(2));
  EXPECT_EQ(toMilliseconds(60.0f), milliseconds(60'000));
}

TEST(TimeTest, APositiveTimeNeverBecomesZero) {
  EXPECT_EQ(toMilliseconds(0.0004), milliseconds(1)) << "zero would mean: no limit";
  EXPECT_EQ(toMilliseconds(std::numeric_limits<double>::denorm_min()), milliseconds(1));
}

TEST(TimeTest, DeadlinesOfHugeTimesAreInTheFarFuture) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double seconds : {9.3e9, 1e18, static_cast<double>(std::numeric_limits<float>::max()), infinity}) {
    const auto now = steady_clock::now();
    EXPECT_GT(now + toMilliseconds(seconds), now + std::chrono::hours(24 * 365)) << seconds;
  }
}

TEST(TimeTest, NegativeTimesAndNanAreRefused) {
  for (const double seconds : {-0.001, -1.0, -std::numeric_limits<double>::infinity(), std::nan("")}) {
    EXPECT_THROW((void)toMilliseconds(seconds), std::invalid_argument) << seconds;
  }
}

} // namespace
} // namespace torch_ucx_rpc
