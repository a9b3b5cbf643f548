#include "core/present_ranks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "core/create_together.hpp"

namespace ferry {

bool is_present(const GroupOptions& options, int rank) {
  return options.present_ranks.empty() || std::ranges::binary_search(options.present_ranks, rank);
}

bool has_absent_ranks(const GroupOptions& options) {
  return !options.present_ranks.empty() && std::ssize(options.present_ranks) < options.num_ranks;
}

Status check_present_ranks(const GroupOptions& options, const Bootstrap& bootstrap) {
  const std::vector<int>& present = options.present_ranks;
  const auto refuse = [](std::string message) {
    return Status(ErrorCode::kInvalidArgument, "Group::create: " + std::move(message));
  };
  if (present.empty()) {
    if (options.num_ranks == 0 || options.num_ranks == bootstrap.num_ranks()) return {};
    return refuse(
        fmt::format("GroupOptions::num_ranks is {} and the bootstrap has {} ranks; set present_ranks if some "
                    "have no process yet, or leave num_ranks 0",
                    options.num_ranks, bootstrap.num_ranks()));
  }
  const bool is_ascending = std::ranges::adjacent_find(present, std::greater_equal<>()) == present.end();
  if (std::ssize(present) != bootstrap.num_ranks() || !is_ascending || present.front() < 0 ||
      present.back() >= options.num_ranks) {
    return refuse(
        fmt::format("GroupOptions::present_ranks is [{}], expected the {} ranks of the bootstrap, ascending "
                    "and below num_ranks, which is {}",
                    fmt::join(present, ", "), bootstrap.num_ranks(), options.num_ranks));
  }
  return {};
}

PresentRanks::PresentRanks(Bootstrap& members, const GroupOptions& options)
    : members_(members),
      present_(options.present_ranks),
      num_ranks_(present_.empty() ? members.num_ranks() : options.num_ranks) {}

Result<std::vector<std::vector<std::byte>>> PresentRanks::all_gather(std::span<const std::byte> mine,
                                                                     std::int64_t timeout_ns) {
  Result<std::vector<std::vector<std::byte>>> gathered = members_.all_gather(mine, timeout_ns);
  if (present_.empty()) return gathered;
  if (!gathered.ok()) {
    const Status& failed = gathered.status();
    const bool is_member = failed.peer() >= 0 && failed.peer() < members_.num_ranks();
    return Status(failed.code(),
                  fmt::format("{} (these numbers count the ranks that are present: {})", failed.message(),
                              fmt::join(present_, ", ")),
                  is_member ? rank_of(failed.peer()) : failed.peer());
  }
  if (gathered->size() != present_.size()) return gathered;  // gather_or_fail reports it
  std::vector<std::vector<std::byte>> all(static_cast<std::size_t>(num_ranks_), empty_message());
  for (std::size_t member = 0; member < present_.size(); ++member) {
    all[static_cast<std::size_t>(present_[member])] = std::move((*gathered)[member]);
  }
  return all;
}

}  // namespace ferry
