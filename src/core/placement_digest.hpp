#ifndef FERRY_CORE_PLACEMENT_DIGEST_HPP
#define FERRY_CORE_PLACEMENT_DIGEST_HPP

/// Tells where two ranks' `expert_to_rank` differ, from what fits into a call's record. Up to kMaxListedExperts the
/// digest is the map itself; for more experts it is a hash for each of kNumDigestRanges equal ranges of them.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/agreement.hpp"

namespace ferry {

inline constexpr std::int64_t kMaxListedExperts = kCallMessageBytes / sizeof(std::int16_t);
inline constexpr std::int64_t kNumDigestRanges = kCallMessageBytes / sizeof(std::uint32_t);

/// Equal maps give equal numbers on every rank.
std::int64_t hash_placement(const std::vector<std::int32_t>& expert_to_rank);

/// The digest of a valid map, which has an entry for each of 1 to 2^31 experts.
void write_placement_digest(const std::vector<std::int32_t>& expert_to_rank, CallRecord& record);

/// For a message: "expert_to_rank[17]: rank 0 has 3, rank 2 has 5", or as much of that as the digests say. Any bytes
/// may be in the records.
std::string describe_placement_difference(const CallRecord& first, const CallRecord& other, std::size_t other_rank,
                                          std::int64_t num_experts);

}  // namespace ferry

#endif  // FERRY_CORE_PLACEMENT_DIGEST_HPP
