#include "cpu/rows/combine_inputs.hpp"

#include <cstring>

#include "cpu/rows/row_copy.hpp"
#include "cpu/rows/wire_rows.hpp"
#include "plan/to_size.hpp"

namespace ferry::cpu {

Status publish_combine_inputs(const CombineCall& call, const CpuRouting& routing, const Context& context,
                              bool readers_reach_rows, node::CallDescriptor& descriptor) {
  node::Peers& peers = context.peers();
  const std::size_t weights_bytes = to_size(call.weights.num_elements()) * sizeof(float);
  if (weights_bytes > 0) {
    Result<std::byte*> weights = context.staging.records(weights_bytes);
    if (!weights.ok()) return weights.status();
    std::memcpy(*weights, call.weights.data, weights_bytes);
    descriptor.weights = peers.locate(*weights, 1, static_cast<std::int64_t>(weights_bytes), 0);
  }
  const bool quantizes = quantizes_rows(call);
  if (readers_reach_rows && !quantizes) {
    descriptor.input = peers.locate(call.x.data, call.x.num_rows, call.x.row_bytes, call.x.stride_bytes);
    return {};
  }
  const std::int64_t row_bytes = wire_row_bytes(call);
  Result<std::byte*> staged = context.staging.rows(to_size(routing.num_used_rows * row_bytes));
  if (!staged.ok()) return staged.status();
  const CopyMode mode = choose_copy_mode(routing.num_used_rows * row_bytes);
  for (std::int64_t row = 0; row < routing.num_used_rows; ++row) {
    if (!routing.holds_token(row)) continue;
    std::byte* const to = *staged + row * row_bytes;
    if (quantizes) {
      quantize_wire_row(call, row, to);
    } else {
      copy_row(to, call.x.row(row), to_size(row_bytes), mode);
    }
  }
  finish_copies(mode);
  descriptor.input = peers.locate(*staged, routing.num_used_rows, row_bytes, row_bytes);
  return {};
}

Result<CombineRows> resolve_combine_inputs(const CombineCall& call, const CpuRouting& routing, const Context& context,
                                           int rank) {
  const node::Peers& peers = context.peers();
  const node::CallDescriptor& descriptor = peers.descriptor_of(rank);
  const std::int64_t num_rows = routing.num_rows_on_rank[to_size(rank)];
  CombineRows found;
  found.rows = peers.resolve(descriptor.input, rank, {num_rows, wire_row_bytes(call)});
  found.stride_bytes = descriptor.input.stride_bytes;
  if (call.weights.present()) {
    const std::int64_t weights_per_row = routing.layout == Layout::kTokens ? routing.num_topk : 1;
    const auto weights_bytes = num_rows * weights_per_row * static_cast<std::int64_t>(sizeof(float));
    found.weights = reinterpret_cast<const float*>(peers.resolve(descriptor.weights, rank, {1, weights_bytes}));
  }
  if (found.rows == nullptr || (call.weights.present() && found.weights == nullptr)) {
    return context.sync.bad_location(Operation::kCombine, rank);
  }
  return found;
}

}  // namespace ferry::cpu
