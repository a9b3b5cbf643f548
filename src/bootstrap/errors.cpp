#include "bootstrap/errors.hpp"

#include <fmt/format.h>

namespace ferry::bootstrap {
namespace {

// The first few ranks show the pattern (one host, one switch, all of them); thousands would bury the message.
constexpr std::size_t kMaxRanksListed = 8;

}  // namespace

Status check_all_gather_arguments(int rank, std::size_t message_bytes, std::int64_t timeout_ns) {
  if (message_bytes > kMaxBootstrapMessageBytes) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("all_gather: the message of rank {} has {} bytes, the limit is {}; send less, or split "
                              "it over several calls",
                              rank, message_bytes, kMaxBootstrapMessageBytes),
                  rank);
  }
  if (timeout_ns <= 0) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("all_gather: rank {} passed timeout_ns={}, expected more than 0", rank, timeout_ns),
                  rank);
  }
  return {};
}

std::string format_seconds(std::int64_t duration_ns) {
  return fmt::format("{:.4g} s", static_cast<double>(duration_ns) / static_cast<double>(kNsPerSecond));
}

Status missing_ranks(std::string_view what, const std::vector<bool>& arrived, std::int64_t timeout_ns) {
  std::string others;
  int lowest = -1;
  std::size_t num_missing = 0;
  for (std::size_t rank = 0; rank < arrived.size(); ++rank) {
    if (arrived[rank]) continue;
    if (lowest < 0) lowest = static_cast<int>(rank);
    if (num_missing > 0 && num_missing < kMaxRanksListed) {
      others += fmt::format("{}{}", others.empty() ? "" : ", ", rank);
    }
    ++num_missing;
  }
  if (num_missing > 1) {
    others = fmt::format(" and {} more: {}{}", num_missing - 1, others, num_missing > kMaxRanksListed ? ", …" : "");
  }
  return Status(
      ErrorCode::kTimeout,
      fmt::format("{}: timed out after {} waiting for rank {}{}; {} of {} ranks have arrived. Check that it is running "
                  "and look at its output, or increase the timeout",
                  what, format_seconds(timeout_ns), lowest, others, arrived.size() - num_missing, arrived.size()),
      lowest);
}

Status rank_lost(std::string_view what, int rank) {
  return Status(ErrorCode::kPeerLost,
                fmt::format("{}: rank {} exited or closed its bootstrap before all ranks were done; look at its output",
                            what, rank),
                rank);
}

Status out_of_memory(std::string_view what, int rank) {
  return Status(ErrorCode::kSystem, fmt::format("{}: rank {} ran out of memory", what, rank), rank);
}

Status named(Status status, int rank) {
  if (status.ok() || status.peer() >= 0) return status;
  return Status(status.code(), fmt::format("rank {}: {}", rank, status.message()), rank);
}

}  // namespace ferry::bootstrap
