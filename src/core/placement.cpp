#include "ferry/placement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "core/checks.hpp"
#include "core/expert_placement.hpp"
#include "plan/replicas.hpp"
#include "plan/slots.hpp"
#include "plan/to_size.hpp"

namespace ferry {
namespace {

Status invalid_placement(std::string message) { return Status(ErrorCode::kInvalidArgument, std::move(message)); }

Status check_homes(const Placement& placement, std::int64_t num_experts) {
  const std::vector<std::int32_t>& physical_to_logical = placement.physical_to_logical;
  std::vector<char> has_home(to_size(num_experts), 0);
  for (std::size_t physical = 0; physical < physical_to_logical.size(); ++physical) {
    const std::int32_t logical = physical_to_logical[physical];
    if (logical < -1 || logical >= num_experts) {
      return invalid_placement(
          fmt::format("placement: physical_to_logical[{}] is {}, expected -1 (not in use) or an expert from 0 to {}",
                      physical, logical, num_experts - 1));
    }
    if (logical >= 0) has_home[to_size(logical)] = 1;
  }
  const auto missing = std::find(has_home.begin(), has_home.end(), 0);
  if (missing == has_home.end() || placement.allow_homeless) return {};
  return invalid_placement(
      fmt::format("placement: no entry of physical_to_logical is expert {}, expected at least one home of each of {} "
                  "experts; add one, or set allow_homeless",
                  missing - has_home.begin(), num_experts));
}

template <typename Id>
Status pick_all(const ConstTensorView& topk_idx, const plan::HomeTable& table, int rank, const TensorView& out) {
  const auto* from = static_cast<const Id*>(topk_idx.data);
  auto* to = static_cast<Id*>(out.data);
  const std::int64_t num_topk = topk_idx.extent(1);
  const auto num_experts = static_cast<std::int64_t>(table.ranges.size());
  const std::int64_t num_entries = topk_idx.extent(0) * num_topk;
  const Id* const bad =
      std::find_if(from, from + num_entries, [num_experts](Id id) { return id < -1 || id >= num_experts; });
  if (bad != from + num_entries) {
    return invalid_placement(
        fmt::format("pick_replicas: topk_idx[{}, {}] is {}, expected -1 (no expert) or an expert from 0 to "
                    "{}",
                    (bad - from) / num_topk, (bad - from) % num_topk, *bad, num_experts - 1));
  }
  for (std::int64_t entry = 0; entry < num_entries; ++entry) {
    to[entry] = from[entry] < 0 ? Id{-1} : table.pick(to_size(from[entry]), entry / num_topk, rank);
  }
  return {};
}

Status check_kept_ranks(std::span<const int> kept_ranks, int num_ranks) {
  if (kept_ranks.empty()) return invalid_placement("kept_ranks is empty, expected at least one rank");
  for (std::size_t i = 0; i < kept_ranks.size(); ++i) {
    if (kept_ranks[i] < 0 || kept_ranks[i] >= num_ranks) {
      return invalid_placement(
          fmt::format("kept_ranks[{}] is {}, expected a rank from 0 to {}", i, kept_ranks[i], num_ranks - 1));
    }
    if (i > 0 && kept_ranks[i] <= kept_ranks[i - 1]) {
      return invalid_placement(
          fmt::format("kept_ranks[{}] is {}, expected more than {}, the entry before it: list each rank that remains "
                      "once, in ascending order",
                      i, kept_ranks[i], kept_ranks[i - 1]));
    }
  }
  return {};
}

/// A placement in which every expert is its only home, on the ranks of the default.
Placement default_placement(ReplicaChoice choice, std::int64_t num_experts) {
  Placement placement;
  placement.choice = choice;
  placement.physical_to_logical.resize(to_size(std::clamp<std::int64_t>(num_experts, 0, kMaxPlacedExperts)));
  std::iota(placement.physical_to_logical.begin(), placement.physical_to_logical.end(), 0);
  return placement;
}

}  // namespace

Status check_placement(const Placement& placement, std::int64_t num_experts, int num_ranks) {
  const std::int64_t num_physical = placement.num_physical_experts();
  if (num_experts < 1 || num_ranks < 1) {
    return invalid_placement(
        fmt::format("placement: {} experts on {} ranks, expected at least one of each", num_experts, num_ranks));
  }
  if (placement.choice != ReplicaChoice::kNearest && placement.choice != ReplicaChoice::kRoundRobin) {
    return invalid_placement(
        fmt::format("placement: choice is {}, expected kNearest or kRoundRobin; pass an enumerator",
                    static_cast<int>(placement.choice)));
  }
  const bool too_many = num_physical > kMaxPlacedExperts || num_experts > kMaxPlacedExperts;
  if (placement.allow_homeless && (num_physical < 1 || too_many)) {
    return invalid_placement(fmt::format("placement: {} physical experts for {} experts, expected 1 to {} of each",
                                         num_physical, num_experts, kMaxPlacedExperts));
  }
  if ((num_physical < num_experts && !placement.allow_homeless) || num_physical > kMaxPlacedExperts) {
    return invalid_placement(
        fmt::format("placement: {} physical experts, expected a home for each of {} experts, and at most {}",
                    num_physical, num_experts, kMaxPlacedExperts));
  }
  const std::vector<std::int32_t>& ranks = placement.physical_to_rank;
  if (!ranks.empty() && static_cast<std::int64_t>(ranks.size()) != num_physical) {
    return invalid_placement(
        fmt::format("placement: physical_to_rank has {} entries, expected one for each of {} physical "
                    "experts, or none",
                    ranks.size(), num_physical));
  }
  const auto bad = std::find_if(ranks.begin(), ranks.end(),
                                [num_ranks](std::int32_t rank) { return rank < 0 || rank >= num_ranks; });
  if (bad != ranks.end()) {
    return invalid_placement(fmt::format("placement: physical_to_rank[{}] is {}, expected a rank from 0 to {}",
                                         bad - ranks.begin(), *bad, num_ranks - 1));
  }
  if (!placement.physical_to_logical_view.present()) return check_homes(placement, num_experts);
  if (!placement.physical_to_logical.empty()) {
    return invalid_placement(
        "placement: physical_to_logical and physical_to_logical_view are both given, expected one of them");
  }
  return check_table("placement: physical_to_logical_view", placement.physical_to_logical_view, {num_physical},
                     {DType::kInt32});
}

Status pick_replicas(const ConstTensorView& topk_idx, std::int64_t num_experts, const Placement& placement,
                     const ReplicaPlace& place, const TensorView& out) {
  constexpr std::string_view kName = "pick_replicas";
  if (place.num_ranks < 1 || place.rank < 0 || place.rank >= place.num_ranks || place.ranks_per_node < 1) {
    return invalid_placement(fmt::format(
        "{}: rank {} of {} ranks, {} per node, expected a rank below the number of ranks, and 1 or more per node",
        kName, place.rank, place.num_ranks, place.ranks_per_node));
  }
  if (placement.physical_to_logical_view.present()) {
    return invalid_placement(
        fmt::format("{}: physical_to_logical_view is given, expected physical_to_logical in host memory", kName));
  }
  if (Status status = check_placement(placement, num_experts, place.num_ranks); !status.ok()) {
    return Status(status.code(), fmt::format("{}: {}", kName, status.message()));
  }
  if (topk_idx.num_dims != 2) {
    return invalid_placement(fmt::format("{}: topk_idx is {}, expected [T, K]", kName, describe(topk_idx)));
  }
  for (const auto& [what, view] : {std::pair<std::string_view, ConstTensorView>("pick_replicas: topk_idx", topk_idx),
                                   std::pair<std::string_view, ConstTensorView>("pick_replicas: out", out)}) {
    Status status = check_table(what, view, {topk_idx.extent(0), topk_idx.extent(1)}, {DType::kInt32, DType::kInt64});
    if (!status.ok()) return status;
  }
  if (out.dtype != topk_idx.dtype) {
    return invalid_placement(fmt::format("{}: out is {}, expected the dtype of topk_idx, which is {}", kName,
                                         describe(out), describe(topk_idx)));
  }
  const std::vector<std::int32_t> owners = owners_of(placement, place.num_ranks);
  const plan::HomeTable table = plan::list_homes({.physical_to_logical = placement.physical_to_logical,
                                                  .physical_to_rank = owners,
                                                  .num_logical = num_experts,
                                                  .rank = place.rank,
                                                  .ranks_per_node = place.ranks_per_node,
                                                  .nearest = placement.choice == ReplicaChoice::kNearest});
  return topk_idx.dtype == DType::kInt32 ? pick_all<std::int32_t>(topk_idx, table, place.rank, out)
                                         : pick_all<std::int64_t>(topk_idx, table, place.rank, out);
}

Result<Placement> surviving_placement(const Placement& placement, std::int64_t num_experts, int num_ranks,
                                      std::span<const int> kept_ranks) {
  constexpr std::string_view kName = "surviving_placement";
  if (placement.physical_to_logical_view.present()) {
    return invalid_placement(
        fmt::format("{}: physical_to_logical_view is given, expected physical_to_logical in host memory", kName));
  }
  const bool by_default = !placement.present() && placement.physical_to_rank.empty();
  const Placement before = by_default ? default_placement(placement.choice, num_experts) : placement;
  Status status = check_placement(before, num_experts, num_ranks);
  if (status.ok()) status = check_kept_ranks(kept_ranks, num_ranks);
  if (!status.ok()) return Status(status.code(), fmt::format("{}: {}", kName, status.message()));
  const std::vector<std::int32_t> owners = owners_of(before, num_ranks);
  Placement left;
  left.choice = before.choice;
  left.allow_homeless = true;
  for (std::size_t physical = 0; physical < owners.size(); ++physical) {
    const auto kept = std::lower_bound(kept_ranks.begin(), kept_ranks.end(), owners[physical]);
    if (kept == kept_ranks.end() || *kept != owners[physical]) continue;
    left.physical_to_logical.push_back(before.physical_to_logical[physical]);
    left.physical_to_rank.push_back(static_cast<std::int32_t>(kept - kept_ranks.begin()));
  }
  if (left.present()) return left;
  return invalid_placement(
      fmt::format("{}: none of the {} physical experts is on the {} kept_ranks, expected at least one; keep a rank "
                  "that has some",
                  kName, owners.size(), kept_ranks.size()));
}

}  // namespace ferry
