#ifndef FERRY_TOOLS_DEMO_MATMUL_HPP
#define FERRY_TOOLS_DEMO_MATMUL_HPP

/// Plain f32 matrix product, fast enough for a demonstration. Each element of the result is summed in ascending order
/// of the inner index, whatever the number of rows, so a row has the same bits alone and among others.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ferry::tools {

/// A seeded [inner, columns] matrix, stored in panels of kPanel columns ([panel][inner][kPanel]) so that the product
/// reads it front to back. Columns past the last are zero.
class Matrix {
 public:
  /// Two SSE registers, one AVX register: enough sums in flight for either in the 4-row tile of the product.
  static constexpr std::size_t kPanel = 8;

  /// Uniform values with standard deviation gain / sqrt(inner): the product then has `gain` times the input's scale.
  void fill(std::uint64_t seed, std::size_t inner, std::size_t columns, float gain);

  /// Values in the order in which a matrix of this shape stores them, panel by panel.
  void assign(std::span<const float> values, std::size_t inner, std::size_t columns);
  std::span<const float> values() const { return values_; }
  static std::size_t num_values(std::size_t inner, std::size_t columns) {
    return (columns + kPanel - 1) / kPanel * inner * kPanel;
  }

  std::size_t inner() const { return inner_; }
  std::size_t columns() const { return columns_; }
  std::size_t num_panels() const { return (columns_ + kPanel - 1) / kPanel; }
  const float* panel(std::size_t panel_idx) const { return values_.data() + panel_idx * inner_ * kPanel; }

 private:
  std::size_t inner_ = 0;
  std::size_t columns_ = 0;
  std::vector<float> values_;
};

/// out [num_rows, columns] = in [num_rows, inner] * matrix, all contiguous.
void multiply(const float* in, std::size_t num_rows, const Matrix& matrix, float* out);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_MATMUL_HPP
