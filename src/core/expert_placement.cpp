#include "core/expert_placement.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/placement_digest.hpp"
#include "plan/slots.hpp"
#include "plan/to_size.hpp"

namespace ferry {
namespace {

std::vector<std::int32_t> default_owners(std::int64_t num_experts, int num_ranks) {
  std::vector<std::int32_t> owners(to_size(num_experts));
  for (std::int64_t expert = 0; expert < num_experts; ++expert) {
    owners[to_size(expert)] = static_cast<std::int32_t>(plan::default_owner(expert, num_experts, num_ranks));
  }
  return owners;
}

Status check_map(std::string_view operation, const PlacementOptions& options, int num_ranks) {
  const std::vector<std::int32_t>& expert_to_rank = options.expert_to_rank;
  if (expert_to_rank.empty()) return {};
  if (expert_to_rank.size() != to_size(options.num_experts)) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: expert_to_rank has {} entries, expected one for each of {} experts", operation,
                              expert_to_rank.size(), options.num_experts));
  }
  for (std::size_t expert = 0; expert < expert_to_rank.size(); ++expert) {
    const std::int32_t owner = expert_to_rank[expert];
    if (owner >= 0 && owner < num_ranks) continue;
    return Status(ErrorCode::kInvalidArgument, fmt::format("{}: expert_to_rank[{}] is {}, expected a rank from 0 to {}",
                                                           operation, expert, owner, num_ranks - 1));
  }
  return {};
}

/// Placements kept for later calls: more than programs alternate between.
constexpr std::size_t kMaxRecent = 128;

bool is_made_of(const ExpertPlacement& made, const PlacementOptions& options) {
  const Placement& placement = options.placement;
  if (made.num_logical_experts != options.num_experts || made.given != placement.present()) return false;
  const std::vector<std::int32_t>& ranks = placement.present() ? placement.physical_to_rank : options.expert_to_rank;
  if (ranks.empty() != made.default_ranks) return false;
  if (!ranks.empty() && ranks != made.expert_to_rank) return false;
  if (!placement.present()) return placement.physical_to_rank.empty();
  return options.expert_to_rank.empty() && placement.choice == made.choice &&
         placement.allow_homeless == made.allow_homeless &&
         placement.physical_to_logical_view.present() == made.on_device &&
         placement.num_physical_experts() == made.num_placed() &&
         placement.physical_to_logical == made.physical_to_logical;
}

}  // namespace

void ExpertPlacement::describe(CallRecord& record) const {
  std::copy(digest.begin(), digest.end(), record.message.begin());
  record.message_bytes = static_cast<std::int32_t>(digest.size());
}

std::vector<std::int32_t> owners_of(const Placement& placement, int num_ranks) {
  if (!placement.physical_to_rank.empty()) return placement.physical_to_rank;
  return default_owners(placement.num_physical_experts(), num_ranks);
}

Status ExpertPlacements::check(std::string_view operation, const PlacementOptions& options, bool on_host) const {
  const Placement& placement = options.placement;
  if (!placement.present()) {
    if (placement.physical_to_rank.empty()) return check_map(operation, options, topology_.num_ranks);
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "{}: placement: physical_to_rank has {} entries and physical_to_logical none, expected equally many",
            operation, placement.physical_to_rank.size()));
  }
  if (!options.expert_to_rank.empty()) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: expert_to_rank and placement are both given, expected one of them; a placement has "
                              "physical_to_rank",
                              operation));
  }
  if (on_host && placement.physical_to_logical_view.present()) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: placement: physical_to_logical_view is given, expected physical_to_logical: this "
                              "backend has no GPU memory",
                              operation));
  }
  Status status = check_placement(placement, options.num_experts, topology_.num_ranks);
  return status.ok() ? status : Status(status.code(), fmt::format("{}: {}", operation, status.message()));
}

void ExpertPlacements::place_physical(const PlacementOptions& options, ExpertPlacement& made) const {
  const Placement& placement = options.placement;
  made.given = true;
  made.expert_to_rank = owners_of(placement, topology_.num_ranks);
  made.choice = placement.choice;
  made.allow_homeless = placement.allow_homeless;
  made.on_device = placement.physical_to_logical_view.present();
  made.physical_to_logical = placement.physical_to_logical;
  if (made.on_device) return;
  made.homes = plan::list_homes({.physical_to_logical = made.physical_to_logical,
                                 .physical_to_rank = made.expert_to_rank,
                                 .num_logical = options.num_experts,
                                 .rank = topology_.rank,
                                 .ranks_per_node = topology_.ranks_per_node,
                                 .nearest = made.choice == ReplicaChoice::kNearest});
}

Result<std::shared_ptr<const ExpertPlacement>> ExpertPlacements::find(std::string_view operation,
                                                                      const PlacementOptions& options, bool on_host) {
  // Invalid options never match a placement that passed its checks. Layers use their placements in turn, so the search
  // starts after the latest match.
  for (std::size_t i = 0; i < recent_.size(); ++i) {
    const std::size_t at = (latest_ + i) % recent_.size();
    if (!is_made_of(*recent_[at], options)) continue;
    latest_ = at;
    return recent_[at];
  }
  if (Status status = check(operation, options, on_host); !status.ok()) return status;
  auto made = std::make_shared<ExpertPlacement>();
  made->num_logical_experts = options.num_experts;
  if (options.placement.present()) {
    place_physical(options, *made);
  } else {
    made->expert_to_rank = options.expert_to_rank.empty() ? default_owners(options.num_experts, topology_.num_ranks)
                                                          : options.expert_to_rank;
  }
  made->num_local_experts = std::count(made->expert_to_rank.begin(), made->expert_to_rank.end(), topology_.rank);
  made->digest.resize(kPlacementDigestBytes);
  const auto digest = std::span(made->digest).first<kPlacementDigestBytes>();
  const HomeMaps maps{made->physical_to_logical, made->expert_to_rank, topology_.num_ranks};
  made->hash = made->given ? hash_homes(maps) : hash_placement(made->expert_to_rank);
  made->digest.resize(made->given ? write_homes_digest(maps, digest)
                                  : write_placement_digest(made->expert_to_rank, digest));
  made->default_ranks =
      (options.placement.present() ? options.placement.physical_to_rank : options.expert_to_rank).empty();
  if (recent_.size() == kMaxRecent) recent_.erase(recent_.begin());
  recent_.push_back(made);
  latest_ = recent_.size() - 1;
  return recent_.back();
}

}  // namespace ferry
