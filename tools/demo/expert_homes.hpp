#ifndef FERRY_TOOLS_DEMO_EXPERT_HOMES_HPP
#define FERRY_TOOLS_DEMO_EXPERT_HOMES_HPP

/// Homes of the experts, from the view of one rank, and the weights of experts that moved to it. Places are physical
/// experts: place p is on rank p * R / P, rounded down.

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "demo/demo_run.hpp"
#include "device/rank_device.hpp"
#include "ferry/balance.hpp"
#include "ferry/group.hpp"

namespace ferry::tools {

class ExpertHomes {
 public:
  /// At first experts are spread over the ranks in order, once each; spare places are at the end of each rank.
  ExpertHomes(const DemoPlan& plan, int rank);

  /// Placement for routes now, and the one before any move.
  const Placement& placement() const { return placement_; }
  const Placement& first_placement() const { return first_placement_; }
  /// Places that a route with `placement` picks for this rank's tokens.
  Result<std::vector<std::int64_t>> places_of(std::span<const std::int64_t> topk_idx, const Placement& placement) const;
  /// Expert in a place; -1: none.
  std::int64_t expert_in(std::int64_t place) const {
    return placement_.physical_to_logical[static_cast<std::size_t>(place)];
  }

  /// Loads the weights of an expert of this rank: those that arrived, or generated ones if it was here from the
  /// beginning.
  /// @errors kInternal: the expert is not on this rank
  Status load(std::int64_t expert_idx, Expert* expert) const;

  /// Computes a placement for `load` [E], the same on every rank, and moves the experts: a dispatch whose experts are
  /// the places carries their weights as rows. Collective.
  Status move(std::span<const std::int64_t> load, Group& group, const RankDevice& device, MoveFigures* figures);

 private:
  Status carry(std::span<const ExpertCopy> copies, Group& group, const RankDevice& device);

  const DemoPlan& plan_;
  int rank_;
  Placement first_placement_;
  Placement placement_;
  std::map<std::int64_t, std::vector<float>> arrived_;  ///< by expert
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_EXPERT_HOMES_HPP
