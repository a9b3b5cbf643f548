#include "cuda/internode/kernel_routing.hpp"

#include <fmt/format.h>

namespace ferry::cuda::internode {
namespace {

/// Most items of a node: places of items have 32 bits, shared by the largest number of nodes.
constexpr std::int64_t kMaxRoutedTokens = INT32_MAX / kMaxNodes;

NodeRouteInput input_of(const KernelRoute& route) {
  const RouteCall& call = route.call;
  NodeRouteInput input;
  input.topk_idx = call.topk_idx.data;
  input.wide_ids = call.topk_idx.dtype == DType::kInt64;
  input.num_tokens_view = static_cast<const std::int32_t*>(call.num_tokens_view.data);
  input.weights = static_cast<const float*>(call.topk_weights.data);
  input.num_tokens = call.num_tokens;
  input.max_tokens = route.max_tokens;
  input.num_topk = call.num_topk;
  input.num_experts = static_cast<int>(call.options.num_experts);
  input.layout = call.options.layout;
  input.expert_alignment = call.options.expert_alignment;
  input.slab_capacity = call.options.slab_capacity;
  input.max_recv_rows = call.options.max_recv_rows;
  input.counters = counter_tables(call.options.counters);
  return input;
}

std::int64_t bounded_rows(const RouteOptions& options, std::int64_t num_local_experts) {
  return options.layout == Layout::kSlab ? num_local_experts * options.slab_capacity : options.max_recv_rows;
}

void set_views(NodesRouting& routing, const NodeTables& nodes, bool weights) {
  const auto num_local = static_cast<std::int64_t>(routing.local_expert_ids.size());
  routing.num_used_rows_view = ConstTensorView(&nodes.summary->num_used_rows, DType::kInt32, {1});
  routing.rows_per_expert_view = ConstTensorView(nodes.rows_per_expert, DType::kInt32, {num_local});
  if (routing.layout != Layout::kTokens) {
    routing.expert_rows_view = ConstTensorView(nodes.expert_rows, DType::kInt64, {routing.num_experts});
    routing.row_offsets_view = ConstTensorView(nodes.row_offsets, DType::kInt64, {num_local + 1});
  }
  routing.source = ConstTensorView(nodes.source, DType::kInt32, {routing.num_recv_rows, 2});
  routing.slots = ConstTensorView(nodes.slots, DType::kInt32, {routing.num_tokens, routing.num_topk});
  routing.topk_idx = ConstTensorView(nodes.ids, DType::kInt64, {routing.num_tokens, routing.num_topk});
  if (weights) {
    routing.topk_weights = ConstTensorView(nodes.weights, DType::kFloat32, {routing.num_tokens, routing.num_topk});
  }
}

Status check_sizes(const KernelRoute& route, std::int64_t num_local_experts) {
  const RouteOptions& options = route.call.options;
  const std::int64_t most_experts = most_experts_of(route.call);
  if (most_experts > kMaxExperts || route.max_tokens > kMaxRoutedTokens) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("{}: num_experts is {} and max_tokens is {}; the CUDA backend takes up to {} and {} over "
                              "several nodes",
                              route.name, most_experts, route.max_tokens, kMaxExperts, kMaxRoutedTokens));
  }
  if (bounded_rows(options, num_local_experts) > INT32_MAX) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: slab_capacity is {}: {} experts have {} rows, expected at most {}", route.name,
                    options.slab_capacity, num_local_experts, bounded_rows(options, num_local_experts), INT32_MAX));
  }
  return {};
}

}  // namespace

Result<NodeRouteInput> begin_routing(Context& context, Placements& placements, const KernelRoute& route,
                                     NodesRouting& routing) {
  const Parts& parts = context.parts();
  const Topology& topology = parts.sync->topology();
  const RouteCall& call = route.call;
  Result<std::shared_ptr<const Placement>> placement = placements.find(call.placement);
  if (!placement.ok()) return placement.status();
  Result<BuiltHomes> homes =
      prepare_homes(call, *parts.memory, {topology.rank, topology.ranks_per_node, (*placement)->tables.owner});
  if (!homes.ok()) return homes.status();
  routing.homes = std::move(*homes);
  routing.placement = *placement;
  routing.local_expert_ids = (*placement)->local_expert_ids;
  routing.num_tokens = call.num_tokens;
  routing.num_topk = call.num_topk;
  routing.num_experts = call.options.num_experts;
  routing.layout = call.options.layout;
  NodeRouteInput input = input_of(route);
  input.num_local_experts = static_cast<int>(routing.local_expert_ids.size());
  if (Status status = check_sizes(route, input.num_local_experts); !status.ok()) return status;
  routing.num_recv_rows = bounded_rows(call.options, input.num_local_experts);
  routing.num_used_rows = routing.num_recv_rows;
  const bool weights = call.topk_weights.present();
  const NodeTables::Shape shape = bounded_tables(topology, input, routing.num_recv_rows, weights);
  Result<std::shared_ptr<std::byte>> memory = parts.memory->take(NodeTables::at(nullptr, shape).size_bytes);
  if (!memory.ok()) return memory.status();
  routing.memory = *memory;
  const NodeTables tables = NodeTables::at(memory->get(), shape);
  set_views(routing, tables, weights);
  input.placement = routing.placement->tables;
  if (routing.homes.present()) {
    input.placement.homes = routing.homes.tables();
    input.homes = routing.homes.params;
  }
  input.tables = tables;
  routing.routed = bounded_tokens(topology, input, routing.num_recv_rows);
  if (route.captured) {
    Status status = mark_not_routed(route.name, tables.summary, parts.stream->get());
    if (!status.ok()) return status;
    return input;
  }
  Result<RouteResultTables> host =
      routing.expect_counts({parts.memory, parts.pinned, parts.report}, topology.num_ranks, context.timeout_ns());
  if (!host.ok()) return host.status();
  routing.count_calls_apart();
  input.host = *host;
  return input;
}

}  // namespace ferry::cuda::internode
