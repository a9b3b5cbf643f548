#ifndef FERRY_PLAN_DESTINATION_HPP
#define FERRY_PLAN_DESTINATION_HPP

#include <cstdint>

namespace ferry::plan {

/// Where one entry of a token goes: entry `topk` takes row `row` on rank `rank`. A token's destinations are sorted by
/// (rank, row, topk). In a Routing `rank` counts in the group, in a ForwardTable inside the node.
struct Destination {
  std::int32_t row = 0;
  std::int16_t rank = 0;
  std::uint8_t topk = 0;
  std::uint8_t first = 0;  ///< 0: the token's destination before this one is the same row
};
static_assert(sizeof(Destination) == 8, "part of the wire format of forward tables");

}  // namespace ferry::plan

#endif  // FERRY_PLAN_DESTINATION_HPP
