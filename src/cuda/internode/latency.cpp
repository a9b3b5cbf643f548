#include "cuda/internode/latency.hpp"

#include <fmt/format.h>

#include <new>
#include <string_view>

#include "core/checks.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "plan/carver.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda::internode {
namespace {

/// Kernels keep four tables of so many tokens of each rank: of batches that latency mode is for, and far beyond.
constexpr std::int64_t kMaxTokens = 1 << 16;

constexpr std::string_view kDispatch = "latency_dispatch";

/// Tables of the Routing of one call.
struct Tables {
  NodeTables nodes;
  std::int32_t* source_ranges = nullptr;
  std::size_t size_bytes = 0;

  static Tables at(std::byte* base, const NodeTables::Shape& shape) {
    Tables tables;
    tables.nodes = NodeTables::at(base, shape);
    plan::Carver carver(base == nullptr ? nullptr : base + tables.nodes.size_bytes);
    tables.source_ranges = carver.take<std::int32_t>(shape.num_local_experts * shape.num_ranks * 2);
    tables.size_bytes = tables.nodes.size_bytes + carver.used_bytes();
    return tables;
  }
};

NodeRouteInput input_of(const LatencyDispatchCall& call) {
  const RouteCall& route = call.route;
  NodeRouteInput input;
  input.topk_idx = route.topk_idx.data;
  input.wide_ids = route.topk_idx.dtype == DType::kInt64;
  input.num_tokens_view = static_cast<const std::int32_t*>(route.num_tokens_view.data);
  input.weights = static_cast<const float*>(route.topk_weights.data);
  input.num_tokens = route.num_tokens;
  input.max_tokens = call.max_tokens;
  input.num_topk = route.num_topk;
  input.num_experts = static_cast<int>(route.options.num_experts);
  input.num_local_experts = static_cast<int>(call.num_local_experts);
  input.layout = Layout::kSlab;
  input.slab_capacity = route.options.slab_capacity;
  input.latency = true;
  return input;
}

void set_views(NodesLatencyRouting& routing, const Tables& tables, int num_ranks, bool weights) {
  const NodeTables& nodes = tables.nodes;
  const auto num_local = static_cast<std::int64_t>(routing.local_expert_ids.size());
  routing.num_used_rows_view = ConstTensorView(&nodes.summary->num_used_rows, DType::kInt32, {1});
  routing.rows_per_expert_view = ConstTensorView(nodes.rows_per_expert, DType::kInt32, {num_local});
  routing.row_offsets_view = ConstTensorView(nodes.row_offsets, DType::kInt64, {num_local + 1});
  routing.source = ConstTensorView(nodes.source, DType::kInt32, {routing.num_recv_rows, 2});
  routing.source_ranges = ConstTensorView(tables.source_ranges, DType::kInt32, {num_local, num_ranks, 2});
  routing.slots = ConstTensorView(nodes.slots, DType::kInt32, {routing.num_tokens, routing.num_topk});
  routing.topk_idx = ConstTensorView(nodes.ids, DType::kInt64, {routing.num_tokens, routing.num_topk});
  if (weights) {
    routing.topk_weights = ConstTensorView(nodes.weights, DType::kFloat32, {routing.num_tokens, routing.num_topk});
  }
}

Status check_sizes(const LatencyDispatchCall& call) {
  if (call.route.options.num_experts > kMaxExperts || call.max_tokens > kMaxTokens) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("{}: num_experts is {} and max_tokens is {}; the CUDA backend takes up to {} and {} over "
                              "several nodes",
                              kDispatch, call.route.options.num_experts, call.max_tokens, kMaxExperts, kMaxTokens));
  }
  const std::int64_t num_rows = call.num_local_experts * call.route.options.slab_capacity;
  if (num_rows > INT32_MAX) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: slab_capacity is {}: {} experts have {} rows, expected at most {}", kDispatch,
                              call.route.options.slab_capacity, call.num_local_experts, num_rows, INT32_MAX));
  }
  return {};
}

}  // namespace

