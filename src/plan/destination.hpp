#ifndef FERRY_PLAN_DESTINATION_HPP
#define FERRY_PLAN_DESTINATION_HPP

#include <cstdint>

namespace ferry::plan {

/// Destination of one entry of a token: entry `topk` goes to row `row` on rank `rank`. A token's destinations are
/// sorted by (rank, row, topk). `rank` is numbered in the group in a Routing, and inside the node in a ForwardTable.
struct Destination {
  std::int32_t row = 0;
  std::int16_t rank = 0;
  std::uint8_t topk = 0;
  std::uint8_t first = 0;  ///< 0: the token's previous destination is the same row
};
static_assert(sizeof(Destination) == 8, "part of the wire format of forward tables");

}  // namespace ferry::plan

#endif  // FERRY_PLAN_DESTINATION_HPP
