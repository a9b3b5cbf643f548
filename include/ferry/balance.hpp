#ifndef FERRY_BALANCE_HPP
#define FERRY_BALANCE_HPP

/// Placement of experts on ranks that gives every rank about the same work: computed from the load of each expert,
/// without a group and on host memory. docs/experts.md explains when to call it.
///
/// P *physical experts* are places for the weights of one expert each; physical expert p is on rank p / (P / R). An
/// expert with more load may have several of them, its *replicas*, among which its tokens are assumed to spread evenly.

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "ferry/export.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

enum class BalancePolicy : std::int32_t {
  kAuto = 0,  ///< kHierarchical if num_groups is a multiple of num_nodes, else kGlobal
  /// All experts of a group live on one node, and every node has equally many groups: with group-limited gating a token
  /// then reaches only as many nodes as it selects groups. Groups are assigned to nodes first, then replicas and ranks
  /// inside each node.
  kHierarchical = 1,
  kGlobal = 2,  ///< any expert on any rank; num_groups and num_nodes have no effect
};

/// The name that Python uses: "auto", "hierarchical", "global".
FERRY_API std::string_view to_string(BalancePolicy policy);

/// Largest sizes that balance and plan_moves take; far above any model's. The largest layers take minutes.
inline constexpr std::int64_t kMaxBalanceExperts = std::int64_t{1} << 18;  ///< E, and P
inline constexpr int kMaxBalanceRanks = 1 << 12;                           ///< R
/// Entries of the largest array of a Balance: layers * P, or layers * E * M.
inline constexpr std::int64_t kMaxBalanceEntries = std::int64_t{1} << 30;

struct BalanceOptions {
  std::int64_t num_replicas = 0;  ///< P: physical experts of all ranks, at least E; a multiple of num_ranks
  int num_groups = 1;             ///< equal contiguous groups of experts, as in GatingOptions; divides E
  int num_nodes = 1;              ///< divides num_ranks
  int num_ranks = 1;              ///< R
  BalancePolicy policy = BalancePolicy::kAuto;
  /// [layers, P] i32, host memory, any strides: the placement in force, -1 where a place is empty. Ranks and places are
  /// then numbered so that as few experts as possible change their rank; among placements of about equal balance the
  /// nearest to it is chosen.
  ConstTensorView previous{};
  /// With `previous`: bound on the experts of a layer that arrive on a rank where they were not; -1: none. Empty places
  /// are always filled, and a layer whose previous placement violates the policy (an expert is missing, for example) is
  /// placed anew, however many arrivals that takes.
  std::int64_t max_moves = -1;
  /// With `previous`: smallest gain that justifies the arrival of one expert: the fall of the layer's highest load, as
  /// a fraction of a rank's mean load.
  double move_weight = 0;
  /// Exchanges tried per layer and start, after the greedy start. The result depends on this number, never on time.
  int max_steps = 2000;
  /// Called when the first layer begins and then about ten times a second, by the thread that makes the call; true ends
  /// it with kSystem. Must not throw, and must return soon. For programs that handle signals; empty: the call ends by
  /// itself.
  std::function<bool()> interrupted{};
};

/// Placements of all layers. Vectors are row-major.
struct Balance {
  std::int64_t num_layers = 0;
  std::int64_t num_experts = 0;   ///< E
  std::int64_t num_replicas = 0;  ///< P
  int num_ranks = 0;
  BalancePolicy policy = BalancePolicy::kGlobal;  ///< the policy that was used; never kAuto
  std::vector<std::int32_t> physical_to_logical;  ///< [layers, P]: the expert of each physical expert
  std::vector<std::int32_t> replica_counts;       ///< [layers, E]: at least 1
  std::int64_t max_replicas = 0;                  ///< M: the largest of replica_counts
  /// [layers, E, M]: physical experts of each expert, ascending, then -1.
  std::vector<std::int32_t> logical_to_physical;
  std::vector<double> max_load;         ///< [layers]: load of the busiest rank
  std::vector<double> mean_load;        ///< [layers]: mean load of a rank
  std::vector<std::int64_t> num_moves;  ///< [layers]: experts that arrive on a rank; 0 without a previous placement
};

/// Place the experts of each layer. Never worse than the published greedy algorithm (replicate the expert with most
/// load per replica; put the heaviest on the least loaded rank with a free place) unless max_moves or move_weight
/// restricts it, and mostly close to the bound that no placement can beat. Two replicas of an expert share a rank only
/// where keeping them apart would raise the highest load. Deterministic; takes a millisecond or two for a layer of 256
/// experts on 32 ranks, a second or two for one of 100,000 on 1,000.
/// @shape  load [layers, E] i32 | i64 | f32, host memory, any strides, finite and not negative
/// @errors kInvalidArgument: shapes, dtypes, a negative or non-finite load, P < E, P not divisible by num_ranks,
///         num_ranks not divisible by num_nodes, E not divisible by num_groups, num_groups not divisible by num_nodes
///         with kHierarchical, a previous placement of another shape or with ids outside -1 … E - 1, sizes above
///         kMaxBalanceExperts, kMaxBalanceRanks or kMaxBalanceEntries; kSystem: interrupted, or out of memory
FERRY_API Result<Balance> balance(const ConstTensorView& load, const BalanceOptions& options);

/// One copy of one expert's weights.
struct ExpertCopy {
  std::int32_t layer = 0;
  std::int32_t expert = 0;
  std::int32_t from = 0;  ///< physical expert; with from_staging, a staging place of from_rank
  std::int32_t to = 0;    ///< physical expert; with to_staging, a staging place of to_rank
  std::int32_t from_rank = 0;
  std::int32_t to_rank = 0;
  bool from_staging = false;
  bool to_staging = false;
  bool local() const { return from_rank == to_rank; }
};

/// Copies that turn one placement into another, one layer after another. Copies of one wave may be made in any order or
/// at the same time; a wave starts when the wave before it is done on all ranks, so that no copy overwrites the source
/// of a later copy. Staging places are free again at the end of each layer.
struct MovePlan {
  std::vector<ExpertCopy> copies;         ///< by layer, then wave
  std::vector<std::int64_t> wave_begin;   ///< [waves + 1]: copies of wave w are wave_begin[w] … wave_begin[w + 1] - 1
  std::int64_t num_remote = 0;            ///< between ranks
  std::int64_t num_between_nodes = 0;     ///< subset of num_remote between nodes
  std::int64_t num_local = 0;             ///< inside a rank
  std::vector<std::int32_t> num_staging;  ///< [R]: staging places that a rank needs, each for one expert's weights
};

struct MovePlanOptions {
  std::int64_t num_experts = 0;  ///< E
  int num_ranks = 1;
  int num_nodes = 1;
};

/// Copies that lead from `previous` to `next`. A source is on the same rank where possible, else on the same node;
/// among those it is the rank that sends least so far. Staging is needed only where experts change places in a circle.
/// @shape  previous, next [layers, P] i32, host memory, any strides; -1: an empty place (no copy goes there)
/// @errors kInvalidArgument: shapes, dtypes, ids outside -1 … E - 1, P not divisible by num_ranks, num_ranks not
///         divisible by num_nodes, an expert of `next` that `previous` does not have, sizes above the same bounds;
///         kSystem: out of memory
FERRY_API Result<MovePlan> plan_moves(const ConstTensorView& previous, const ConstTensorView& next,
                                      const MovePlanOptions& options);

}  // namespace ferry

#endif  // FERRY_BALANCE_HPP
