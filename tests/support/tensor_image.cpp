#include "support/tensor_image.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>

namespace ferry::test {
namespace {

/// Bytes behind the last element that must stay untouched: more than the widest vector store.
constexpr std::size_t kMarginBytes = 80;
/// Cache line; TestTensor starts `alignment_bytes` past a multiple of it, so that the tensor has no more alignment than
/// requested.
constexpr std::size_t kBaseAlignmentBytes = 64;

/// Differs from byte to byte, so that untouched memory cannot be mistaken for memory copied from elsewhere.
std::byte pattern(std::size_t offset) { return static_cast<std::byte>((offset * 37 + 0xA5) & 0xFF); }
constexpr std::size_t kPatternBytes = 256;  // period of the pattern

std::int64_t slab_stride(const TensorSpec& spec) {
  return spec.slab_stride != 0 ? spec.slab_stride : spec.rows / spec.slabs * spec.row_stride;
}

/// Position of element [row, col], counted from the tensor's first element.
std::int64_t place_of(const TensorSpec& spec, std::int64_t row, std::int64_t col) {
  const std::int64_t slab_rows = spec.rows / spec.slabs;
  return row / slab_rows * slab_stride(spec) + row % slab_rows * spec.row_stride + col * spec.col_stride;
}

std::size_t extent_bytes(const TensorSpec& spec) {
  if (spec.rows == 0 || spec.cols == 0) return 0;
  return static_cast<std::size_t>(place_of(spec, spec.rows - 1, spec.cols - 1) + 1) * size_bytes(spec.dtype);
}

TensorView view_of(const TensorSpec& spec, void* data) {
  if (spec.num_dims == 1) return TensorView(data, spec.dtype, {spec.rows}, {spec.row_stride});
  if (spec.num_dims == 2)
    return TensorView(data, spec.dtype, {spec.rows, spec.cols}, {spec.row_stride, spec.col_stride});
  const std::int64_t slab_rows = spec.rows / spec.slabs;
  return TensorView(data, spec.dtype, {spec.slabs, slab_rows, spec.cols},
                    {slab_stride(spec), spec.row_stride, spec.col_stride});
}

/// Rows and widths differ between the tensors of a call, so that inputs and outputs get independent kinds.
bool is_symmetric(MemoryKind kind, const TensorSpec& spec, int rank) {
  if (kind != MemoryKind::kMixed) return kind == MemoryKind::kSymmetric;
  return (spec.rows + spec.cols / 16 + rank) % 2 == 0;
}

std::string where(const TensorSpec& spec, std::size_t offset) {
  const std::size_t element_bytes = size_bytes(spec.dtype);
  for (std::int64_t row = 0; row < spec.rows; ++row) {
    for (std::int64_t col = 0; col < spec.cols; ++col) {
      const auto first = static_cast<std::size_t>(place_of(spec, row, col)) * element_bytes;
      if (offset >= first && offset < first + element_bytes) return fmt::format("element [{}, {}]", row, col);
    }
  }
  return "memory outside of the elements";
}

}  // namespace

TensorSpec dense(DType dtype, std::int64_t rows, std::int64_t cols) {
  return {.dtype = dtype, .rows = rows, .cols = cols, .row_stride = cols, .alignment_bytes = size_bytes(dtype)};
}

TensorSpec payload_rows(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t gap_granules) {
  TensorSpec spec = dense(dtype, rows, cols);
  spec.row_stride += gap_granules * kRowGranuleBytes / static_cast<std::int64_t>(size_bytes(dtype));
  spec.alignment_bytes = static_cast<std::size_t>(kRowGranuleBytes);
  return spec;
}

TensorImage::TensorImage(const TensorSpec& spec) : spec_(spec), bytes_(extent_bytes(spec) + kMarginBytes) {
  std::array<std::byte, kPatternBytes> period{};
  for (std::size_t offset = 0; offset < period.size(); ++offset) period[offset] = pattern(offset);
  for (std::size_t offset = 0; offset < bytes_.size(); offset += period.size()) {
    std::memcpy(bytes_.data() + offset, period.data(), std::min(period.size(), bytes_.size() - offset));
  }
}

void TensorImage::set_row(std::int64_t row, const std::byte* packed) {
  if (spec_.cols == 0) return;  // nothing to copy, and `packed` may be null
  const std::size_t element_bytes = size_bytes(spec_.dtype);
  std::byte* first = bytes_.data() + static_cast<std::size_t>(place_of(spec_, row, 0)) * element_bytes;
  if (spec_.col_stride == 1) {
    std::memcpy(first, packed, static_cast<std::size_t>(spec_.cols) * element_bytes);
    return;
  }
  for (std::int64_t col = 0; col < spec_.cols; ++col) {
    std::memcpy(first + static_cast<std::size_t>(col * spec_.col_stride) * element_bytes,
                packed + static_cast<std::size_t>(col) * element_bytes, element_bytes);
  }
}

void TensorImage::clear_row(std::int64_t row) {
  const Bytes zeros(static_cast<std::size_t>(spec_.cols) * size_bytes(spec_.dtype));
  set_row(row, zeros.data());
}

void TensorImage::set_rows(const void* packed) {
  if (spec_.cols == 0) return;  // nothing to copy, and `packed` may be null
  const std::size_t row_bytes = static_cast<std::size_t>(spec_.cols) * size_bytes(spec_.dtype);
  for (std::int64_t row = 0; row < spec_.rows; ++row)
    set_row(row, static_cast<const std::byte*>(packed) + static_cast<std::size_t>(row) * row_bytes);
}

TestTensor::TestTensor(RankContext& context, Group& group, MemoryKind kind, const TensorImage& image)
    : spec_(image.spec()), on_device_(uses_device(group)) {
  const std::size_t num_bytes = image.bytes().size() + spec_.alignment_bytes;
  std::byte* base = nullptr;
  if (is_symmetric(kind, spec_, context.rank())) {
    auto buffer = group.allocate(num_bytes);
    if (!context.expect_ok(buffer.status(), "allocate")) return;
    buffer_ = std::move(*buffer);
    base = static_cast<std::byte*>(buffer_.data());
  } else {
    plain_ = PlainMemory(on_device_, num_bytes + kBaseAlignmentBytes);
    const auto address = reinterpret_cast<std::uintptr_t>(plain_.data());
    base = plain_.data() + (kBaseAlignmentBytes - address % kBaseAlignmentBytes) % kBaseAlignmentBytes;
  }
  data_ = base + spec_.alignment_bytes;
  refill(image);
  // A view without elements may have any pointer; null is the most likely to reveal a wrong access.
  view_ = view_of(spec_, spec_.rows == 0 ? nullptr : data_);
}

void TestTensor::refill(const TensorImage& image) {
  if (data_ != nullptr) write_memory(on_device_, data_, image.bytes().data(), image.bytes().size());
}

bool TestTensor::expect_equal(RankContext& context, const TensorImage& expected, std::string_view what) const {
  if (data_ == nullptr) return false;
  const std::size_t num_bytes = expected.bytes().size();
  const Bytes copy = on_device_ ? read_memory(true, data_, num_bytes) : Bytes();
  const std::byte* const begin = on_device_ ? copy.data() : data_;
  if (std::memcmp(begin, expected.bytes().data(), num_bytes) == 0) return true;
  const auto [seen, wanted] = std::mismatch(begin, begin + num_bytes, expected.bytes().begin());
  const auto offset = static_cast<std::size_t>(seen - begin);
  const auto num_wrong = std::inner_product(begin, begin + num_bytes, expected.bytes().begin(), 0, std::plus<>(),
                                            [](std::byte a, std::byte b) { return a != b ? 1 : 0; });
  context.fail(fmt::format("{}: byte {} of {} is 0x{:02x}, expected 0x{:02x} ({} of [{}, {}] {}); {} bytes differ",
                           what, offset, num_bytes, std::to_integer<int>(*seen), std::to_integer<int>(*wanted),
                           where(spec_, offset), spec_.rows, spec_.cols, to_string(spec_.dtype), num_wrong));
  return false;
}

}  // namespace ferry::test
