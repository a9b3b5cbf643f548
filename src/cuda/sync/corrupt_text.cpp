#include "cuda/sync/corrupt_text.hpp"

#include <fmt/format.h>

#include "core/corrupt_rows.hpp"

namespace ferry::cuda {

Status describe_corrupt(const CorruptReport& report, int rank) {
  const bool dispatch = report.call == static_cast<std::int32_t>(CheckedCall::kDispatch);
  const std::string row =
      dispatch ? fmt::format("row {} (token {} of rank {})", report.row, report.token, report.sender)
               : fmt::format("row {} of rank {} (token {} of rank {})", report.row, report.sender, report.token, rank);
  return Status(
      ErrorCode::kDataCorrupt,
      fmt::format("{} (exchange {} on the GPU): {} is not as it was sent; hop rank {} -> rank {}; {} rows that "
                  "rank {} checked are wrong, and this is the first; {}",
                  dispatch ? "dispatch" : "combine", report.epoch, row, report.sender, rank, report.num_wrong, rank,
                  kCorruptAdvice),
      report.sender);
}

}  // namespace ferry::cuda
