#include "gemm_beside_gpu.hpp"

#include <cuda_bf16.h>
#include <cuda_pipeline.h>
#include <mma.h>

#include <atomic>
#include <stdexcept>
#include <vector>

namespace ferry::bench {
namespace {

namespace wmma = nvcuda::wmma;

constexpr int kTile = 128;   // rows and columns of C that a block makes
constexpr int kStep = 32;    // of k, in shared memory at a time
constexpr int kStride = 40;  // of a row there: with less, threads of a warp would read the same banks
constexpr int kFragment = 16;
constexpr int kWarpRows = 32;  // part of C that a warp makes
constexpr int kWarpColumns = 64;
constexpr int kThreads = 256;
constexpr int kStages = 2;

using Part = __nv_bfloat16[kTile][kStride];

/// Begins to copy [kTile, kStep] of a matrix whose rows have k elements.
__device__ void fetch(Part& to, const __nv_bfloat16* from, int k) {
  constexpr int kElements = 16 / sizeof(__nv_bfloat16);
  constexpr int kPerRow = kStep / kElements;
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kPerRow; i += kThreads) {
    const int row = i / kPerRow;
    const int column = i % kPerRow * kElements;
    __pipeline_memcpy_async(&to[row][column], from + static_cast<std::int64_t>(row) * k + column, 16);
  }
}

__global__ void __launch_bounds__(kThreads)
    gemm_kernel(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c, int n, int k) {
  __shared__ alignas(16) Part parts_of_a[kStages];
  __shared__ alignas(16) Part parts_of_b[kStages];
  const int first_row = static_cast<int>(blockIdx.y) * kTile;
  const int first_column = static_cast<int>(blockIdx.x) * kTile;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = warp / (kTile / kWarpColumns) * kWarpRows;
  const int warp_column = warp % (kTile / kWarpColumns) * kWarpColumns;
  a += static_cast<std::int64_t>(first_row) * k;
  b += static_cast<std::int64_t>(first_column) * k;

  constexpr int kRows = kWarpRows / kFragment;
  constexpr int kColumns = kWarpColumns / kFragment;
  wmma::fragment<wmma::accumulator, kFragment, kFragment, kFragment, float> sums[kRows][kColumns];
  for (auto& row : sums) {
    for (auto& sum : row) wmma::fill_fragment(sum, 0.0F);
  }
  fetch(parts_of_a[0], a, k);
  fetch(parts_of_b[0], b, k);
  __pipeline_commit();
  for (int at = 0, stage = 0; at < k; at += kStep, stage ^= 1) {
    if (at + kStep < k) {
      fetch(parts_of_a[stage ^ 1], a + at + kStep, k);
      fetch(parts_of_b[stage ^ 1], b + at + kStep, k);
    }
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kStep; step += kFragment) {
      wmma::fragment<wmma::matrix_a, kFragment, kFragment, kFragment, __nv_bfloat16, wmma::row_major> rows[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        wmma::load_matrix_sync(rows[i], &parts_of_a[stage][warp_row + i * kFragment][step], kStride);
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        wmma::fragment<wmma::matrix_b, kFragment, kFragment, kFragment, __nv_bfloat16, wmma::col_major> columns;
        wmma::load_matrix_sync(columns, &parts_of_b[stage][warp_column + j * kFragment][step], kStride);
#pragma unroll
        for (int i = 0; i < kRows; ++i) wmma::mma_sync(sums[i][j], rows[i], columns, sums[i][j]);
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kColumns; ++j) {
      const std::int64_t row = first_row + warp_row + i * kFragment;
      wmma::store_matrix_sync(c + row * n + first_column + warp_column + j * kFragment, sums[i][j],
                              static_cast<unsigned>(n), wmma::mem_row_major);
    }
  }
}

/// Small numbers whose products and sums are exact.
__device__ __host__ float element_of_a(std::int64_t row) { return static_cast<float>(row % 3 + 1); }
__device__ __host__ float element_of_b(std::int64_t row) { return static_cast<float>(row % 5 + 1) / 8; }

__global__ void fill_kernel(__nv_bfloat16* matrix, std::int64_t count, int k, bool is_a) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    matrix[i] = __float2bfloat16(is_a ? element_of_a(i / k) : element_of_b(i / k));
  }
}

