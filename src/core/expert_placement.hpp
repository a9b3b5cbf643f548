#ifndef FERRY_CORE_EXPERT_PLACEMENT_HPP
#define FERRY_CORE_EXPERT_PLACEMENT_HPP

/// Which rank owns each expert, as calls take it from their options, and what every call needs to know about it.
/// Programs use one placement for a long time, or one for each layer of a model in turn, so recent ones are kept:
/// checking and hashing one would be a tenth of a call's time.

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

/// What backends place are physical experts. Without a `Placement` those are the experts that the program names; with
/// one `homes` says which of them a token picks for a logical expert.
struct ExpertPlacement {
  std::vector<std::int32_t> expert_to_rank;  ///< [P]
  std::int64_t num_logical_experts = 0;      ///< E
  /// [P], -1 or below: none. Empty without a Placement, and where only the GPU knows it.
  std::vector<std::int32_t> physical_to_logical{};
  plan::HomeTable homes{};  ///< of this rank's tokens; likewise
  ReplicaChoice choice = ReplicaChoice::kNearest;
  bool given = false;                  ///< there is a Placement
  bool default_ranks = false;          ///< of a map of ranks that was empty
  bool on_device = false;              ///< whose contents only the GPU knows
  std::int64_t num_local_experts = 0;  ///< of this rank
  std::int64_t hash = 0;               ///< equal maps give equal numbers on every rank
  std::vector<char> digest;            ///< see placement_digest.hpp

  /// P as ranks compare it: 0 without a Placement.
  std::int64_t num_placed() const { return given ? static_cast<std::int64_t>(expert_to_rank.size()) : 0; }
  /// Writes the digest into the record of a call that passed its checks.
  void describe(CallRecord& record) const;
};

/// What a call's options say about where experts are.
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

  /// `num_experts` is positive and within core's bound. `operation` begins the message of an error. `on_host`: the
  /// backend reads host memory only.
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
