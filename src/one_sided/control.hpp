#ifndef FERRY_ONE_SIDED_CONTROL_HPP
#define FERRY_ONE_SIDED_CONTROL_HPP

/// Control area of a rank's memory; fabric.hpp lists its writers and readers.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "ferry/one_sided.hpp"
#include "node/futex.hpp"

namespace ferry::one_sided {

/// Number of steps of a barrier of as many ranks as a group can have (32767).
inline constexpr std::size_t kMaxSteps = 15;

/// Each team has its own words; so does the joining of the network, before there are teams.
inline constexpr int kJoiningTeam = kMaxTeams;
inline constexpr auto kNumTeams = static_cast<std::size_t>(kMaxTeams) + 1;

/// A rank may be one meeting ahead of a mate that has not yet read all words of the previous one.
inline constexpr std::size_t kMeetingsAtOnce = 2;

/// Time for peers to hear, over any working network, that this rank leaves, even if they may not answer.
inline constexpr std::int64_t kLastWordsNs = 1'000'000'000;

/// Stands for any word of the memory.
inline constexpr std::size_t kAnyWord = ~std::size_t{0};

struct Control {
  alignas(node::kFlagAlignment) std::atomic<std::uint32_t> doorbell{0};
  alignas(node::kFlagAlignment) std::atomic<std::uint32_t> num_sleepers{0};
  std::atomic<std::size_t> watched{kAnyWord};
  alignas(node::kFlagAlignment) std::uint64_t finished = 0;
  std::array<std::array<std::array<std::uint64_t, kMaxSteps>, kMeetingsAtOnce>, kNumTeams> arrived{};
};

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_CONTROL_HPP