__global__ void gate_kernel(const volatile std::uint32_t* word, std::uint32_t turn) {
  constexpr long long kMostNs = 2'000'000'000;
  const auto now = [] {
    long long ns = 0;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
  };
  const long long begin = now();
  while (*word != turn && now() - begin < kMostNs) __nanosleep(100);
}

void fill(std::byte* matrix, std::int64_t rows, int k, bool is_a) {
  constexpr unsigned kBlocks = 1024;
  fill_kernel<<<kBlocks, kThreads>>>(reinterpret_cast<__nv_bfloat16*>(matrix), rows * k, k, is_a);
  throw_if_cuda_error(cudaGetLastError());
}

std::size_t bytes_of(int rows, int columns, std::size_t element) {
  return static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns) * element;
}

}  // namespace

void throw_if_cuda_error(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

DeviceBytes take_device(std::size_t num_bytes) {
  void* memory = nullptr;
  throw_if_cuda_error(cudaMalloc(&memory, num_bytes));
  DeviceBytes taken(static_cast<std::byte*>(memory));
  throw_if_cuda_error(cudaMemset(memory, 0, num_bytes));
  return taken;
}

Gemm::Gemm(int m, int n, int k) : m_(m), n_(n), k_(k) {
  if (m % kTile != 0 || n % kTile != 0 || k % kStep != 0 || m <= 0 || n <= 0 || k <= 0) {
    throw std::runtime_error("the matrix product is not of multiples of 128, 128 and 32");
  }
  a_ = take_device(bytes_of(m, k, sizeof(__nv_bfloat16)));
  b_ = take_device(bytes_of(n, k, sizeof(__nv_bfloat16)));
  c_ = take_device(bytes_of(m, n, sizeof(float)));
  fill(a_.get(), m, k, /*is_a=*/true);
  fill(b_.get(), n, k, /*is_a=*/false);
  throw_if_cuda_error(cudaDeviceSynchronize());
}

void Gemm::start(cudaStream_t stream) const {
  const dim3 blocks(static_cast<unsigned>(n_ / kTile), static_cast<unsigned>(m_ / kTile));
  gemm_kernel<<<blocks, kThreads, 0, stream>>>(reinterpret_cast<const __nv_bfloat16*>(a_.get()),
                                               reinterpret_cast<const __nv_bfloat16*>(b_.get()),
                                               reinterpret_cast<float*>(c_.get()), n_, k_);
  throw_if_cuda_error(cudaGetLastError());
}

bool Gemm::is_right(cudaStream_t stream) const {
  std::vector<float> c(static_cast<std::size_t>(m_) * static_cast<std::size_t>(n_));
  throw_if_cuda_error(cudaStreamSynchronize(stream));
  throw_if_cuda_error(cudaMemcpy(c.data(), c_.get(), c.size() * sizeof(float), cudaMemcpyDeviceToHost));
  for (std::size_t i = 0; i < c.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i) / n_;
    const auto column = static_cast<std::int64_t>(i) % n_;
    if (c[i] != element_of_a(row) * element_of_b(column) * static_cast<float>(k_)) return false;
  }
  return true;
}

Gate::Gate() {
  throw_if_cuda_error(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  throw_if_cuda_error(cudaEventCreateWithFlags(&passed_, cudaEventDisableTiming));
  void* word = nullptr;
  throw_if_cuda_error(cudaHostAlloc(&word, sizeof *word_, cudaHostAllocPortable | cudaHostAllocMapped));
  word_ = static_cast<std::uint32_t*>(word);
  *word_ = 0;
  // Loads the kernel: later that could wait for what the gate holds.
  cudaFuncAttributes loaded{};
  throw_if_cuda_error(cudaFuncGetAttributes(&loaded, gate_kernel));
}

Gate::~Gate() {
  cudaStreamDestroy(stream_);
  cudaEventDestroy(passed_);
  cudaFreeHost(word_);
}

void Gate::close(std::initializer_list<cudaStream_t> streams) {
  gate_kernel<<<1, 1, 0, stream_>>>(word_, ++turn_);
  throw_if_cuda_error(cudaGetLastError());
  throw_if_cuda_error(cudaEventRecord(passed_, stream_));
  for (const cudaStream_t stream : streams) throw_if_cuda_error(cudaStreamWaitEvent(stream, passed_, 0));
}

void Gate::open() { std::atomic_ref(*word_).store(turn_, std::memory_order_release); }

}  // namespace ferry::bench
