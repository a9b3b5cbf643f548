#ifndef FERRY_ROUTING_HPP
#define FERRY_ROUTING_HPP

/// Destinations of every token: the inputs and options of `Group::route`, and the `Routing` it returns. Shapes use the
/// alphabet of docs/overview.md: T tokens on this rank, K top-k, E experts, L local experts, R ranks, N rows this rank
/// receives. With a `Placement`, experts that own rows are physical: P of them take the place of E wherever rows are
/// concerned, L counts a rank's physical experts, and local experts and their ids are physical. Inputs stay logical:
/// topk_idx and num_experts.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ferry/export.hpp"
#include "ferry/placement.hpp"
#include "ferry/types.hpp"

namespace ferry {

struct RoutingState;  // private

/// Largest K. The same bound as the widest routers in use (32), so that a token's entries fit one warp.
inline constexpr int kMaxTopk = 32;

/// Arrangement of a rank's received rows.
enum class Layout : std::int32_t {
  /// [N, H]: one row per token that picked any expert here, ordered by (source rank, source token).
  kTokens = 0,
  /// [N, H]: one row per (token, local expert), grouped by local expert, inside a group ordered by (source rank, source
  /// token); each group starts at a multiple of `expert_alignment`. N counts the gaps too.
  kExperts = 1,
  /// [L, C, H]: fixed capacity C = `slab_capacity` per local expert; inside an expert ordered as kExperts. Counts give
  /// the number of valid rows among the C.
  kSlab = 2,
};

/// Inputs of route on one rank.
struct RouteInput {
  ConstTensorView topk_idx{};  ///< [T, K] i32 | i64, contiguous: global expert id, -1 = no expert; duplicates allowed
  ConstTensorView topk_weights{};  ///< [T, K] f32, contiguous; absent when no weights are sent
};

/// Options of route. The same on every rank, except `max_recv_rows`, `num_sms` and `counters`.
struct RouteOptions {
  std::int64_t num_experts = 0;  ///< E >= 1; need not be a multiple of R
  Layout layout = Layout::kTokens;
  /// kExperts only: group starts (and N) are multiples of this, 1 to 2^31 - 1. N is at most 2^31 - 1 too, so large
  /// values leave room for few experts (else kCapacity).
  std::int64_t expert_alignment = 1;
  std::int64_t slab_capacity = 0;  ///< kSlab only: C, rows per local expert, the same on every rank
  /// 0: outputs have exactly N rows, known on the host when `route` returns. Otherwise outputs have this many rows and
  /// the counts are read from memory (`Routing::num_recv_rows_view`); more received rows than that are kCapacity. May
  /// differ by rank.
  std::int64_t max_recv_rows = 0;
  /// Bound on T of any rank, the same on every rank, for routes whose rows are bounded on every rank (max_recv_rows,
  /// kSlab); more tokens than that are kCapacity. Over several nodes a CUDA group with such a bound routes without the
  /// host, as it always does on one node, and may be captured; its Routings take memory for that many tokens of each
  /// node. 0: none. Changes no result.
  std::int64_t max_tokens = 0;
  /// Rank that owns each expert, E entries; empty = contiguous: rank r owns experts [r*E/R, (r+1)*E/R) (rounded down).
  /// A rank's local experts are its global ones in ascending order.
  std::vector<std::int32_t> expert_to_rank{};
  /// CUDA only, changes no result: most multiprocessors that route's kernels use; 0: all, over several nodes 24.
  int num_sms = 0;
  /// Instead of expert_to_rank, if experts have several homes or some places are empty: see placement.hpp.
  Placement placement{};
  /// Counters to which this call adds.
  LoadCounters counters{};
};

/// Result of `route` or `latency_dispatch`: every slot, and everything that dispatch, combine, a cached dispatch or a
/// backward pass needs. (On a CUDA group those calls do not accept a Routing of latency_dispatch: kUnsupported.)
/// A cheap value: copies share one immutable state. Keep it as long as needed; it may outlive the group (the accessors
/// then still work). Valid only with the group that made it. Safe to read from many threads.
/// On a CUDA group with bounded rows (max_recv_rows, kSlab) counts are copied to the host only on request:
/// num_used_rows, source (except that of latency_dispatch) and the spans of counts then wait for the route to finish. A
/// Routing made while its stream was captured never has them on the host (num_used_rows is num_recv_rows, the spans are
/// empty); use the views. Views are memory of the Routing: after its last copy is gone, the group's next call may reuse
/// it, so work that still reads the views must be on a stream that this call follows.
class FERRY_API Routing {
 public:
  Routing() = default;  ///< empty; using it in a call is kInvalidArgument

