#ifndef FERRY_CORE_PLACEMENT_DIGEST_HPP
#define FERRY_CORE_PLACEMENT_DIGEST_HPP

/// Digest that fits into a call's record and shows where two ranks' `expert_to_rank` differ. Up to kMaxListedExperts
/// the digest is the map itself; for more experts it is a hash for each of kNumDigestRanges equal ranges of them. For a
/// `Placement`, which has two maps, a header gives the form of its digest.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ferry {

/// Longest digest; fits into the message of a CallRecord.
inline constexpr std::size_t kPlacementDigestBytes = 640;
inline constexpr std::int64_t kMaxListedExperts = kPlacementDigestBytes / sizeof(std::int16_t);
inline constexpr std::int64_t kNumDigestRanges = kPlacementDigestBytes / sizeof(std::uint32_t);

/// Equal maps give equal numbers on every rank.
std::int64_t hash_placement(const std::vector<std::int32_t>& expert_to_rank);

/// Writes the digest of a valid map, which has an entry for each of 1 to 2^31 experts; returns its length.
std::size_t write_placement_digest(const std::vector<std::int32_t>& expert_to_rank,
                                   std::span<char, kPlacementDigestBytes> digest);

/// Text for a message: "expert_to_rank[17]: rank 0 has 3, rank 2 has 5", or as much of it as the digests of rank 0 and
/// of another rank show. The digests may be any bytes.
std::string describe_placement_difference(std::span<const char> first, std::span<const char> other,
                                          std::size_t other_rank, std::int64_t num_experts);

/// Maps of a `Placement`.
struct HomeMaps {
  std::span<const std::int32_t> physical_to_logical{};  ///< [P]; empty: it is compared elsewhere
  std::span<const std::int32_t> physical_to_rank{};     ///< [P]
  int num_ranks = 1;
};
std::int64_t hash_homes(const HomeMaps& maps);
std::size_t write_homes_digest(const HomeMaps& maps, std::span<char, kPlacementDigestBytes> digest);
/// Like describe_placement_difference: "physical_to_logical[17]: rank 0 has 3, rank 2 has 5".
std::string describe_homes_difference(std::span<const char> first, std::span<const char> other, std::size_t other_rank,
                                      std::int64_t num_physical);

}  // namespace ferry

#endif  // FERRY_CORE_PLACEMENT_DIGEST_HPP
