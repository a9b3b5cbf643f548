#ifndef FERRY_TESTS_GPU_RING_KERNELS_HPP
#define FERRY_TESTS_GPU_RING_KERNELS_HPP

/// Kernels that fill or drain a ring, with a pattern that depends on chunk and position.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "net/ring_words.hpp"
#include "plan/host_device.hpp"

namespace ferry::test {

struct RingKernelParams {
  net::RingWords* words = nullptr;  ///< pinned, like all memory below
  std::byte* chunks = nullptr;
  std::uint64_t num_chunks = 0;  ///< of the ring
  std::uint64_t chunk_bytes = 0;
  std::uint64_t num_rounds = 0;  ///< chunks to fill or drain
  std::uint32_t num_items = 0;   ///< in every chunk
  std::uint32_t item_bytes = 0;
  std::uint64_t timeout_ns = 0;          ///< of each wait
  std::uint32_t* num_wrong = nullptr;    ///< words that are not the pattern's
  std::uint32_t* num_expired = nullptr;  ///< waits that passed their deadline
};

/// Word `word` of chunk `chunk_idx`, after its header.
FERRY_HOST_DEVICE constexpr std::uint32_t ring_pattern(std::uint64_t chunk_idx, std::uint64_t word) {
  return static_cast<std::uint32_t>(chunk_idx * 2654435761U + word * 40503U + 1U);
}

cudaError_t launch_fill_ring(const RingKernelParams& params, cudaStream_t stream);
cudaError_t launch_drain_ring(const RingKernelParams& params, cudaStream_t stream);

}  // namespace ferry::test

#endif  // FERRY_TESTS_GPU_RING_KERNELS_HPP
