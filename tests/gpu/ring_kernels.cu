#include "cuda/driver/launch.hpp"
#include "cuda/sync/ring.cuh"
#include "cuda/sync/shared_memory.cuh"
#include "gpu/ring_kernels.hpp"
#include "rail/rail_memory.hpp"

namespace ferry::test {
namespace {

using cuda::device::now_ns;
using cuda::device::ReceiveRing;
using cuda::device::SendRing;
using rail::ChunkHeader;
using rail::kChunkHeaderBytes;

constexpr unsigned kThreads = 256;

/// Polls until `read` returns a pointer; null if the deadline passed. For one thread.
template <typename Read>
__device__ auto wait_for(const RingKernelParams& params, Read read) {
  const std::uint64_t deadline_ns = now_ns() + params.timeout_ns;
  auto* chunk = read();
  while (chunk == nullptr && now_ns() < deadline_ns) chunk = read();
  if (chunk == nullptr) atomicAdd_system(params.num_expired, 1U);
  return chunk;
}

__global__ void fill_ring_kernel(const __grid_constant__ RingKernelParams params) {
  std::byte*& shared_chunk = *reinterpret_cast<std::byte**>(cuda::device::dynamic_shared());
  SendRing ring(params.words, params.chunks, params.num_chunks, params.chunk_bytes);
  if (threadIdx.x == 0) ring.find();
  const std::uint32_t num_words = params.num_items * params.item_bytes / sizeof(std::uint32_t);
  for (std::uint64_t round = 0; round < params.num_rounds; ++round) {
    if (threadIdx.x == 0) shared_chunk = wait_for(params, [&ring] { return ring.reserve(); });
    __syncthreads();
    std::byte* const chunk = shared_chunk;
    if (chunk == nullptr) return;
    auto* const words = reinterpret_cast<std::uint32_t*>(chunk + kChunkHeaderBytes);
    for (std::uint32_t word = threadIdx.x; word < num_words; word += kThreads) words[word] = ring_pattern(round, word);
    __syncthreads();
    if (threadIdx.x != 0) continue;
    *reinterpret_cast<ChunkHeader*>(chunk) = {ring.chunk_idx(), 1, params.num_items, params.item_bytes};
    ring.commit(static_cast<std::uint32_t>(kChunkHeaderBytes) + params.num_items * params.item_bytes);
  }
}

__global__ void drain_ring_kernel(const __grid_constant__ RingKernelParams params) {
  const std::byte*& shared_chunk = *reinterpret_cast<const std::byte**>(cuda::device::dynamic_shared());
  ReceiveRing ring(params.words, params.chunks, params.num_chunks, params.chunk_bytes);
  if (threadIdx.x == 0) ring.find();
  const std::uint32_t num_words = params.num_items * params.item_bytes / sizeof(std::uint32_t);
  for (std::uint64_t round = 0; round < params.num_rounds; ++round) {
    if (threadIdx.x == 0) shared_chunk = wait_for(params, [&ring] { return ring.front(); });
    __syncthreads();
    const std::byte* const chunk = shared_chunk;
    if (chunk == nullptr) return;
    const auto& header = *reinterpret_cast<const ChunkHeader*>(chunk);
    std::uint32_t num_wrong = 0;
    if (threadIdx.x == 0) {
      num_wrong += header.chunk_idx != round || header.num_items != params.num_items ? 1 : 0;
    }
    const auto* const words = reinterpret_cast<const std::uint32_t*>(chunk + kChunkHeaderBytes);
    for (std::uint32_t word = threadIdx.x; word < num_words; word += kThreads) {
      num_wrong += words[word] != ring_pattern(round, word) ? 1 : 0;
    }
    if (num_wrong > 0) atomicAdd_system(params.num_wrong, num_wrong);
    __syncthreads();
    if (threadIdx.x == 0) ring.release();
  }
}

}  // namespace

cudaError_t launch_fill_ring(const RingKernelParams& params, cudaStream_t stream) {
  return cuda::launch_kernel(fill_ring_kernel, {1, kThreads, sizeof(void*)}, params, stream);
}

cudaError_t launch_drain_ring(const RingKernelParams& params, cudaStream_t stream) {
  return cuda::launch_kernel(drain_ring_kernel, {1, kThreads, sizeof(void*)}, params, stream);
}

}  // namespace ferry::test
