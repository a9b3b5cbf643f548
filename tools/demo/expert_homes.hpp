#ifndef FERRY_TOOLS_DEMO_EXPERT_HOMES_HPP
#define FERRY_TOOLS_DEMO_EXPERT_HOMES_HPP

/// Where experts live, as one rank knows it, and the weights of those that moved to it. Places are physical experts:
/// place p is on rank p * R / P, rounded down.

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
  /// At first experts are spread over the ranks in order, each once; spare places are at each rank's end.
  ExpertHomes(const DemoPlan& plan, int rank);

  /// What to route by: of each entry of topk_idx the place, of several homes the one at index (token + rank) modulo
  /// their number. `first_token` is counted from this rank's first one.
  std::vector<std::int64_t> places_of(std::span<const std::int64_t> topk_idx, std::int64_t first_token) const;
  /// The same before anything moved.
  std::vector<std::int64_t> first_places_of(std::span<const std::int64_t> topk_idx) const;
  /// The expert that lives in a place; -1: none.
  std::int64_t expert_in(std::int64_t place) const { return placement_[static_cast<std::size_t>(place)]; }
  std::span<const std::int32_t> placement() const { return placement_; }

  /// The weights of an expert of this rank: as they came, or made where it lived from the beginning.
  /// @errors kInternal: it is not here
  Status load(std::int64_t expert_idx, Expert* expert) const;

  /// Compute a placement for `load` [E], the same on every rank, and bring the experts there: their weights travel as
  /// rows of a dispatch whose experts are the places. Collective.
  Status move(std::span<const std::int64_t> load, Group& group, const RankDevice& device, MoveFigures* figures);

 private:
  Status carry(std::span<const ExpertCopy> copies, Group& group, const RankDevice& device);

  const DemoPlan& plan_;
  int rank_;
  std::vector<std::int32_t> first_placement_;
  std::vector<std::int32_t> placement_;
  std::map<std::int64_t, std::vector<float>> arrived_;  ///< by expert
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_EXPERT_HOMES_HPP
