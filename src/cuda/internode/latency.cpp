#include "cuda/internode/latency.hpp"

#include <fmt/format.h>

#include <new>
#include <string_view>

#include "core/checks.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/internode/kernel_routing.hpp"
#include "cuda/memory/memory_checks.hpp"

namespace ferry::cuda::internode {
namespace {

constexpr std::string_view kDispatch = "latency_dispatch";

}  // namespace

Result<std::shared_ptr<RoutingState>> NodesLatency::make_dispatch(const LatencyDispatchCall& call) {
  const auto refused = [this, &call](const Status& status) {
    return refuse(context_, call.record, call.stream, as_error_of(kDispatch, status));
  };
  if (Status status = status_of(call.record); !status.ok()) return refused(status);
  const Result<bool> captured = context_.check_stream(kDispatch, call.stream);
  if (!captured.ok()) return refused(captured.status());
  if (Status status = check_route_memory(call.route, *context_.parts().arena); !status.ok()) return refused(status);
  if (Status status = check_wait_times_memory(kDispatch, call.wait_times_ns, *context_.parts().arena); !status.ok()) {
    return refused(status);
  }
  auto made = std::make_shared<NodesLatencyRouting>();
  NodesLatencyRouting& routing = *made;
  const Result<NodeRouteInput> input =
      begin_routing(context_, placements_, {call.route, kDispatch, call.max_tokens, true, *captured}, routing);
  if (!input.ok()) return refused(input.status());
  DispatchCall rows = call.dispatch;
  rows.record = call.record;
  rows.routing = made;
  const bool aside = call.split && !*captured;
  if (aside) {
    Result<std::shared_ptr<StreamPoint>> sent = side_->point();
    if (!sent.ok()) return refused(sent.status());
    routing.sent = std::move(*sent);
    const Result<Stream> stream = side_->fork(kDispatch, call.stream);
    if (!stream.ok()) return refused(stream.status());
    rows.stream = *stream;
  }
  Status status =
      internode::make_dispatch(context_, {rows, routing.routed, false, *captured, &*input, call.wait_times_ns});
  if (!status.ok()) return status;
  if (aside) {
    if (status = side_->mark(kDispatch, *routing.sent); !status.ok()) return context_.fail(status);
  } else if (!call.split) {
    routing.received.store(!*captured, std::memory_order_release);
  }
  return std::shared_ptr<RoutingState>(std::move(made));
}

Status NodesLatency::make_combine(const LatencyCombineCall& call) {
  constexpr std::string_view kName = "latency_combine";
  const auto refused = [this, &call](const Status& status) {
    return refuse(context_, call.combine.record, call.combine.stream, status);
  };
  if (Status status = status_of(call.combine.record); !status.ok()) return refused(status);
  // Core hands out Routings as const; what its receive half needs is kept in this one.
  auto& routing = static_cast<NodesLatencyRouting&>(const_cast<RoutingState&>(*call.combine.routing));
  const Result<bool> captured = context_.check_stream(kName, call.combine.stream);
  if (!captured.ok()) return refused(captured.status());
  if (Status status = check_wait_times_memory(kName, call.wait_times_ns, *context_.parts().arena); !status.ok()) {
    return refused(status);
  }
  CombineCall rows = call.combine;
  const bool aside = call.split && !*captured;
  routing.sent = nullptr;
  if (aside) {
    Result<std::shared_ptr<StreamPoint>> sent = side_->point();
    if (!sent.ok()) return refused(sent.status());
    routing.sent = std::move(*sent);
    const Result<Stream> stream = side_->fork(kName, rows.stream);
    if (!stream.ok()) return refused(stream.status());
    rows.stream = *stream;
  }
  Status status = internode::make_combine(context_, rows, routing.routed, *captured, call.wait_times_ns);
  if (!status.ok() || !aside) return status;
  status = side_->mark(kName, *routing.sent);
  return status.ok() ? status : context_.fail(status);
}

Status NodesLatency::make_receive(const LatencyReceiveCall& call, bool& made) {
  constexpr std::string_view kName = "latency_receive";
  auto& routing = static_cast<NodesLatencyRouting&>(const_cast<RoutingState&>(*call.routing));
  const Result<bool> captured = context_.check_stream(kName, call.stream);
  if (!captured.ok()) return captured.status();
  if (routing.sent != nullptr) {
    // A graph waits for the call when it runs.
    if (*captured) routing.awaited_by_graphs.push_back(routing.sent);
    const unsigned flags = *captured ? cudaEventWaitExternal : cudaEventWaitDefault;
    const cudaError_t error =
        cudaStreamWaitEvent(static_cast<cudaStream_t>(call.stream.handle), routing.sent->get(), flags);
    if (error != cudaSuccess) return runtime_status(error, fmt::format("{}: waiting for the call", kName));
  }
  const bool reports = routing.host.result != nullptr;
  if (routing.latency_phase != LatencyPhase::kCombineSent) routing.received.store(reports, std::memory_order_release);
  made = true;
  return {};
}

Result<std::shared_ptr<RoutingState>> NodesLatency::dispatch(const LatencyDispatchCall& call) try {
  const DeviceGuard guard(context_.parts().device);
  if (!guard.status().ok()) return context_.fail(guard.status());
  return make_dispatch(call);
} catch (const std::bad_alloc&) {
  return context_.out_of_memory(Operation::kLatencyDispatch);
}

Status NodesLatency::combine(const LatencyCombineCall& call) try {
  const DeviceGuard guard(context_.parts().device);
  if (!guard.status().ok()) return context_.fail(guard.status());
  return make_combine(call);
} catch (const std::bad_alloc&) {
  return context_.out_of_memory(Operation::kLatencyCombine);
}

Status NodesLatency::receive(const LatencyReceiveCall& call, bool& made) try {
  const DeviceGuard guard(context_.parts().device);
  if (!guard.status().ok()) return context_.fail(guard.status());
  return make_receive(call, made);
} catch (const std::bad_alloc&) {
  return context_.out_of_memory(Operation::kLatencyDispatch);
}

}  // namespace ferry::cuda::internode
