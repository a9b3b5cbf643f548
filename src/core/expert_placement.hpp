#ifndef FERRY_CORE_EXPERT_PLACEMENT_HPP
#define FERRY_CORE_EXPERT_PLACEMENT_HPP

/// Placement of experts on ranks as given in a call's options, with everything derived from it. Programs use one
/// placement for a long time, or one per layer of a model in turn, so recent ones are kept: checking and hashing one
/// would take a tenth of a call's time.

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "core/agreement.hpp"
#include "ferry/group.hpp"
#include "ferry/placement.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"
#include "plan/replicas.hpp"

namespace ferry {

/// Bound on E and P: far above any model, low enough that count tables of every rank stay small (4 MiB).
inline constexpr std::int64_t kMaxPlacedExperts = std::int64_t{1} << 20;

/// Placement of physical experts. Without a `Placement` those are the experts that the program names; with one, `homes`
/// lists the physical experts from which a token picks for a logical expert.
struct ExpertPlacement {
  std::vector<std::int32_t> expert_to_rank;  ///< [P]
  std::int64_t num_logical_experts = 0;      ///< E
  /// [P], -1 or below: none. Empty without a Placement, and if only the GPU has it.
  std::vector<std::int32_t> physical_to_logical{};
  plan::HomeTable homes{};  ///< homes for this rank's tokens; empty in the same cases
  ReplicaChoice choice = ReplicaChoice::kNearest;
  bool allow_homeless = false;
  bool given = false;                  ///< there is a Placement
  bool default_ranks = false;          ///< the map of ranks was empty
  bool on_device = false;              ///< only the GPU has the Placement's contents
  std::int64_t num_local_experts = 0;  ///< experts of this rank
  std::int64_t hash = 0;               ///< equal for equal maps, on every rank
  std::vector<char> digest;            ///< see placement_digest.hpp

  /// P as ranks compare it: 0 without a Placement.
  std::int64_t num_placed() const { return given ? static_cast<std::int64_t>(expert_to_rank.size()) : 0; }
  /// `choice` and allow_homeless in one number, as ranks compare them.
  std::int64_t agreed_choice() const { return static_cast<std::int64_t>(choice) + (allow_homeless ? kHomelessBit : 0); }
  /// Writes the digest into the record of a call that passed its checks.
  void describe(CallRecord& record) const;
};

/// Fields of a call's options that place experts.
struct PlacementOptions {
  std::int64_t num_experts = 0;  ///< E
  const std::vector<std::int32_t>& expert_to_rank;
  const Placement& placement;
};

/// The rank of each physical expert of a checked placement.
std::vector<std::int32_t> owners_of(const Placement& placement, int num_ranks);

class ExpertPlacements {
 public:
  explicit ExpertPlacements(const Topology& topology) : topology_(topology) {}

  /// Finds a kept placement or makes one. `num_experts` is positive and within core's bound. `operation` begins the
  /// message of an error. `on_host`: the backend reads host memory only.
  /// @errors kInvalidArgument
  Result<std::shared_ptr<const ExpertPlacement>> find(std::string_view operation, const PlacementOptions& options,
                                                      bool on_host);

 private:
  Status check(std::string_view operation, const PlacementOptions& options, bool on_host) const;
  void place_physical(const PlacementOptions& options, ExpertPlacement& made) const;

  Topology topology_;
  std::vector<std::shared_ptr<const ExpertPlacement>> recent_;  ///< in the order in which they were first seen
  std::size_t latest_ = 0;
};

}  // namespace ferry

#endif  // FERRY_CORE_EXPERT_PLACEMENT_HPP
