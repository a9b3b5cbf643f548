#ifndef FERRY_CUDA_LATENCY_FAR_RECORDS_CUH
#define FERRY_CUDA_LATENCY_FAR_RECORDS_CUH

/// Records of the calls of far ranks, for the words of errors (cuda/far/params.hpp).

#include <cstddef>
#include <cstdint>

#include "cuda/latency/words.cuh"

namespace ferry::cuda::device {

/// Keeps the record of the call of a far rank, which makes another one than this rank, where the host that reports the
/// fault finds it. One thread. A record that belongs to a fault which the host has not read stays.
__device__ __noinline__ inline void keep_record(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                                int set, int source) {
  if (load_acquire_system(&call.ranks.report->fault.state) != 0) return;
  FoundRecord& found = far.found[far.found_idx(source)];
  const FarLayout& layout = far.layout;
  const auto& arrived = *reinterpret_cast<const FoundRecord*>(
      far.inbox + layout.record_at(static_cast<int>(kind), set, layout.far_idx(source)));
  const bool is_there = arrived.present != 0;
  far.state->kept[source] = is_there ? 1 : 0;
  found.present = is_there ? 1 : 0;
  if (!is_there) return;
  const auto* const from = reinterpret_cast<const std::uint64_t*>(&arrived.record);
  auto* const to = reinterpret_cast<std::uint64_t*>(&found.record);
  static_assert(sizeof(CallRecord) % sizeof(std::uint64_t) == 0);
#pragma unroll 1
  for (std::size_t i = 0; i < sizeof(CallRecord) / sizeof(std::uint64_t); ++i) to[i] = from[i];
}

/// Forgets the record of an earlier call of a far rank, which now makes the same call. One thread.
__device__ inline void forget_record(const LatencyParams& call, const FarParams& far, int source) {
  std::uint32_t& kept = far.state->kept[source];
  if (kept == 0 || load_acquire_system(&call.ranks.report->fault.state) != 0) return;
  kept = 0;
  far.found[far.found_idx(source)].present = 0;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_FAR_RECORDS_CUH
