#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "core/checks.hpp"
#include "cpu/backend.hpp"
#include "cpu/intranode/calls.hpp"
#include "cpu/latency/slab_routing.hpp"
#include "cpu/latency/tile_wait.hpp"

/// Latency mode on CPU ranks: a route and a dispatch, or a combine, in one call. See PendingCalls for split ones.

namespace ferry::cpu {
namespace {

/// Defers the counts of a split call, which may be made long before its receive half: programs expect them there.
void count_dispatch(const LatencyDispatchCall& call, CpuRouting& routing) {
  if (!call.split) {
    add_to_counters(call.route.options.counters, *call.route.placement, routing);
    return;
  }
  routing.counted_placement = call.route.placement;
  routing.due_counters = call.route.options.counters;
}

void count_received(const std::shared_ptr<const RoutingState>& state) {
  // Core hands Routings out as const; this one belongs to the call, and no other thread reads these members.
  auto& routing = const_cast<CpuRouting&>(static_cast<const CpuRouting&>(*state));
  if (const auto placement = std::exchange(routing.counted_placement, nullptr)) {
    add_to_counters(routing.due_counters, *placement, routing);
  }
}

/// Adds to a call's times how long the rank waited for each other rank during the object's lifetime. Allocates nothing:
/// the constructor subtracts earlier waits and the destructor adds all of them. A call that this rank refuses adds
/// nothing, because the rank does not make it.
class AddedWaitTimes {
 public:
  AddedWaitTimes(const call::CallSync& sync, const CallRecord& record, std::int64_t* times_ns)
      : sync_(sync), times_ns_(record.code == ErrorCode::kOk ? times_ns : nullptr) {
    add(-1);
  }
  ~AddedWaitTimes() { add(1); }
  AddedWaitTimes(const AddedWaitTimes&) = delete;
  AddedWaitTimes& operator=(const AddedWaitTimes&) = delete;

 private:
  void add(std::int64_t factor) const {
    if (times_ns_ == nullptr) return;
    const std::vector<std::int64_t>& waited_ns = sync_.wait_times_ns();
    for (std::size_t rank = 0; rank < waited_ns.size(); ++rank) times_ns_[rank] += factor * waited_ns[rank];
  }

  const call::CallSync& sync_;
  std::int64_t* times_ns_;
};

}  // namespace

Status CpuBackend::make_latency_dispatch(const LatencyDispatchCall& call, const std::shared_ptr<CpuRouting>& routing) {
  const AddedWaitTimes added(*sync_, call.record, call.wait_times_ns);
  if (survivors_) {
    const Context context = call_context();
    const bool quantizes = call.record.code == ErrorCode::kOk && call.dispatch.quantize != Quantization::kNone;
    Status status = intranode::dispatch_among(call, quantizes ? quantize_rows(call.dispatch) : call.dispatch, routing,
                                              context, *survivors_);
    if (status.ok()) {
      staging_.route_is_over();
      count_dispatch(call, *routing);
    }
    return as_error_of(to_string(call.record.operation), status);
  }
  RouteCall route = call.route;
  route.record = call.record;
  Status status = fill_routing(route, routing);
  if (!status.ok()) return as_error_of(to_string(call.record.operation), status);
  write_source_ranges(*routing);
  DispatchCall dispatch = call.dispatch;
  dispatch.routing = routing;
  // Route has compared all arguments: this record only reports whether there is room.
  dispatch.record.operation = call.record.operation;
  status = make_dispatch(dispatch);
  if (status.ok()) count_dispatch(call, *routing);
  return as_error_of(to_string(call.record.operation), status);
}

Status CpuBackend::make_latency_combine(const LatencyCombineCall& latency_call) {
  const AddedWaitTimes added(*sync_, latency_call.combine.record, latency_call.wait_times_ns);
  const CombineCall& call = latency_call.combine;
  if (call.record.code == ErrorCode::kOk && latency_call.signals.present()) {
    if (!sync_->broken().ok()) return sync_->broken();
    // The first step of a combine may copy rows.
    if (Status status = await_tiles(latency_call, sync_->state()); !status.ok()) return status;
  }
  if (!survivors_) return as_error_of(to_string(Operation::kLatencyCombine), make_combine(call));
  const Context context = call_context();
  Status status = intranode::combine(call, context, &*survivors_);
  if (status.ok()) staging_.route_is_over();
  return as_error_of(to_string(Operation::kLatencyCombine), status);
}

Status CpuBackend::make_pending(PendingCalls::Call& call) {
  if (const auto* combine = std::get_if<LatencyCombineCall>(&call.arguments)) {
    return make_latency_combine(*combine);
  }
  // Core hands Routings out as const, and this one is still under construction.
  const auto routing = std::const_pointer_cast<RoutingState>(call.routing);
  return make_latency_dispatch(std::get<LatencyDispatchCall>(call.arguments),
                               std::static_pointer_cast<CpuRouting>(routing));
}

void CpuBackend::make_pending_calls() {
  pending_.make_all([this](PendingCalls::Call& call) { return make_pending(call); });
}

Result<std::shared_ptr<RoutingState>> CpuBackend::latency_dispatch(const LatencyDispatchCall& call) try {
  if (!sync_->broken().ok()) return sync_->broken();
  const bool refused = call.record.code != ErrorCode::kOk;
  std::shared_ptr<CpuRouting> routing = refused ? std::make_shared<CpuRouting>(spare_tables_)
                                                : begin_slab_routing(call, sync_->topology(), spare_tables_);
  if (call.split && !refused) {
    pending_.add({routing, call, {}});
    return std::shared_ptr<RoutingState>(std::move(routing));
  }
  make_pending_calls();
  if (Status status = make_latency_dispatch(call, routing); !status.ok()) return status;
  return std::shared_ptr<RoutingState>(std::move(routing));
} catch (const std::bad_alloc&) {
  return sync_->out_of_memory(Operation::kLatencyDispatch);
}

Status CpuBackend::latency_combine(const LatencyCombineCall& call) try {
  if (!sync_->broken().ok()) return sync_->broken();
  if (call.split && call.combine.record.code == ErrorCode::kOk) {
    pending_.add({call.combine.routing, call, {}});
    return {};
  }
  make_pending_calls();
  return make_latency_combine(call);
} catch (const std::bad_alloc&) {
  return sync_->out_of_memory(Operation::kLatencyCombine);
}

Status CpuBackend::latency_receive(const LatencyReceiveCall& call, bool& made) try {
  made = true;
  Status status = pending_.receive(call.routing, [this](PendingCalls::Call& pending) { return make_pending(pending); });
  if (status.ok()) count_received(call.routing);
  return status;
} catch (const std::bad_alloc&) {
  return sync_->out_of_memory(Operation::kLatencyDispatch);
}

Status CpuBackend::update_mask(int rank, bool masked, Stream /*stream*/) try {
  if (!sync_->broken().ok()) return sync_->broken();
  make_pending_calls();
  for (int other = 0; other < sync_->topology().num_ranks; ++other) {
    if (other == rank || (rank == kEveryRank && other != sync_->rank())) survivors_->update(other, masked);
  }
  return sync_->broken();
} catch (const std::bad_alloc&) {
  return sync_->out_of_memory(Operation::kLatencyDispatch);
}

Status CpuBackend::query_mask(std::int32_t* out, Stream /*stream*/) try {
  if (!sync_->broken().ok()) return sync_->broken();
  make_pending_calls();
  survivors_->query(out);
  return sync_->broken();
} catch (const std::bad_alloc&) {
  return sync_->out_of_memory(Operation::kLatencyDispatch);
}

}  // namespace ferry::cpu
