#include "cuda/internode/memory_required.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/context/rail_link.hpp"
#include "cuda/internode/steps.hpp"
#include "node/page_heap.hpp"
#include "plan/carver.hpp"
#include "plan/to_size.hpp"
#include "rail/rails.hpp"

namespace ferry::cuda::internode {
namespace {

using node::round_up_to_page;

struct CallMemory {
  std::size_t tables_bytes = 0;
  RoutedTokens routed;
};

/// Bytes of a Routing that the hosts make.
CallMemory host_routing(const MemoryShape& shape, const Topology& topology) {
  const std::int64_t num_others = topology.num_nodes() - 1;
  CallMemory memory;
  RoutedTokens& routed = memory.routed;
  routed.num_tokens = shape.num_tokens;
  routed.num_topk = shape.num_topk;
  routed.num_items_back = shape.num_tokens * std::min<std::int64_t>(shape.num_topk, num_others);
  routed.num_items_in = shape.num_node_tokens + shape.num_forwarded_tokens;
  const NodeTables::Shape tables{.num_ranks = to_size(topology.num_ranks),
                                 .num_nodes = to_size(topology.num_nodes()),
                                 .num_tokens = to_size(shape.num_tokens),
                                 .num_topk = to_size(shape.num_topk),
                                 .num_local_experts = num_local_experts(shape),
                                 .num_items_out = to_size(shape.num_node_tokens + routed.num_items_back),
                                 .num_items_in = to_size(routed.num_items_in),
                                 .num_rows = to_size(shape.num_recv_rows),
                                 .num_used_rows = to_size(shape.num_recv_rows),
                                 .by_token = shape.layout == Layout::kTokens,
                                 .weights = shape.weights};
  memory.tables_bytes = NodeTables::at(nullptr, tables).size_bytes;
  return memory;
}

std::size_t dispatch_bytes(const MemoryShape& shape, const CallMemory& call) {
  DispatchTensors tensors;
  tensors.row_bytes = shape.quantized_row_bytes > 0 ? shape.quantized_row_bytes : shape.row_bytes;
  tensors.format = plan::TokenRecord::of({shape.scale_row_bytes, shape.num_topk, shape.weights, shape.weights, false});
  return DispatchStaging::at(nullptr, call.routed, tensors).size_bytes;
}

/// The largest combine: weighted, and with returned weights if the shape has any.
std::size_t combine_bytes(const MemoryShape& shape, const CallMemory& call) {
  CombineTensors tensors;
  tensors.row_bytes = shape.row_bytes;
  tensors.weighted = true;
  tensors.returns_weights = shape.weights;
  // Copies of memory that ranks of the node cannot reach; each begins at a cache line.
  const auto num_rows = to_size(shape.num_recv_rows);
  const std::size_t weights_per_row = shape.layout == Layout::kTokens ? to_size(shape.num_topk) : 1;
  plan::Carver copies(nullptr);
  if (!shape.symmetric) copies.take<std::byte>(num_rows * to_size(shape.row_bytes));
  if (shape.weights && !shape.symmetric_tables) copies.take<float>(num_rows * weights_per_row);
  return copies.used_bytes() + CombineStaging::at(nullptr, {}, call.routed, tensors).size_bytes;
}

}  // namespace

Result<std::size_t> bytes_required(const MemoryShape& shape, const Topology& topology, const CallBytes* latency) {
  if (topology.ranks_per_node > kMaxRanks || topology.num_nodes() > kMaxNodes) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("bytes_required: {} ranks in {} nodes; this build's CUDA backend connects up to {} ranks "
                              "of a node and up to {} nodes",
                              topology.num_ranks, topology.num_nodes(), kMaxRanks, kMaxNodes));
  }
  const auto num_nodes = to_size(topology.num_nodes());
  const CallMemory call = host_routing(shape, topology);
  const bool quantizes = shape.quantized_row_bytes > 0;
  const auto num_rows = to_size(shape.num_recv_rows);
  const auto num_tokens = to_size(shape.num_tokens);
  const std::size_t quantized_bytes =
      quantizes ? num_tokens * to_size(shape.quantized_row_bytes + shape.scale_row_bytes) : 0;
  const CallBytes others{round_up_to_page(call.tables_bytes),
                         round_up_to_page(std::max(dispatch_bytes(shape, call), combine_bytes(shape, call))) +
                             round_up_to_page(quantized_bytes)};
  const CallBytes& calls = latency != nullptr ? *latency : others;
  const std::size_t staging_bytes = round_up_to_page(sizeof(RailState)) + round_up_to_page(sizeof(RailLog)) +
                                    placement_bytes(shape, topology) +
                                    to_size(shape.num_routings) * calls.routing_bytes + calls.staging_bytes;
  const std::size_t received_row_bytes = to_size(quantizes ? shape.quantized_row_bytes : shape.row_bytes);
  const std::size_t buffers_bytes = shape.symmetric ? round_up_to_page(num_tokens * to_size(shape.row_bytes)) +
                                                          round_up_to_page(num_rows * received_row_bytes) +
                                                          round_up_to_page(num_rows * to_size(shape.row_bytes))
                                                    : 0;
  return round_up_to_page(Control::at(nullptr, to_size(topology.ranks_per_node)).size_bytes) +
         rail::Rails::memory_bytes(topology, rail::kernel_ring_shape(num_nodes)) + staging_bytes + buffers_bytes;
}

}  // namespace ferry::cuda::internode
