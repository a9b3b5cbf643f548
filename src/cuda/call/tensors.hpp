#ifndef FERRY_CUDA_CALL_TENSORS_HPP
#define FERRY_CUDA_CALL_TENSORS_HPP

/// The caller's tensors as kernels see them.

#include <cstddef>
#include <cstdint>

#include "plan/host_device.hpp"

namespace ferry::cuda {

/// [rows, S] elements of 1 or 4 bytes, strides in elements.
struct ScaleTable {
  std::byte* data = nullptr;
  int num_scales = 0;
  int element_bytes = 0;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;
  /// Rows in slabs [L, C, S] whose experts are not spaced evenly like their rows: C and the stride of experts;
  /// otherwise 0.
  std::int64_t slab_rows = 0;
  std::int64_t slab_stride = 0;

  FERRY_HOST_DEVICE std::byte* row(std::int64_t idx) const {
    const std::int64_t slab = slab_rows > 0 ? idx / slab_rows : 0;
    return data + ((idx - slab * slab_rows) * row_stride + slab * slab_stride) * element_bytes;
  }
};

/// This rank's output tensors.
struct DispatchOutputs {
  std::byte* x = nullptr;
  std::int64_t x_stride = 0;
  ScaleTable scales;
  void* ids = nullptr;
  bool wide_ids = false;
  float* weights = nullptr;
};

struct BiasRows {
  const std::byte* data = nullptr;
  std::int64_t stride = 0;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CALL_TENSORS_HPP
