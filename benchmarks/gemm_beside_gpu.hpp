#ifndef FERRY_BENCHMARKS_GEMM_BESIDE_GPU_HPP
#define FERRY_BENCHMARKS_GEMM_BESIDE_GPU_HPP

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>

namespace ferry::bench {

/// @throws std::runtime_error
void throw_if_cuda_error(cudaError_t error);

struct FreeDevice {
  void operator()(std::byte* memory) const { cudaFree(memory); }
};
using DeviceBytes = std::unique_ptr<std::byte, FreeDevice>;
DeviceBytes take_device(std::size_t num_bytes);

/// A matrix product on the current GPU, bf16 with f32 sums, by its tensor cores (nvcuda::wmma): C = A * transpose(B).
/// A is [m, k], B is [n, k], C is [m, n].
class Gemm {
 public:
  /// Multiples of 128, 128 and 32.
  Gemm(int m, int n, int k);
  void start(cudaStream_t stream) const;
  /// Whether the product of the last start() is right. Waits for the stream.
  bool is_right(cudaStream_t stream) const;
  double flops() const { return 2.0 * m_ * n_ * k_; }

 private:
  int m_;
  int n_;
  int k_;
  DeviceBytes a_;
  DeviceBytes b_;
  DeviceBytes c_;
};

/// Holds streams until the host opens it, so that work of several begins at the same moment.
class Gate {
 public:
  Gate();
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  /// Holds all that comes after this in the streams until open(), at most two seconds.
  void close(std::initializer_list<cudaStream_t> streams);
  void open();

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t passed_ = nullptr;
  std::uint32_t* word_ = nullptr;  // pinned
  std::uint32_t turn_ = 0;
};

}  // namespace ferry::bench

#endif  // FERRY_BENCHMARKS_GEMM_BESIDE_GPU_HPP
