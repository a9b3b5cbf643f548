#include "core/checks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace ferry {

Status check_kernel(std::string_view operation, const KernelOptions& kernel) {
  for (const auto& [name, number] : {std::pair<std::string_view, int>("num_sms", kernel.num_sms),
                                     std::pair<std::string_view, int>("num_copy_sms", kernel.num_copy_sms),
                                     std::pair<std::string_view, int>("chunk_tokens", kernel.chunk_tokens)}) {
    if (number >= 0) continue;
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: {} is {}, expected a positive number, or 0 for Ferry's own choice", operation, name, number));
  }
  const CopyPath path = kernel.copy_path;
  if (path == CopyPath::kAuto || path == CopyPath::kBulk || path == CopyPath::kLoadStore) return {};
  return Status(ErrorCode::kInvalidArgument, fmt::format("{}: copy_path is {}, expected kAuto, kBulk or kLoadStore",
                                                         operation, static_cast<int>(path)));
}

std::string describe(const ConstTensorView& view) {
  if (!view.present()) return "absent";
  const auto num_dims = static_cast<std::size_t>(std::clamp(view.num_dims, 0, kMaxTensorDims));
  return fmt::format("[{}] {}", fmt::join(view.shape.begin(), view.shape.begin() + num_dims, ", "),
                     to_string(view.dtype));
}

Status check_table(std::string_view what, const ConstTensorView& view, std::initializer_list<std::int64_t> shape,
                   std::initializer_list<DType> dtypes) {
  if (view.num_dims != static_cast<int>(shape.size()) || !std::equal(shape.begin(), shape.end(), view.shape.begin())) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} is {}, expected [{}]", what, describe(view), fmt::join(shape, ", ")));
  }
  if (size_bytes(view.dtype) == 0) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} has an unknown dtype {}", what, static_cast<int>(view.dtype)));
  }
  if (std::find(dtypes.begin(), dtypes.end(), view.dtype) == dtypes.end()) {
    std::vector<std::string_view> names;
    for (DType dtype : dtypes) names.push_back(to_string(dtype));
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} has dtype {}, expected {}", what, to_string(view.dtype), fmt::join(names, " or ")));
  }
  if (view.num_elements() == 0) return {};
  if (view.data == nullptr) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} is a null pointer, expected memory of {}; leave the view empty if it is not used",
                              what, describe(view)));
  }
  if (reinterpret_cast<std::uintptr_t>(view.data) % size_bytes(view.dtype) != 0) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} is at address {}, which is not aligned to its {}-byte elements", what, view.data,
                              size_bytes(view.dtype)));
  }
  std::int64_t dense_stride = 1;
  for (int dim = view.num_dims - 1; dim >= 0; --dim) {
    if (view.extent(dim) != 1 && view.stride(dim) != dense_stride) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("{} has stride {} in dimension {}, expected {}: it must be contiguous; copy it first",
                                what, view.stride(dim), dim, dense_stride));
    }
    dense_stride *= view.extent(dim);
  }
  return {};
}

}  // namespace ferry
