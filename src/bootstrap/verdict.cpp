#include "bootstrap/verdict.hpp"

#include <fmt/format.h>

namespace ferry::bootstrap {
namespace {

// A list of thousands of ranks helps nobody; the first few show the pattern (one host, one rail, all).
constexpr std::size_t kMaxRanksListed = 8;

}  // namespace

Status check_all_gather_arguments(int rank, std::size_t message_bytes, std::int64_t timeout_ns) {
  if (message_bytes > kMaxBootstrapMessageBytes) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("all_gather: rank {} gave {} bytes, at most {} are allowed; send less, or in several calls", rank,
                    message_bytes, kMaxBootstrapMessageBytes),
        rank);
  }
  if (timeout_ns <= 0) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("all_gather: rank {} gave timeout_ns={}, expected more than 0", rank, timeout_ns), rank);
  }
  return {};
}

std::string format_seconds(std::int64_t duration_ns) {
  return fmt::format("{:.4g} s", static_cast<double>(duration_ns) / static_cast<double>(kNsPerSecond));
}

Status missing_ranks(std::string_view what, const std::vector<bool>& arrived, std::int64_t timeout_ns) {
  std::string list;
  int lowest = -1;
  std::size_t num_missing = 0;
  for (std::size_t rank = 0; rank < arrived.size(); ++rank) {
    if (arrived[rank]) continue;
    if (lowest < 0) lowest = static_cast<int>(rank);
    if (num_missing > 0 && num_missing < kMaxRanksListed) list += fmt::format(", {}", rank);
    ++num_missing;
  }
  std::string others;
  if (num_missing > 1) {
    others = fmt::format(" (nor have {} others: {}{})", num_missing - 1, list.substr(2),
                         num_missing > kMaxRanksListed ? ", …" : "");
  }
  return Status(
      ErrorCode::kTimeout,
      fmt::format("{}: rank {} has not arrived{} within {}; {} of {} ranks have. Is it running? Look at its "
                  "output, or allow more time",
                  what, lowest, others, format_seconds(timeout_ns), arrived.size() - num_missing, arrived.size()),
      lowest);
}

Status rank_lost(std::string_view what, int rank) {
  return Status(ErrorCode::kPeerLost,
                fmt::format("{}: rank {} left or died before all ranks were done; look at its output", what, rank),
                rank);
}

}  // namespace ferry::bootstrap
