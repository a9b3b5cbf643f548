#ifndef FERRY_PLACEMENT_HPP
#define FERRY_PLACEMENT_HPP

/// Placement of experts with more than one home: P physical experts, each a home of one of E logical experts, on R
/// ranks. Programs choose logical experts; `Group::route` picks one home for each of them.

#include <cstdint>
#include <span>
#include <vector>

#include "ferry/export.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// Rule by which a token picks one of several homes. With either rule the same token picks the same home of an expert
/// in all of its K entries, and the pick depends only on the placement, the token's rank and its index.
enum class ReplicaChoice : std::int32_t {
  /// Among the homes on the token's own rank; if there are none, among those on its node; if there are none, among all.
  /// Several homes are listed in ascending order of physical id, and the pick is the one at index (token index + rank)
  /// modulo their number.
  kNearest = 0,
  /// The same index, among all homes.
  kRoundRobin = 1,
};

/// Homes of one layer's experts. The same on every rank, else a call that is given it returns kInvalidArgument on all.
/// It may differ in each call. Ranks keep the latest ones in a form ready for calls, so a placement that is used again
/// costs only its comparison.
struct Placement {
  /// [P], P >= E: the logical expert of each physical expert; -1: none, so it gets no rows. Every logical expert needs
  /// a home, unless `allow_homeless` is set.
  std::vector<std::int32_t> physical_to_logical{};
  /// [P]: the rank of each physical expert. Empty = contiguous: rank r has physical experts [r*P/R, (r+1)*P/R) (rounded
  /// down), so equally many if R divides P. A rank's local experts are its physical ones in ascending order.
  std::vector<std::int32_t> physical_to_rank{};
  ReplicaChoice choice = ReplicaChoice::kNearest;
  /// CUDA groups only, instead of physical_to_logical: [P] i32 in GPU memory with the same contents, read when the call
  /// runs on the stream, so that each replay of a captured call may use another placement. If it contains an invalid
  /// id, lacks an expert or differs between ranks, the call ends like any call whose ranks disagree.
  ConstTensorView physical_to_logical_view{};
  /// Logical experts may have no home, and P may be below E, at least 1: for a group that goes on without a lost rank.
  /// Calls treat an entry of topk_idx that names such an expert as -1: it has no slot and adds nothing, and the token's
  /// other weights stay as they are.
  bool allow_homeless = false;

  /// Whether there is one; otherwise each expert has the one home given by `expert_to_rank`.
  bool present() const { return !physical_to_logical.empty() || physical_to_logical_view.present(); }
  std::int64_t num_physical_experts() const {
    if (physical_to_logical_view.present()) return physical_to_logical_view.extent(0);
    return static_cast<std::int64_t>(physical_to_logical.size());
  }
};

/// A rank and the size of its node, which decide what is near.
struct ReplicaPlace {
  int rank = 0;
  int num_ranks = 1;
  int ranks_per_node = 1;
};

/// Whether calls on `num_ranks` ranks accept this placement of `num_experts` logical experts. Reads host memory only,
/// so it checks nothing but the shape of physical_to_logical_view.
/// @errors kInvalidArgument: an entry outside [-1, E), physical_to_rank of another size or with an entry outside
///         [0, R); unless allow_homeless, P below E or an expert without a home; the message names the first
FERRY_API Status check_placement(const Placement& placement, std::int64_t num_experts, int num_ranks);

/// Picks of `Group::route`, for programs that move tokens by other means: out[t, k] = the physical expert that token t
/// of `place.rank` picks as a home of topk_idx[t, k], -1 for -1 and for an expert without a home. Host memory; may be
/// in place.
/// @shape  topk_idx [T, K] i32 | i64, out [T, K] of the same type, both contiguous
/// @errors those of check_placement; kInvalidArgument: shape, dtype, pointer, an id outside [-1, E), a rank outside
///         [0, R), physical_to_logical_view is given. Nothing is written
FERRY_API Status pick_replicas(const ConstTensorView& topk_idx, std::int64_t num_experts, const Placement& placement,
                               const ReplicaPlace& place, const TensorView& out);

/// The placement that is left of `placement`, on `num_ranks` ranks, for a group of `kept_ranks` alone, which are
/// numbered 0, 1, ... in their order. Physical experts of other ranks are dropped and the others stay in their order:
/// a kept rank has the same local experts as before, in the same order, and no weights move. physical_to_rank is
/// filled, `choice` is kept and allow_homeless is set. If `placement` is not present(), the one before is the default:
/// E experts in order on R ranks.
/// @errors those of check_placement; kInvalidArgument: physical_to_logical_view is given, `kept_ranks` is empty, is not
///         ascending or has an entry outside [0, R), or no physical expert is on them
FERRY_API Result<Placement> surviving_placement(const Placement& placement, std::int64_t num_experts, int num_ranks,
                                                std::span<const int> kept_ranks);

/// Counters of a program that calls add to, without a wait: each entry grows by the call's rows for it, once the counts
/// are known to be good; a refused call adds nothing. Each counter is present or absent on this rank alone, contiguous,
/// i64 | i32 (which wraps), in the memory of the backend. On a CUDA group they are written in stream order. A token
/// that names an expert twice counts once.
struct LoadCounters {
  TensorView logical{};   ///< [E]: this rank's tokens that go to each logical expert
  TensorView physical{};  ///< [P]: this rank's tokens that go to each physical expert; E without a placement
  TensorView received{};  ///< [L]: tokens of all ranks that each local expert of this rank receives
  /// [1]: entries of this rank's topk_idx that name an expert without a home (Placement::allow_homeless), so that the
  /// other counters leave them out. Entries, not tokens: one that names such an expert twice counts twice.
  TensorView homeless{};
};

}  // namespace ferry

#endif  // FERRY_PLACEMENT_HPP
