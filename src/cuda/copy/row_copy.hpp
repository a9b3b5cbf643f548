#ifndef FERRY_CUDA_COPY_ROW_COPY_HPP
#define FERRY_CUDA_COPY_ROW_COPY_HPP

/// Copies in stream order, made by a kernel. Calls never use CUDA's own asynchronous copies: the copies of all streams
/// of a process share a few queues of the copy engine, and a copy that waits for its stream blocks the copies queued
/// after it. A rank's call would wait there for another rank's call on the same GPU, which in turn waits for the first.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace ferry::cuda {

/// Source and destination in memory that kernels reach, pinned host memory included; the two must not overlap.
struct RowCopyParams {
  std::byte* to = nullptr;
  std::int64_t to_stride = 0;
  const std::byte* from = nullptr;
  std::int64_t from_stride = 0;
  std::int64_t row_bytes = 0;
  std::int64_t num_rows = 1;
  int max_blocks = 1;
};

/// Launches no kernel if there are no bytes to copy.
cudaError_t launch_row_copy(const RowCopyParams& params, cudaStream_t stream);
/// Copies `num_bytes` contiguous bytes.
cudaError_t launch_copy(void* to, const void* from, std::size_t num_bytes, int max_blocks, cudaStream_t stream);
cudaError_t load_row_copy_kernels();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_COPY_ROW_COPY_HPP
