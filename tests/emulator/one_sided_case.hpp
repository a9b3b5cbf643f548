#ifndef FERRY_TESTS_EMULATOR_ONE_SIDED_CASE_HPP
#define FERRY_TESTS_EMULATOR_ONE_SIDED_CASE_HPP

/// Parts shared by tests of one-sided calls: shapes of groups, places in a heap, bytes to send.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "emulator/one_sided_ranks.hpp"

namespace ferry::emulator {

inline constexpr int kSignal = 0;  // words of a heap
inline constexpr int kCounter = 1;
inline constexpr std::size_t kRowOffset = 256;

/// Byte `i` that rank `rank` sends in round `round`.
inline std::byte pattern(int rank, int round, std::size_t i) {
  return static_cast<std::byte>((static_cast<std::size_t>(rank) * 31 + static_cast<std::size_t>(round) * 7 + i) % 251);
}

struct Nodes {
  int num_ranks;
  int ranks_per_node;
};

/// Base of the suites: each test runs on one node, on two nodes of one rank, and on two nodes of two.
class OnNodes : public testing::TestWithParam<Nodes> {
 protected:
  static OneSidedRanks::Options options(std::uint64_t seed) {
    OneSidedRanks::Options options;
    options.num_ranks = GetParam().num_ranks;
    options.ranks_per_node = GetParam().ranks_per_node;
    options.seed = seed;
    return options;
  }
  static bool over_network() { return GetParam().num_ranks > GetParam().ranks_per_node; }
};

inline auto all_shapes() { return testing::Values(Nodes{2, 2}, Nodes{2, 1}, Nodes{4, 2}); }
inline std::string shape_name(const testing::TestParamInfo<Nodes>& shape) {
  return std::to_string(shape.param.num_ranks) + "RanksOf" + std::to_string(shape.param.ranks_per_node);
}

}  // namespace ferry::emulator

#endif  // FERRY_TESTS_EMULATOR_ONE_SIDED_CASE_HPP
