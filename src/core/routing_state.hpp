#ifndef FERRY_CORE_ROUTING_STATE_HPP
#define FERRY_CORE_ROUTING_STATE_HPP

/// What a Routing holds. Backends derive from it to own the tables that the views point to.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ferry/routing.hpp"

namespace ferry {

/// What a Routing of latency mode waits for, and what may be done with it.
enum class LatencyPhase {
  kNone,            ///< it is not of latency mode
  kDispatchSent,    ///< its dispatch is to be received
  kReady,           ///< its rows are there, or will be in stream order
  kCombineSent,     ///< a combine is to be received
  kDispatchFailed,  ///< its rows will never be there
};

enum class RouteOutcome {
  kUnknown,
  kAllMakeCalls,   ///< it took place, or all ranks learn late that it did not
  kSomeMakeCalls,  ///< it was refused, as hosts of some ranks may have known at once
};

/// Calls on a Routing of which the host did not know whether its route took place when it had returned. See
/// CallNumbers, which alone uses it, in the group's thread.
struct UnsettledCalls {
  /// What is known by now. Waits for nothing. Keeps what it looks at, which may outlive the Routing.
  std::function<RouteOutcome()> look;
  std::int64_t num_calls = 0;
  bool make_no_numbers = false;  ///< kSomeMakeCalls, which has been taken into account
};

struct RoutingState {
  RoutingState() = default;
  RoutingState(const RoutingState&) = delete;
  RoutingState& operator=(const RoutingState&) = delete;
  virtual ~RoutingState() = default;

  /// Called before reading what is known only after the exchange: num_used_rows and everything below it except
  /// local_expert_ids. A backend that routes without the host fills those in here. May be called from any thread.
  virtual void settle() const {}
  /// Of latency mode: whether the dispatch is known by now to have been refused, though latency_receive could not tell.
  /// What it says may change from false to true while others make calls.
  virtual bool dispatch_failed() const { return false; }

  std::shared_ptr<const void> group_identity;  ///< identity of the group that made the Routing
  std::int64_t call_number = 0;                ///< of CallNumbers; equal on all ranks once they know what was refused
  std::shared_ptr<UnsettledCalls> unsettled;   ///< null: the host knows the outcome, or never will (captured)

  /// Written by the group's thread alone.
  mutable LatencyPhase latency_phase = LatencyPhase::kNone;

  std::int64_t num_tokens = 0;
  int num_topk = 0;
  std::int64_t num_experts = 0;          ///< P: backends know of no others
  std::int64_t num_logical_experts = 0;  ///< E; core fills it in
  Layout layout = Layout::kTokens;
  std::int64_t num_recv_rows = 0;
  std::int64_t num_used_rows = 0;

  std::vector<std::int32_t> num_rows_per_local_expert;  ///< [L]
  std::vector<std::int64_t> expert_row_offsets;         ///< [L + 1], empty for kTokens
  std::vector<std::int64_t> num_rows_from_rank;         ///< [R]
  std::vector<std::int64_t> num_rows_to_rank;           ///< [R]
  bool may_repeat_experts = true;
  std::vector<std::int32_t> local_expert_ids;  ///< [L]

  ConstTensorView num_used_rows_view;    ///< [1] i32
  ConstTensorView rows_per_expert_view;  ///< [L] i32
  ConstTensorView row_offsets_view;      ///< [L + 1] i64, absent for kTokens
  ConstTensorView expert_rows_view;      ///< [P] i64, absent in latency mode on GPUs
  ConstTensorView slots;                 ///< [T, K] i32
  ConstTensorView source;                ///< [num_used_rows, 2] i32
  ConstTensorView source_ranges;         ///< [L, R, 2] i32, of latency mode
  ConstTensorView topk_idx;              ///< [T, K] i64
  ConstTensorView topk_weights;          ///< [T, K] f32 or absent
};

}  // namespace ferry

#endif  // FERRY_CORE_ROUTING_STATE_HPP
