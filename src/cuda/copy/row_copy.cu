#include "cuda/copy/row_copy.hpp"
#include "cuda/driver/launch.hpp"

namespace ferry::cuda {
namespace {

constexpr int kCopyThreads = 512;
/// Loads that a thread has in flight.
constexpr int kUnroll = 4;
/// Few enough to leave most of the GPU to other kernels, enough for about 1 TB/s.
constexpr int kMostCopyBlocks = 32;

/// Copies rows in units of Word: rows are whole multiples of a Word, and aligned to it.
template <typename Word>
__global__ void __launch_bounds__(kCopyThreads) row_copy_kernel(const __grid_constant__ RowCopyParams params) {
  const std::int64_t words_per_row = params.row_bytes / static_cast<std::int64_t>(sizeof(Word));
  const std::int64_t num_words = words_per_row * params.num_rows;
  const std::int64_t num_threads = std::int64_t{gridDim.x} * kCopyThreads;
  const bool one_row = params.num_rows == 1;
  const auto from_of = [&](std::int64_t i) {
    const std::int64_t row = one_row ? 0 : i / words_per_row;
    return reinterpret_cast<const Word*>(params.from + row * params.from_stride) + (i - row * words_per_row);
  };
  const auto to_of = [&](std::int64_t i) {
    const std::int64_t row = one_row ? 0 : i / words_per_row;
    return reinterpret_cast<Word*>(params.to + row * params.to_stride) + (i - row * words_per_row);
  };
  for (std::int64_t first = std::int64_t{blockIdx.x} * kCopyThreads + threadIdx.x; first < num_words;
       first += kUnroll * num_threads) {
    Word values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * num_threads < num_words) values[i] = *from_of(first + i * num_threads);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * num_threads < num_words) *to_of(first + i * num_threads) = values[i];
    }
  }
}

template <typename Word>
cudaError_t launch_in_words(const RowCopyParams& params, cudaStream_t stream) {
  const std::int64_t num_words = params.num_rows * params.row_bytes / static_cast<std::int64_t>(sizeof(Word));
  const std::int64_t wanted = (num_words + kCopyThreads - 1) / kCopyThreads;
  const int most = params.max_blocks < kMostCopyBlocks ? params.max_blocks : kMostCopyBlocks;
  const auto num_blocks = static_cast<unsigned>(wanted < most ? wanted : most);
  return launch_kernel(row_copy_kernel<Word>, {num_blocks, kCopyThreads, 0}, params, stream);
}

}  // namespace

cudaError_t launch_row_copy(const RowCopyParams& params, cudaStream_t stream) {
  if (params.num_rows == 0 || params.row_bytes == 0) return cudaSuccess;
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(params.to) | reinterpret_cast<std::uintptr_t>(params.from) |
                       static_cast<std::uint64_t>(params.row_bytes);
  if (params.num_rows > 1) bits |= static_cast<std::uint64_t>(params.to_stride | params.from_stride);
  if (bits % sizeof(uint4) == 0) return launch_in_words<uint4>(params, stream);
  if (bits % sizeof(std::uint32_t) == 0) return launch_in_words<std::uint32_t>(params, stream);
  return launch_in_words<std::uint8_t>(params, stream);
}

cudaError_t launch_copy(void* to, const void* from, std::size_t num_bytes, int max_blocks, cudaStream_t stream) {
  RowCopyParams params;
  params.to = static_cast<std::byte*>(to);
  params.from = static_cast<const std::byte*>(from);
  params.row_bytes = static_cast<std::int64_t>(num_bytes);
  params.max_blocks = max_blocks;
  return launch_row_copy(params, stream);
}

cudaError_t load_row_copy_kernels() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, row_copy_kernel<uint4>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, row_copy_kernel<std::uint32_t>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, row_copy_kernel<std::uint8_t>);
  return error;
}

}  // namespace ferry::cuda
