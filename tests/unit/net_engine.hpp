#ifndef FERRY_TESTS_UNIT_NET_ENGINE_HPP
#define FERRY_TESTS_UNIT_NET_ENGINE_HPP

/// Suite of every network engine, through the proxy's interface.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/net_ends.hpp"

namespace ferry::test {

class NetEngine : public testing::TestWithParam<const char*> {
 protected:
  // An engine that is built in must run: a skipped test proves nothing.
  void SetUp() override {
    const Status status = net_engine(GetParam()).probe();
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
};

inline void write_pattern(NetEnd* end, std::size_t offset, std::size_t count, std::uint64_t seed) {
  std::ranges::copy(net_pattern(count, seed), end->memory.begin() + static_cast<std::ptrdiff_t>(offset));
}

/// Compares the memory as it is at the call: to make the pattern takes so long that late bytes would arrive meanwhile.
inline bool has_pattern(const NetEnd& end, std::size_t offset, std::size_t count, std::uint64_t seed) {
  const std::span<std::byte> memory = end.memory.subspan(offset, count);
  const std::vector<std::byte> seen(memory.begin(), memory.end());
  return seen == net_pattern(count, seed);
}

}  // namespace ferry::test

#endif  // FERRY_TESTS_UNIT_NET_ENGINE_HPP
