#ifndef FERRY_NUMERIC_STRIDED_HPP
#define FERRY_NUMERIC_STRIDED_HPP

/// Checks of views of host memory, shared by the numeric helpers.

#include <cstdint>
#include <string>
#include <string_view>

#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry::numeric {

/// Requirements of a helper on one of its views.
struct MatrixRule {
  std::string_view call;  ///< public function, the first word of every message
  std::string_view name;  ///< name of the argument
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};

/// "[3, 5]".
std::string shape_text(const ConstTensorView& view);

/// kInvalidArgument with the text "call: name is observed, expected expected; hint".
Status bad_argument(const MatrixRule& rule, const std::string& observed, const std::string& expected,
                    std::string_view hint);

/// Checks that the view is present, is [rows, cols], has a pointer if it has elements, and is aligned to its dtype.
Status check_matrix(const ConstTensorView& view, const MatrixRule& rule);

/// check_matrix for memory that is written: also checks that no two elements share an address.
Status check_output_matrix(const ConstTensorView& view, const MatrixRule& rule);

}  // namespace ferry::numeric

#endif  // FERRY_NUMERIC_STRIDED_HPP
