#include "core/expert_placement.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/placement_digest.hpp"
#include "plan/slots.hpp"

namespace ferry {

void ExpertPlacement::describe(CallRecord& record) const {
  std::copy(digest.begin(), digest.end(), record.message.begin());
  record.message_bytes = static_cast<std::int32_t>(digest.size());
}

Status ExpertPlacements::check(std::string_view operation, std::int64_t num_experts,
                               const std::vector<std::int32_t>& expert_to_rank) const {
  if (expert_to_rank.size() != static_cast<std::size_t>(num_experts)) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: expert_to_rank has {} entries, expected one for each of {} experts", operation,
                              expert_to_rank.size(), num_experts));
  }
  for (std::size_t expert = 0; expert < expert_to_rank.size(); ++expert) {
    const std::int32_t owner = expert_to_rank[expert];
    if (owner >= 0 && owner < num_ranks_) continue;
    return Status(ErrorCode::kInvalidArgument, fmt::format("{}: expert_to_rank[{}] is {}, expected a rank from 0 to {}",
                                                           operation, expert, owner, num_ranks_ - 1));
  }
  return {};
}

Result<std::shared_ptr<const ExpertPlacement>> ExpertPlacements::find(std::string_view operation,
                                                                      std::int64_t num_experts,
                                                                      const std::vector<std::int32_t>& expert_to_rank) {
  const bool is_default = expert_to_rank.empty();
  if (latest_ != nullptr && is_default == latest_is_default_) {
    const auto latest_experts = static_cast<std::int64_t>(latest_->expert_to_rank.size());
    // A wrong map is never equal to one that was right.
    if (latest_experts == num_experts && (is_default || latest_->expert_to_rank == expert_to_rank)) return latest_;
  }
  auto placement = std::make_shared<ExpertPlacement>();
  if (is_default) {
    placement->expert_to_rank.resize(static_cast<std::size_t>(num_experts));
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      placement->expert_to_rank[static_cast<std::size_t>(expert)] =
          static_cast<std::int32_t>(plan::default_owner(expert, num_experts, num_ranks_));
    }
  } else {
    if (Status status = check(operation, num_experts, expert_to_rank); !status.ok()) return status;
    placement->expert_to_rank = expert_to_rank;
  }
  placement->num_local_experts = std::count(placement->expert_to_rank.begin(), placement->expert_to_rank.end(), rank_);
  placement->hash = hash_placement(placement->expert_to_rank);
  placement->digest.resize(kPlacementDigestBytes);
  placement->digest.resize(
      write_placement_digest(placement->expert_to_rank, std::span(placement->digest).first<kPlacementDigestBytes>()));
  latest_ = placement;
  latest_is_default_ = is_default;
  return latest_;
}

}  // namespace ferry
