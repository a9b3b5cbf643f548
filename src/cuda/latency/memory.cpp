#include "cuda/latency/memory.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/latency/far_message.hpp"
#include "cuda/latency/kernels.hpp"
#include "cuda/latency/mask.hpp"
#include "node/page_heap.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {

std::size_t latency_bytes_required(const LatencyShape& shape) {
  const std::int64_t num_ranks = shape.num_ranks;
  const auto dispatch = SetNeed::of_dispatch(num_ranks, shape.max_tokens, shape.num_topk, shape.dispatch_row_bytes);
  const auto combine =
      SetNeed::of_combine(shape.max_tokens, shape.num_topk,
                          num_returned_rows(shape.order, shape.num_topk, shape.num_ranks), shape.combine_row_bytes);
  return node::round_up_to_page(
      to_size(std::max(LatencyLayout::bytes_for(dispatch, num_ranks), LatencyLayout::bytes_for(combine, num_ranks))));
}

CallBytes latency_call_bytes(const MemoryShape& shape, bool over_nodes) {
  const LatencyTables::Shape tables{.num_ranks = to_size(shape.num_ranks),
                                    .num_tokens = to_size(shape.num_tokens),
                                    .max_tokens = to_size(shape.max_tokens),
                                    .num_topk = to_size(shape.num_topk),
                                    .num_local_experts = num_local_experts(shape),
                                    .num_slab_rows = to_size(shape.num_recv_rows),
                                    .weights = shape.weights,
                                    .far = over_nodes};
  return {node::round_up_to_page(LatencyTables::at(nullptr, tables).size_bytes), 0};
}

namespace {

/// Takes the memory that only this rank uses to mask others, unless it has it, and masks absent ranks.
Status start_masks(Parts& parts, int num_ranks, cudaStream_t stream) {
  constexpr std::string_view kStarting = "Group::create: clearing the masks of latency mode";
  std::size_t size_bytes = 0;
  MaskParams::at(nullptr, to_size(num_ranks), size_bytes);
  if (parts.masks == nullptr) {
    Result<std::shared_ptr<std::byte>> masks = parts.memory->take(size_bytes);
    if (!masks.ok()) return masks.status();
    parts.masks = *masks;
  }
  MaskState* const state = MaskParams::at(parts.masks.get(), to_size(num_ranks), size_bytes).state;
  Status status = runtime_status(cudaMemsetAsync(parts.masks.get(), 0, size_bytes, stream), kStarting);
  for (const int rank : parts.absent_ranks) {
    const std::uint32_t masked = 1;
    if (!status.ok()) break;
    status = runtime_status(
        cudaMemcpyAsync(&state->masked[rank], &masked, sizeof(masked), cudaMemcpyHostToDevice, stream), kStarting);
  }
  return status;
}

/// Writes who is absent, and that absent ranks have no set for the first calls (absent_ranks.cuh).
void leave_out_absent(const std::vector<int>& absent_ranks, int num_ranks, LatencyLocal& local,
                      std::vector<std::uint64_t>& grants) {
  constexpr int kBits = 32;
  local.num_absent = static_cast<std::uint32_t>(absent_ranks.size());
  for (const int rank : absent_ranks) {
    local.absent[rank / kBits] |= 1U << (rank % kBits);
    for (int kind = 0; kind < kLatencyKinds; ++kind) {
      const std::size_t slot = (to_size(kind) * to_size(num_ranks) + to_size(rank)) * kGrantSlots;
      for (std::uint64_t number = 1; number <= kSets; ++number) {
        grants[slot + number % kGrantSlots] = number << 32 | kNoSet;
      }
    }
  }
}

}  // namespace

LatencyLayout latency_layout(const Topology& topology, std::size_t latency_bytes) {
  const std::size_t offset = node::round_up_to_page(Control::at(nullptr, to_size(topology.ranks_per_node)).size_bytes);
  return LatencyLayout::of(static_cast<std::int64_t>(offset), static_cast<std::int64_t>(latency_bytes),
                           topology.num_ranks);
}

FarLayout far_layout(const Topology& topology, std::size_t latency_bytes, bool in_gpu) {
  const LatencyLayout window = latency_layout(topology, latency_bytes);
  if (topology.num_nodes() == 1 || window.set_bytes == 0) return {};
  return far_layout(window, topology.num_ranks, topology.ranks_per_node, topology.rank, in_gpu);
}

Status start_latency(Parts& parts, int num_ranks, cudaStream_t stream) {
  const bool over_nodes = parts.sync->topology().num_nodes() > 1;
  const LatencyLayout layout = latency_layout(parts.sync->topology(), parts.latency_bytes);
  if (layout.set_bytes == 0) return {};
  // A later load could wait for kernels of other ranks that wait for this rank's kernels.
  constexpr std::string_view kLoading = "Group::create: loading the kernels of latency mode";
  constexpr std::string_view kHint = "this build has no code for the GPU: set CMAKE_CUDA_ARCHITECTURES and build again";
  Status status = runtime_status(load_latency_kernels(parts.mask_timeout_ns != 0), kLoading, kHint);
  if (status.ok() && over_nodes) status = runtime_status(load_far_kernels(), kLoading, kHint);
  if (!status.ok()) return status;
  if (parts.mask_timeout_ns != 0) {
    status = start_masks(parts, num_ranks, stream);
    if (!status.ok()) return status;
  }
  LatencyLocal local{};
  std::vector<std::uint64_t> grants(to_size(kLatencyKinds) * to_size(num_ranks) * to_size(kGrantSlots));
  for (int kind = 0; kind < kLatencyKinds; ++kind) {
    local.granted[kind] = kSets;
    for (int rank = 0; rank < num_ranks; ++rank) {
      for (std::uint64_t number = 1; number <= kSets; ++number) {
        const std::size_t slot = (to_size(kind) * to_size(num_ranks) + to_size(rank)) * kGrantSlots;
        grants[slot + number % kGrantSlots] = number << 32 | (number - 1);
      }
    }
  }
  if (parts.mask_timeout_ns == 0) leave_out_absent(parts.absent_ranks, num_ranks, local, grants);
  std::byte* const base = parts.latency.get();
  status = runtime_status(cudaMemcpyAsync(base + layout.control.grants, grants.data(),
                                          grants.size() * sizeof(grants[0]), cudaMemcpyHostToDevice, stream),
                          "Group::create: granting the sets of latency mode");
  if (!status.ok()) return status;
  // Copies of pageable memory have read their source when the calls return.
  return runtime_status(
      cudaMemcpyAsync(base + layout.control.local, &local, sizeof(local), cudaMemcpyHostToDevice, stream),
      "Group::create: granting the sets of latency mode");
}

}  // namespace ferry::cuda
