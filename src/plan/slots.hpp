#ifndef FERRY_PLAN_SLOTS_HPP
#define FERRY_PLAN_SLOTS_HPP

/// Slot arithmetic: the owner of an expert, and the layout of the groups of experts in a receiver's rows.
///
/// A source publishes two count vectors at route: `rank_counts[R]`, its tokens that go to each rank, and
/// `expert_counts[E]`, its distinct (token, expert) pairs. The row of a token is the first row of its (source,
/// destination) or (source, expert) run plus the token's position in that run. Hosts compute the prefix sums that give
/// the first rows in route_plan.hpp; a GPU computes them in parallel (cuda/intranode/exchange.cu and place.cu). The
/// conformance tests hold both to the same oracle.

#include <cstdint>

#include "plan/host_device.hpp"

namespace ferry::plan {

FERRY_HOST_DEVICE constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Owner of `expert` in the default (contiguous, balanced) placement, where rank r owns experts from r*E/R to
/// (r+1)*E/R, both rounded down. r*E/R <= e  <=>  r*E < (e+1)*R, so r is the largest integer below (e+1)*R/E.
FERRY_HOST_DEVICE constexpr std::int64_t default_owner(std::int64_t expert, std::int64_t num_experts,
                                                       std::int64_t num_ranks) {
  return ((expert + 1) * num_ranks - 1) / num_experts;
}

/// First row of a local expert's group in a slab of `capacity` rows per expert.
FERRY_HOST_DEVICE constexpr std::int64_t slab_first_row(std::int64_t local_expert, std::int64_t capacity) {
  return local_expert * capacity;
}

/// Limit on the rows of a rank: its `max_recv_rows`, or, if that is 0, the largest count of the i32 tables. Rows are
/// summed in 64 bits until the route has been checked against it.
FERRY_HOST_DEVICE constexpr std::int64_t row_limit(std::int64_t max_recv_rows) {
  return max_recv_rows > 0 ? max_recv_rows : INT32_MAX;
}

/// Rows taken by a group of `num_rows` if the next group must start at a multiple of `alignment`.
FERRY_HOST_DEVICE constexpr std::int64_t aligned_group_rows(std::int64_t num_rows, std::int64_t alignment) {
  return round_up(num_rows, alignment);
}

/// Tokens per channel; only the last channels of a rank may have fewer.
FERRY_HOST_DEVICE constexpr std::int64_t tokens_per_channel(std::int64_t num_tokens, std::int64_t num_channels) {
  return (num_tokens + num_channels - 1) / num_channels;
}

static_assert(default_owner(22, 60, 8) == 3 && default_owner(21, 60, 8) == 2, "3 * 60 / 8 is 22");
static_assert(default_owner(0, 1, 8) == 7,
              "one expert on eight ranks belongs to the last: the others' ranges are empty");

}  // namespace ferry::plan

#endif  // FERRY_PLAN_SLOTS_HPP
