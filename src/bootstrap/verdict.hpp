#ifndef FERRY_BOOTSTRAP_VERDICT_HPP
#define FERRY_BOOTSTRAP_VERDICT_HPP

/// How long the ends wait for each other's last word, and the texts that more than one kind of bootstrap says.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

/// Past its deadline a rank waits this long at most for rank 0 to say who was late: rank 0's word names the right rank
/// and is the same everywhere. Several round trips on a loaded machine, and never so much that a call takes more than
/// twice its timeout.
inline constexpr std::int64_t kMaxGraceNs = 2 * kNsPerSecond;
constexpr std::int64_t grace_ns(std::int64_t timeout_ns) {
  return timeout_ns / 2 < kMaxGraceNs ? timeout_ns / 2 : kMaxGraceNs;
}

/// Ok, or the kInvalidArgument that says which of the two is out of range.
Status check_all_gather_arguments(int rank, std::size_t message_bytes, std::int64_t timeout_ns);

/// "2.5 s".
std::string format_seconds(std::int64_t duration_ns);

/// kTimeout of a wait of `timeout_ns` for the ranks that are false in `arrived`; at least one is.
Status missing_ranks(std::string_view what, const std::vector<bool>& arrived, std::int64_t timeout_ns);

/// kPeerLost.
Status rank_lost(std::string_view what, int rank);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_VERDICT_HPP
