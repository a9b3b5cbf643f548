#ifndef FERRY_BOOTSTRAP_ERRORS_HPP
#define FERRY_BOOTSTRAP_ERRORS_HPP

/// Errors that the in-process and the TCP bootstrap report in the same words.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

/// @errors kInvalidArgument: the message is too long, or the timeout is not positive
Status check_all_gather_arguments(int rank, std::size_t message_bytes, std::int64_t timeout_ns);

/// "2.5 s".
std::string format_seconds(std::int64_t duration_ns);

/// kTimeout after `timeout_ns`: lists the ranks that are false in `arrived` (at least one) and blames the lowest.
Status missing_ranks(std::string_view what, const std::vector<bool>& arrived, std::int64_t timeout_ns);

/// kPeerLost.
Status rank_lost(std::string_view what, int rank);

/// kSystem.
Status out_of_memory(std::string_view what, int rank);

/// `status` of this rank, with its name if it names no rank.
Status named(Status status, int rank);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_ERRORS_HPP
