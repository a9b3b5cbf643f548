#include "demo/matmul.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "common/hash.hpp"

namespace ferry::tools {

namespace {

constexpr std::size_t kPanel = Matrix::kPanel;
constexpr std::size_t kTileRows = 4;

/// Vector extension of GCC and Clang, in the width that every x86-64 and AArch64 has.
using Vector [[gnu::vector_size(16)]] = float;
constexpr std::size_t kVectorFloats = sizeof(Vector) / sizeof(float);
static_assert(kPanel == 2 * kVectorFloats);

using Tile = std::array<float, kTileRows * kPanel>;

Vector load(const float* values) {
  Vector vector;
  std::memcpy(&vector, values, sizeof vector);
  return vector;
}

/// Sums of one tile of four rows. Rows past the last repeat an earlier one; the caller drops them. Unrolled by hand,
/// because otherwise compilers do not keep the eight sums in registers.
void multiply_tile(const std::array<const float*, kTileRows>& rows, const float* panel, std::size_t inner, Tile* out) {
  const auto [row0, row1, row2, row3] = rows;
  Vector low0{}, low1{}, low2{}, low3{};
  Vector high0{}, high1{}, high2{}, high3{};
  for (std::size_t k = 0; k < inner; ++k) {
    const Vector low = load(panel + k * kPanel);
    const Vector high = load(panel + k * kPanel + kVectorFloats);
    low0 += row0[k] * low;
    high0 += row0[k] * high;
    low1 += row1[k] * low;
    high1 += row1[k] * high;
    low2 += row2[k] * low;
    high2 += row2[k] * high;
    low3 += row3[k] * low;
    high3 += row3[k] * high;
  }
  const std::array<Vector, 2 * kTileRows> sums = {low0, high0, low1, high1, low2, high2, low3, high3};
  std::memcpy(out->data(), sums.data(), sizeof *out);
}

}  // namespace

void Matrix::fill(std::uint64_t seed, std::size_t inner, std::size_t columns, float gain) {
  inner_ = inner;
  columns_ = columns;
  values_.resize(num_panels() * inner * kPanel);
  // A uniform variable on [-a, a) has standard deviation a / sqrt(3).
  const float amplitude = gain * std::sqrt(3.0F / static_cast<float>(inner));
  for (std::size_t i = 0; i + 1 < values_.size(); i += 2) {
    const std::uint64_t bits = splitmix64(seed + i);
    values_[i] = amplitude * signed_unit_float(static_cast<std::uint32_t>(bits));
    values_[i + 1] = amplitude * signed_unit_float(static_cast<std::uint32_t>(bits >> 32U));
  }
  const std::size_t num_used = columns - (num_panels() - 1) * kPanel;
  float* last = values_.data() + (num_panels() - 1) * inner * kPanel;
  for (std::size_t k = 0; k < inner; ++k) std::fill(last + k * kPanel + num_used, last + (k + 1) * kPanel, 0.0F);
}

void Matrix::assign(std::span<const float> values, std::size_t inner, std::size_t columns) {
  inner_ = inner;
  columns_ = columns;
  values_.assign(values.begin(), values.end());
}

void multiply(const float* in, std::size_t num_rows, const Matrix& matrix, float* out) {
  const std::size_t inner = matrix.inner();
  const std::size_t columns = matrix.columns();
  for (std::size_t panel_idx = 0; panel_idx < matrix.num_panels(); ++panel_idx) {
    const std::size_t first_column = panel_idx * kPanel;
    const std::size_t num_columns = std::min(kPanel, columns - first_column);
    for (std::size_t first_row = 0; first_row < num_rows; first_row += kTileRows) {
      std::array<const float*, kTileRows> rows;
      for (std::size_t row = 0; row < kTileRows; ++row) {
        rows[row] = in + std::min(first_row + row, num_rows - 1) * inner;
      }
      Tile sums;
      multiply_tile(rows, matrix.panel(panel_idx), inner, &sums);
      for (std::size_t row = 0; row < std::min(kTileRows, num_rows - first_row); ++row) {
        std::copy_n(&sums[row * kPanel], num_columns, out + (first_row + row) * columns + first_column);
      }
    }
  }
}

}  // namespace ferry::tools
