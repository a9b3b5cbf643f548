#ifndef FERRY_CUDA_LATENCY_MEMORY_HPP
#define FERRY_CUDA_LATENCY_MEMORY_HPP

/// Memory of latency mode: sizes that calls need, and its first contents.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/call/memory_required.hpp"
#include "cuda/context/parts.hpp"
#include "cuda/far/params.hpp"
#include "cuda/latency/window.hpp"
#include "ferry/latency.hpp"

namespace ferry::cuda {

/// BackendFactory::latency_bytes_required. Needs no GPU.
std::size_t latency_bytes_required(const LatencyShape& shape);

/// Memory of the Routings of latency mode, in addition to that. Needs no GPU.
CallBytes latency_call_bytes(const MemoryShape& shape, bool over_nodes);

/// Place and parts of a group's memory; all sizes are 0 if the group has none.
LatencyLayout latency_layout(const Topology& topology, std::size_t latency_bytes);
/// Inboxes of a group's far ranks; without ranks if the group has one node, or no memory.
FarLayout far_layout(const Topology& topology, std::size_t latency_bytes, bool in_gpu = false);

/// Shape of the rows that a combine returns to other nodes.
struct ReturnsShape {
  std::int64_t num_far = 0;  ///< ranks of other nodes
  std::int64_t max_tokens = 0;
  std::int64_t num_topk = 0;
  std::int64_t num_local_experts = 0;
  std::int64_t num_slab_rows = 0;
};
/// Every token of every far rank may return a row for each of its entries that has an expert here, but no more rows
/// than the slab has.
constexpr std::int64_t most_returned_rows(const ReturnsShape& shape) {
  const std::int64_t per_token = std::min(shape.num_topk, shape.num_local_experts);
  return std::min(shape.num_far * shape.max_tokens * per_token, shape.num_slab_rows);
}

/// StartLatency: loads the kernels, and grants the sets of every rank to the first calls.
Status start_latency(Parts& parts, int num_ranks, cudaStream_t stream);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_MEMORY_HPP
