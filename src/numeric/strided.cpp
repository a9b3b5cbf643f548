#include "numeric/strided.hpp"

#include <fmt/format.h>

#include <cstdlib>

namespace ferry::numeric {

std::string shape_text(const ConstTensorView& view) {
  std::string text = "[";
  for (int dim = 0; dim < view.num_dims && dim < kMaxTensorDims; ++dim) {
    if (dim != 0) text += ", ";
    text += std::to_string(view.extent(dim));
  }
  return text + "]";
}

Status bad_argument(const MatrixRule& rule, const std::string& observed, const std::string& expected,
                    std::string_view hint) {
  return {ErrorCode::kInvalidArgument,
          fmt::format("{}: {} is {}, expected {}; {}", rule.call, rule.name, observed, expected, hint)};
}

Status check_matrix(const ConstTensorView& view, const MatrixRule& rule) {
  const std::string expected_shape = fmt::format("[{}, {}]", rule.rows, rule.cols);
  if (!view.present()) return bad_argument(rule, "absent", expected_shape, "this argument is required");
  if (view.num_dims != 2 || view.extent(0) != rule.rows || view.extent(1) != rule.cols)
    return bad_argument(rule, shape_text(view), expected_shape, "give a view of that shape");
  const std::size_t element_bytes = size_bytes(view.dtype);
  if (element_bytes == 0)
    return bad_argument(rule, fmt::format("of dtype {}", static_cast<int>(view.dtype)), "an enumerator of DType",
                        "pass an enumerator");
  if (view.num_elements() == 0) return {};
  if (view.data == nullptr)
    return bad_argument(rule, "a null pointer", "host memory of shape " + expected_shape, "give a valid pointer");
  if (reinterpret_cast<std::uintptr_t>(view.data) % element_bytes != 0)
    return bad_argument(rule, fmt::format("at address {}", view.data),
                        fmt::format("a multiple of {} bytes ({})", element_bytes, to_string(view.dtype)),
                        "align the memory to its dtype");
  return {};
}

Status check_output_matrix(const ConstTensorView& view, const MatrixRule& rule) {
  if (Status status = check_matrix(view, rule); !status.ok()) return status;
  const std::int64_t row_stride = std::abs(view.stride(0));
  const std::int64_t col_stride = std::abs(view.stride(1));
  // Accepts row-major or column-major strides, with gaps; other strides without overlap are not supported.
  const bool row_major =
      (rule.cols <= 1 || col_stride >= 1) && (rule.rows <= 1 || row_stride > (rule.cols - 1) * col_stride);
  const bool col_major =
      (rule.rows <= 1 || row_stride >= 1) && (rule.cols <= 1 || col_stride > (rule.rows - 1) * row_stride);
  if (view.num_elements() == 0 || row_major || col_major) return {};
  return bad_argument(rule, fmt::format("of strides [{}, {}]", view.stride(0), view.stride(1)),
                      fmt::format("strides under which the elements of [{}, {}] do not overlap", rule.rows, rule.cols),
                      "elements of an output must not share memory");
}

}  // namespace ferry::numeric
