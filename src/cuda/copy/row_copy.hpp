#ifndef FERRY_CUDA_COPY_ROW_COPY_HPP
#define FERRY_CUDA_COPY_ROW_COPY_HPP

/// Copies in the order of a stream, made by a kernel. Calls never use CUDA's own asynchronous copies: those of all
/// streams of a process share a few queues of the copy engine, in which a copy that waits for its stream holds up
/// those behind it. A rank's call would wait there for another rank's call on the same GPU, which waits for the first.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace ferry::cuda {

/// Memory that kernels reach, pinned host memory included; the two do not overlap.
struct RowCopyParams {
  std::byte* to = nullptr;
  std::int64_t to_stride = 0;
  const std::byte* from = nullptr;
  std::int64_t from_stride = 0;
  std::int64_t row_bytes = 0;
  std::int64_t num_rows = 1;
  int max_blocks = 1;
};

/// Nothing is launched where there is nothing to copy.
cudaError_t launch_row_copy(const RowCopyParams& params, cudaStream_t stream);
/// Of `num_bytes` in one piece.
cudaError_t launch_copy(void* to, const void* from, std::size_t num_bytes, int max_blocks, cudaStream_t stream);
cudaError_t load_row_copy_kernels();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_COPY_ROW_COPY_HPP
