#ifndef FERRY_ONE_SIDED_NEAR_RANKS_HPP
#define FERRY_ONE_SIDED_NEAR_RANKS_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "ferry/device/world.hpp"

namespace ferry::one_sided {

/// Sets the near ranks and their addresses. `peer_heaps`: heaps of this node's ranks, by index in the node; `world`
/// already has the first of these ranks, its own heap and gpu_words.
inline void set_near_ranks(device::World& world, std::span<std::byte* const> peer_heaps) {
  world.num_near = static_cast<int>(std::min<std::size_t>(peer_heaps.size(), device::kNumNearRanks));
  world.num_near_words = world.gpu_words ? world.num_near : 0;
  for (int i = 0; i < world.num_near; ++i) {
    const auto place = static_cast<std::size_t>(world.first_in_node + i) % device::kNumNearRanks;
    // Subtract as integers: they are separate allocations.
    world.near_shifts[place] =
        static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(peer_heaps[static_cast<std::size_t>(i)]) -
                                  reinterpret_cast<std::uintptr_t>(world.heap));
  }
}

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_NEAR_RANKS_HPP
