#ifndef FERRY_CUDA_LATENCY_MEMORY_HPP
#define FERRY_CUDA_LATENCY_MEMORY_HPP

/// Memory of latency mode: sizes that calls need, and its first contents.

#include <cstddef>

#include "cuda/call/memory_required.hpp"
#include "cuda/context/parts.hpp"
#include "cuda/latency/window.hpp"
#include "ferry/latency.hpp"

namespace ferry::cuda {

/// BackendFactory::latency_bytes_required. Needs no GPU.
std::size_t latency_bytes_required(const LatencyShape& shape);

/// Memory of the Routings of latency mode, in addition to that. Needs no GPU.
CallBytes latency_call_bytes(const MemoryShape& shape);

/// Place and parts of a group's memory; all sizes are 0 if the group has none.
LatencyLayout latency_layout(const Parts& parts, int num_ranks);

/// StartLatency: loads the kernels, and grants the sets of every rank to the first calls.
Status start_latency(Parts& parts, int num_ranks, cudaStream_t stream);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_MEMORY_HPP
