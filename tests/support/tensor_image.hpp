#ifndef FERRY_TESTS_TENSOR_IMAGE_HPP
#define FERRY_TESTS_TENSOR_IMAGE_HPP

/// Memory of one tensor in which every byte is checked: the elements, the gaps that its strides leave, and a margin at
/// the end. All of it starts as a pattern, so that a comparison of two images also finds writes to bytes that must stay
/// untouched.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ferry/group.hpp"
#include "ferry/types.hpp"
#include "support/group_memory.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {

/// Shape [rows, cols] and strides in elements.
struct TensorSpec {
  DType dtype = DType::kUint8;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
  std::int64_t num_dims = 2;  ///< 1: the view is [rows] (cols is 1); 3: [slabs, rows / slabs, cols]
  std::int64_t slabs = 1;
  std::int64_t slab_stride = 0;     ///< 3 dimensions: distance between slabs; 0: slabs without gaps
  std::size_t alignment_bytes = 1;  ///< exact alignment of the memory
};

/// Contiguous rows aligned to their elements.
TensorSpec dense(DType dtype, std::int64_t rows, std::int64_t cols);
/// Payload rows with `gap_granules` * 16 bytes between them, aligned to 16 bytes.
TensorSpec payload_rows(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t gap_granules);

/// Actual or expected contents of a tensor's memory.
class TensorImage {
 public:
  explicit TensorImage(const TensorSpec& spec);

  const TensorSpec& spec() const { return spec_; }
  const Bytes& bytes() const { return bytes_; }
  /// Writes one packed row of elements to the places that the strides give.
  void set_row(std::int64_t row, const std::byte* packed);
  void clear_row(std::int64_t row);
  /// Writes all rows from a packed array.
  void set_rows(const void* packed);

 private:
  TensorSpec spec_;
  Bytes bytes_;
};

/// Memory of tensors: symmetric, plain, or one of the two for each tensor of each rank.
enum class MemoryKind { kSymmetric, kPlain, kMixed };

/// A tensor in real memory, of the kind that the group's backend takes.
class TestTensor {
 public:
  /// Allocates memory that holds `image`. A failed allocation is reported to `context` and gives an absent view. kMixed
  /// decides by the rank and the tensor's shape, so that all pairs of sender and receiver occur.
  TestTensor(RankContext& context, Group& group, MemoryKind kind, const TensorImage& image);

  TensorView view() const { return view_; }
  /// Writes `image`, which has this tensor's spec, into the memory.
  void refill(const TensorImage& image);
  /// Reports the first difference from `expected`, which has this tensor's spec.
  bool expect_equal(RankContext& context, const TensorImage& expected, std::string_view what) const;

 private:
  TensorSpec spec_;
  bool on_device_ = false;
  Buffer buffer_;
  PlainMemory plain_;
  std::byte* data_ = nullptr;
  TensorView view_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_TENSOR_IMAGE_HPP
