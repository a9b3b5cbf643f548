#ifndef FERRY_TYPES_HPP
#define FERRY_TYPES_HPP

/// Plain values that describe memory without owning it: dtypes, tensor views, streams.

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <type_traits>

#include "ferry/export.hpp"

namespace ferry {

/// Element types. Ferry moves rows as bytes; only combine (bf16, f32) and quantisation look inside.
enum class DType : std::int32_t {
  kUint8 = 0,       ///< opaque bytes, or packed 8-bit scales (UE8M0)
  kInt32 = 1,       ///< ids, counts, or four packed 8-bit scales
  kInt64 = 2,       ///< ids
  kFloat32 = 3,     ///< weights, scales, f32 payload
  kFloat16 = 4,     ///< payload (dispatch only)
  kBfloat16 = 5,    ///< payload
  kFloat8E4M3 = 6,  ///< payload with separate scales: OCP FP8 E4M3, finite-only ("fn"), largest value 448
  kInt8 = 7,        ///< payload with separate scales
};

/// Bytes per element.
constexpr std::size_t size_bytes(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
    case DType::kFloat8E4M3:
    case DType::kInt8:
      return 1;
    case DType::kFloat16:
    case DType::kBfloat16:
      return 2;
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
      return 8;
  }
  return 0;
}

/// The usual short name: "u8", "i32", "i64", "f32", "f16", "bf16", "fp8_e4m3", "i8".
FERRY_API std::string_view to_string(DType dtype);

namespace detail {

/// Product of two extents or strides; the largest value where it does not fit, which no memory has.
constexpr std::int64_t saturating_product(std::int64_t left, std::int64_t right) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(left, right, &product) ? std::numeric_limits<std::int64_t>::max() : product;
}

}  // namespace detail

/// Most dimensions a tensor can have here: [L, C, H] is three.
inline constexpr int kMaxTensorDims = 3;

/// A typed, strided view of memory that it does not own. `Pointer` is `void*` or `const void*`.
/// Strides count elements. A default-constructed view is absent: "this input or output is not used".
template <typename Pointer>
struct BasicTensorView {
  Pointer data = nullptr;
  DType dtype = DType::kUint8;
  int num_dims = 0;
  std::array<std::int64_t, kMaxTensorDims> shape{};
  std::array<std::int64_t, kMaxTensorDims> strides{};

  BasicTensorView() = default;

  /// A contiguous (row-major) view of `data`.
  BasicTensorView(Pointer data_in, DType dtype_in, std::initializer_list<std::int64_t> shape_in)
      : data(data_in), dtype(dtype_in), num_dims(static_cast<int>(shape_in.size())) {
    int dim = 0;
    for (std::int64_t extent : shape_in) {
      if (dim < kMaxTensorDims) shape[static_cast<std::size_t>(dim)] = extent;
      ++dim;
    }
    std::int64_t stride = 1;
    for (int d = (num_dims < kMaxTensorDims ? num_dims : kMaxTensorDims) - 1; d >= 0; --d) {
      strides[static_cast<std::size_t>(d)] = stride;
      stride = detail::saturating_product(stride, shape[static_cast<std::size_t>(d)]);
    }
  }

  /// A view with explicit strides (in elements).
  BasicTensorView(Pointer data_in, DType dtype_in, std::initializer_list<std::int64_t> shape_in,
                  std::initializer_list<std::int64_t> strides_in)
      : BasicTensorView(data_in, dtype_in, shape_in) {
    std::size_t dim = 0;
    for (std::int64_t stride : strides_in) {
      if (dim < strides.size()) strides[dim++] = stride;
    }
  }

  /// Read-only view of the same memory.
  template <typename Other>
  requires(std::is_same_v<Other, void*>&& std::is_same_v<Pointer, const void*>)
      BasicTensorView(const BasicTensorView<Other>& other)  // NOLINT(google-explicit-constructor)
      : data(other.data), dtype(other.dtype), num_dims(other.num_dims), shape(other.shape), strides(other.strides) {}

  /// True unless default-constructed. A view of zero elements is present, whatever its pointer.
  bool present() const { return num_dims != 0; }
  std::int64_t extent(int dim) const { return shape[static_cast<std::size_t>(dim)]; }
  std::int64_t stride(int dim) const { return strides[static_cast<std::size_t>(dim)]; }
  /// Elements of the view; the largest value where the product of the extents does not fit.
  std::int64_t num_elements() const {
    bool is_empty = num_dims == 0;
    std::int64_t count = 1;
    for (int d = 0; d < num_dims && d < kMaxTensorDims; ++d) {
      is_empty = is_empty || extent(d) == 0;
      count = detail::saturating_product(count, extent(d));
    }
    return is_empty ? 0 : count;
  }
};

using TensorView = BasicTensorView<void*>;
using ConstTensorView = BasicTensorView<const void*>;

/// Stream that orders work. On a CPU group calls finish before they return and the handle must be null; on a CUDA group
/// it is a `cudaStream_t`.
struct Stream {
  void* handle = nullptr;
};

}  // namespace ferry

#endif  // FERRY_TYPES_HPP