Result<std::shared_ptr<NodesLatencyRouting>> NodesLatency::begin_routing(const LatencyDispatchCall& call, bool captured,
                                                                         NodeRouteInput& input) {
  const Parts& parts = context_.parts();
  const Topology& topology = parts.sync->topology();
  const RouteCall& route = call.route;
  Result<std::shared_ptr<const Placement>> placement = placements_.find(route.placement->expert_to_rank);
  if (!placement.ok()) return placement.status();
  auto routing = std::make_shared<NodesLatencyRouting>();
  routing->placement = *placement;
  routing->local_expert_ids = (*placement)->local_expert_ids;
  routing->num_tokens = route.num_tokens;
  routing->num_topk = route.num_topk;
  routing->num_experts = route.options.num_experts;
  routing->layout = Layout::kSlab;
  routing->num_recv_rows = call.num_local_experts * route.options.slab_capacity;
  routing->num_used_rows = routing->num_recv_rows;
  const bool weights = route.topk_weights.present();
  const NodeTables::Shape shape = bounded_tables(topology, input, routing->num_recv_rows, weights);
  Result<std::shared_ptr<std::byte>> memory = parts.memory->take(Tables::at(nullptr, shape).size_bytes);
  if (!memory.ok()) return memory.status();
  routing->memory = *memory;
  const Tables tables = Tables::at(memory->get(), shape);
  set_views(*routing, tables, topology.num_ranks, weights);
  input.placement = routing->placement->tables;
  input.tables = tables.nodes;
  input.source_ranges = tables.source_ranges;
  routing->routed = bounded_tokens(topology, input, routing->num_recv_rows);
  if (captured) {
    Status status = mark_not_routed(kDispatch, tables.nodes.summary, parts.stream->get());
    if (!status.ok()) return status;
    return routing;
  }
  Result<RouteResultTables> host =
      routing->expect_counts({parts.memory, parts.pinned, parts.report}, topology.num_ranks, context_.timeout_ns());
  if (!host.ok()) return host.status();
  input.host = *host;
  return routing;
}

Result<std::shared_ptr<RoutingState>> NodesLatency::make_dispatch(const LatencyDispatchCall& call) {
  const auto refused = [this, &call](const Status& status) {
    return refuse(context_, call.record, call.stream, as_error_of(kDispatch, status));
  };
  if (Status status = status_of(call.record); !status.ok()) return refused(status);
  const Result<bool> captured = context_.check_stream(kDispatch, call.stream);
  if (!captured.ok()) return refused(captured.status());
  Status status = check_sizes(call);
  if (status.ok()) status = check_route_memory(call.route, *context_.parts().arena);
  if (!status.ok()) return refused(status);
  NodeRouteInput input = input_of(call);
  Result<std::shared_ptr<NodesLatencyRouting>> made = begin_routing(call, *captured, input);
  if (!made.ok()) return refused(made.status());
  NodesLatencyRouting& routing = **made;
  DispatchCall rows = call.dispatch;
  rows.record = call.record;
  rows.routing = *made;
  const bool aside = call.split && !*captured;
  if (aside) {
    Result<std::shared_ptr<StreamPoint>> sent = StreamPoint::create();
    if (!sent.ok()) return refused(sent.status());
    routing.sent = std::move(*sent);
    const Result<Stream> stream = side_->fork(kDispatch, call.stream);
    if (!stream.ok()) return refused(stream.status());
    rows.stream = *stream;
  }
  status = internode::make_dispatch(context_, {rows, routing.routed, false, *captured, &input});
  if (!status.ok()) return status;
  if (aside) {
    if (status = side_->mark(kDispatch, *routing.sent); !status.ok()) return context_.fail(status);
  } else if (!call.split) {
    routing.received.store(!*captured, std::memory_order_release);
  }
  return std::shared_ptr<RoutingState>(std::move(*made));
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
  CombineCall rows = call.combine;
  const bool aside = call.split && !*captured;
  routing.sent = nullptr;
  if (aside) {
    Result<std::shared_ptr<StreamPoint>> sent = StreamPoint::create();
    if (!sent.ok()) return refused(sent.status());
    routing.sent = std::move(*sent);
    const Result<Stream> stream = side_->fork(kName, rows.stream);
    if (!stream.ok()) return refused(stream.status());
    rows.stream = *stream;
  }
  Status status = internode::make_combine(context_, rows, routing.routed, *captured);
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
    if (*captured) {
      return Status(ErrorCode::kUnsupported,
                    fmt::format("{}: the stream is being captured, and was not when the call was sent; over several "
                                "nodes capture both halves, or neither",
                                kName));
    }
    const cudaError_t error =
        cudaStreamWaitEvent(static_cast<cudaStream_t>(call.stream.handle), routing.sent->get(), 0);
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
