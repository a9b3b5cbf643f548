#include "cuda/call/memory_required.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/call/routing_tables.hpp"
#include "cuda/call/verify_tables.hpp"
#include "cuda/numeric/wire_row.hpp"
#include "cuda/placement/homes.hpp"
#include "cuda/sync/control.hpp"
#include "node/page_heap.hpp"
#include "plan/to_size.hpp"
#include "plan/token_record.hpp"

namespace ferry::cuda {
namespace {

using node::round_up_to_page;

std::size_t routing_bytes(const MemoryShape& shape) {
  const RoutingTables::Shape tables{.num_ranks = to_size(shape.num_ranks),
                                    .num_tokens = to_size(shape.num_tokens),
                                    .num_topk = to_size(shape.num_topk),
                                    .num_experts = to_size(shape.num_experts),
                                    .num_local_experts = num_local_experts(shape),
                                    .num_blocks = to_size(RouteBlocks::of(shape.num_tokens).num_blocks),
                                    .weights = shape.weights};
  return round_up_to_page(RoutingTables::at(nullptr, tables).size_bytes) +
         round_up_to_page(source_bytes(shape.num_recv_rows));
}

/// Staging of dispatch's records or of combine's weights, whichever is larger.
std::size_t records_bytes(const MemoryShape& shape) {
  const bool by_token = shape.layout == Layout::kTokens;
  const auto num_rows = to_size(shape.num_recv_rows);
  const plan::TokenRecord record = plan::TokenRecord::of(
      {shape.scale_row_bytes, shape.num_topk, by_token && shape.weights, shape.weights, !by_token});
  const bool unpacks = !shape.symmetric_tables && (shape.scale_row_bytes > 0 || shape.weights);
  const bool takes_records = unpacks || (!shape.symmetric && record.has_rows);
  const std::size_t weights_per_row = by_token ? to_size(shape.num_topk) : 1;
  const std::size_t weights_bytes =
      shape.weights && !shape.symmetric_tables ? num_rows * weights_per_row * sizeof(float) : 0;
  return std::max(takes_records ? num_rows * to_size(record.size_bytes()) : 0, weights_bytes);
}

/// Checksums of dispatch's destinations or of combine's rows, whichever are more (GroupOptions::verify).
std::size_t verify_bytes(const MemoryShape& shape) {
  if (!shape.verify) return 0;
  const std::size_t num_entries = to_size(shape.num_tokens) * to_size(shape.num_topk);
  return std::max(VerifyTables::of_dispatch(nullptr, num_entries).size_bytes,
                  VerifyTables::of_combine(nullptr, to_size(shape.num_recv_rows)).size_bytes);
}

}  // namespace

std::size_t num_local_experts(const MemoryShape& shape) {
  const std::int64_t most = (shape.num_experts + shape.num_ranks - 1) / shape.num_ranks;
  return to_size(shape.num_local_experts < 0 ? most : shape.num_local_experts);
}

std::size_t placement_bytes(const MemoryShape& shape, const Topology& topology) {
  const std::int64_t num_listed = shape.placement_on_device ? 0 : shape.num_logical_experts;
  const std::size_t tables_bytes = round_up_to_page(
      PlacementParts::at(nullptr, to_size(shape.num_experts), to_size(topology.num_ranks), to_size(num_listed))
          .size_bytes);
  if (!shape.placement_on_device) return tables_bytes;
  const std::size_t homes_bytes = built_homes_bytes(to_size(shape.num_experts), to_size(shape.num_logical_experts));
  return tables_bytes + to_size(shape.num_routings) * round_up_to_page(homes_bytes);
}

CallBytes call_bytes(const MemoryShape& shape) {
  const bool quantizes = shape.quantized_row_bytes > 0;
  const std::int64_t received_row_bytes = quantizes ? shape.quantized_row_bytes : shape.row_bytes;
  std::int64_t staged_row_bytes = shape.symmetric ? 0 : std::max(received_row_bytes, shape.row_bytes);
  if (shape.combine_fp8_hidden > 0) {
    // Wherever combine's input is; plain memory stages dispatch's output too.
    staged_row_bytes = std::max(shape.symmetric ? 0 : received_row_bytes, wire_row_bytes(shape.combine_fp8_hidden));
  }
  const std::int64_t quantized_row_bytes = quantizes ? shape.quantized_row_bytes + shape.scale_row_bytes : 0;
  return {routing_bytes(shape), round_up_to_page(verify_bytes(shape)) + round_up_to_page(records_bytes(shape)) +
                                    round_up_to_page(to_size(shape.num_recv_rows) * to_size(staged_row_bytes)) +
                                    round_up_to_page(to_size(shape.num_tokens) * to_size(quantized_row_bytes))};
}

Result<std::size_t> bytes_required(const MemoryShape& shape, const Topology& topology, const CallBytes& calls) {
  if (topology.num_ranks > kMaxRanks) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("bytes_required: {} ranks of one node; this build's CUDA backend connects up to {}",
                              topology.num_ranks, kMaxRanks));
  }
  const auto num_ranks = to_size(topology.num_ranks);
  const std::size_t returned_bytes = to_size(shape.num_recv_rows) * to_size(shape.row_bytes);
  const bool quantizes = shape.quantized_row_bytes > 0;
  const std::size_t received_bytes =
      quantizes ? to_size(shape.num_recv_rows) * to_size(shape.quantized_row_bytes) : returned_bytes;
  const std::size_t x_bytes = to_size(shape.num_tokens) * to_size(shape.row_bytes);
  const std::size_t staging_bytes = round_up_to_page(shape.latency_bytes) + placement_bytes(shape, topology) +
                                    to_size(shape.num_routings) * calls.routing_bytes + calls.staging_bytes;
  const std::size_t buffers_bytes =
      shape.symmetric ? round_up_to_page(x_bytes) + round_up_to_page(received_bytes) + round_up_to_page(returned_bytes)
                      : 0;
  return round_up_to_page(Control::at(nullptr, num_ranks).size_bytes) + staging_bytes + buffers_bytes;
}

}  // namespace ferry::cuda
