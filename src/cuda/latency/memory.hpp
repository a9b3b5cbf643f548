#ifndef FERRY_CUDA_LATENCY_MEMORY_HPP
#define FERRY_CUDA_LATENCY_MEMORY_HPP

/// The memory of latency mode: how much calls need, and how it begins.

#include <cstddef>

#include "cuda/call/memory_required.hpp"
#include "cuda/context/parts.hpp"
#include "cuda/latency/window.hpp"
#include "ferry/latency.hpp"

namespace ferry::cuda {

/// BackendFactory::latency_bytes_required. Needs no GPU.
std::size_t latency_bytes_required(const LatencyShape& shape);

/// What calls of latency mode hold beside that: their Routings. Needs no GPU.
CallBytes latency_call_bytes(const MemoryShape& shape);

/// Where a group has it; all sizes are 0 if it has none.
LatencyLayout latency_layout(const Parts& parts, int num_ranks);

/// StartLatency: the kernels are loaded, no call has been made, and every rank has granted its sets to the first ones.
Status start_latency(Parts& parts, int num_ranks, cudaStream_t stream);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_MEMORY_HPP