  bool present() const { return state_ != nullptr; }
  std::int64_t num_tokens() const;   ///< T of this rank
  int num_topk() const;              ///< K
  std::int64_t num_experts() const;  ///< E
  /// P, the expert ids of local_expert_ids and topk_idx; E without a placement.
  std::int64_t num_physical_experts() const;
  std::int64_t num_local_experts() const;  ///< L of this rank
  Layout layout() const;
  /// Rows that this rank's outputs (and combine's inputs) must have: N if counts are known on the host, L*C for kSlab,
  /// `max_recv_rows` if that was given.
  std::int64_t num_recv_rows() const;
  /// Rows in use, alignment gaps included: N (for kSlab L*C). At most num_recv_rows().
  std::int64_t num_used_rows() const;
  /// [1] i32 in the backend's memory: num_used_rows() for code that must not involve the host.
  ConstTensorView num_recv_rows_view() const;
  /// num_rows_per_local_expert() and expert_row_offsets() in the backend's memory: [L] i32 and [L + 1] i64.
  ConstTensorView num_rows_per_local_expert_view() const;
  ConstTensorView expert_row_offsets_view() const;

  /// [L] rows per local expert, without alignment gaps. A token that names an expert twice counts once.
  std::span<const std::int32_t> num_rows_per_local_expert() const;
  /// [L + 1] first row of each local expert's group and the end of the last (kExperts, kSlab); empty for kTokens.
  std::span<const std::int64_t> expert_row_offsets() const;
  /// [R] rows received from each source rank (without gaps), and [R] rows sent to each.
  std::span<const std::int64_t> num_rows_from_rank() const;
  std::span<const std::int64_t> num_rows_to_rank() const;
  /// False if it is known that no token of any rank names an expert twice: then num_rows_per_local_expert also counts
  /// entries. CUDA groups detect it while they count; CPU groups do not, and return true.
  bool may_repeat_experts() const;
  /// [L] global ids of this rank's experts, ascending; with a placement, physical ids.
  std::span<const std::int32_t> local_expert_ids() const;

  /// [T, K] i32: row in the output of the rank that owns topk_idx[t, k]; -1 if there is no expert.
  ConstTensorView slots() const;
  /// [num_used_rows(), 2] i32: source rank and source token of each row, -1 in rows that hold no token.
  ConstTensorView source() const;
  /// [L, R, 2] i32, for a Routing from `Group::latency_dispatch` (absent otherwise): number of rows of each local
  /// expert from each source rank, and the index of the first, counted from the start of the expert's group; for no
  /// rows, the index where they would begin.
  ConstTensorView source_ranges() const;
  /// [P] i64 in the backend's memory: rows of each physical expert on all ranks together, the same on every rank. On a
  /// CUDA group of one node absent in Routings of latency_dispatch; on one of several nodes absent if it routes without
  /// the host in layout kTokens.
  ConstTensorView num_rows_per_expert_view() const;
  /// [T, K] i64 copy of the ids and [T, K] f32 copy of the weights given to route; weights absent if none were. With a
  /// placement the ids are physical: the picked homes.
  ConstTensorView topk_idx() const;
  ConstTensorView topk_weights() const;

 private:
  friend class Group;
  explicit Routing(std::shared_ptr<const RoutingState> state) : state_(std::move(state)) {}
  std::shared_ptr<const RoutingState> state_;
};

}  // namespace ferry

#endif  // FERRY_ROUTING_HPP
