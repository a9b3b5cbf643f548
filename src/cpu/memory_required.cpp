#include "cpu/memory_required.hpp"

#include <algorithm>

#include "call/call_sync.hpp"
#include "cpu/rows/wire_rows.hpp"
#include "node/arena.hpp"
#include "plan/checksum_table.hpp"
#include "plan/forward_table.hpp"
#include "plan/peer_counts.hpp"
#include "plan/route_tables.hpp"
#include "plan/to_size.hpp"
#include "plan/token_record.hpp"

namespace ferry::cpu {
namespace {

using node::round_up_to_page;

/// Staging of route on one node: the tables that each rank publishes, in two blocks that alternate.
std::size_t tables_bytes(const MemoryShape& shape) {
  const std::size_t num_entries = to_size(shape.num_tokens) * to_size(shape.num_topk);
  return 2 * round_up_to_page(
                 plan::RouteTables::at(nullptr, {to_size(shape.num_ranks), to_size(shape.num_experts), num_entries})
                     .size_bytes);
}

/// Staging of route over several nodes: counts of the ranks of the rail, and their tables for this node.
std::size_t tables_bytes(const MemoryShape& shape, const Topology& topology) {
  const auto num_nodes = to_size(topology.num_nodes());
  const std::size_t counts = plan::PeerCounts::at(nullptr, topology, shape.num_experts).wire_bytes * num_nodes;
  const std::size_t forward = plan::forward_tables_bytes(
      num_nodes, {shape.num_node_tokens + shape.num_forwarded_tokens, shape.num_node_entries});
  return 2 * (round_up_to_page(counts) + round_up_to_page(forward));
}

}  // namespace

Result<std::size_t> bytes_required(const MemoryShape& shape, const Topology& topology) {
  const bool several_nodes = topology.num_nodes() > 1;
  const auto num_tokens = to_size(shape.num_tokens);
  const auto num_rows = to_size(shape.num_recv_rows);
  const std::size_t num_used_rows = shape.num_used_rows < 0 ? num_rows : to_size(shape.num_used_rows);
  const auto row_bytes = to_size(shape.row_bytes);
  const bool quantizes = shape.quantized_row_bytes > 0;
  const std::size_t dispatched_row_bytes = quantizes ? to_size(shape.quantized_row_bytes) : row_bytes;

  const bool weights_travel = shape.weights && shape.max_tokens == 0;
  const plan::TokenRecord record =
      plan::TokenRecord::of({shape.scale_row_bytes, shape.num_topk, weights_travel, weights_travel, false});
  const std::size_t checksum_bytes = shape.verify ? to_size(plan::kChecksumWords) * sizeof(std::int32_t) : 0;
  const std::size_t num_records = num_tokens + (several_nodes ? to_size(shape.num_forwarded_tokens) : 0);
  const std::size_t records_bytes = (to_size(record.size_bytes()) + checksum_bytes) * num_records;
  const std::size_t weights_per_row = shape.layout == Layout::kTokens ? to_size(shape.num_topk) : 1;
  const std::size_t weights_bytes = weights_travel ? num_rows * weights_per_row * sizeof(float) : 0;
  // Staged rows: on one node the inputs of dispatch and combine; on several nodes the output of dispatch and the input
  // of combine. Quantised rows are already in memory that peers reach.
  const std::size_t num_sent_rows = quantizes ? 0 : num_tokens;
  std::size_t staged_bytes = std::max(several_nodes ? num_used_rows * dispatched_row_bytes : num_sent_rows * row_bytes,
                                      num_used_rows * row_bytes);
  if (shape.symmetric || topology.ranks_per_node == 1) staged_bytes = 0;
  if (shape.combine_fp8_hidden > 0) {
    // Wherever the input of combine is; without it, plain memory stages dispatch's rows only.
    const std::size_t wire_bytes = num_used_rows * to_size(fp8_wire_row_bytes(shape.combine_fp8_hidden));
    staged_bytes = std::max(shape.symmetric ? 0 : num_sent_rows * row_bytes, wire_bytes);
  }
  const std::size_t quantized_bytes =
      quantizes ? num_tokens * (dispatched_row_bytes + to_size(shape.scale_row_bytes)) : 0;

  const std::size_t staging_bytes = (several_nodes ? tables_bytes(shape, topology) : tables_bytes(shape)) +
                                    round_up_to_page(std::max(records_bytes, weights_bytes)) +
                                    round_up_to_page(staged_bytes) + round_up_to_page(quantized_bytes);
  const std::size_t checksums_bytes =
      shape.verify ? round_up_to_page(plan::ChecksumTable::at(nullptr, num_used_rows).size_bytes) : 0;
  const std::size_t buffers_bytes = shape.symmetric ? round_up_to_page(num_tokens * row_bytes) +
                                                          round_up_to_page(num_rows * dispatched_row_bytes) +
                                                          round_up_to_page(num_rows * row_bytes)
                                                    : 0;
  return node::kControlBytes + call::CallSync::network_bytes(topology) + staging_bytes + checksums_bytes +
         buffers_bytes;
}

}  // namespace ferry::cpu
