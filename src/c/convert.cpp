#include "c/convert.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "ferry/latency.hpp"
#include "ferry/routing.hpp"

namespace ferry::c {
namespace {

static_assert(FERRY_UINT8 == static_cast<int>(DType::kUint8));
static_assert(FERRY_INT32 == static_cast<int>(DType::kInt32));
static_assert(FERRY_INT64 == static_cast<int>(DType::kInt64));
static_assert(FERRY_FLOAT32 == static_cast<int>(DType::kFloat32));
static_assert(FERRY_FLOAT16 == static_cast<int>(DType::kFloat16));
static_assert(FERRY_BFLOAT16 == static_cast<int>(DType::kBfloat16));
static_assert(FERRY_FLOAT8_E4M3 == static_cast<int>(DType::kFloat8E4M3));
static_assert(FERRY_INT8 == static_cast<int>(DType::kInt8));
static_assert(FERRY_LAYOUT_TOKENS == static_cast<int>(Layout::kTokens));
static_assert(FERRY_LAYOUT_EXPERTS == static_cast<int>(Layout::kExperts));
static_assert(FERRY_LAYOUT_SLAB == static_cast<int>(Layout::kSlab));
static_assert(FERRY_QUANTIZE_NONE == static_cast<int>(Quantization::kNone));
static_assert(FERRY_QUANTIZE_FP8 == static_cast<int>(Quantization::kFp8));
static_assert(FERRY_QUANTIZE_FP8_POWER_OF_TWO == static_cast<int>(Quantization::kFp8PowerOfTwo));
static_assert(FERRY_QUANTIZE_FP8_UE8M0 == static_cast<int>(Quantization::kFp8Ue8m0));
static_assert(FERRY_QUANTIZE_INT8 == static_cast<int>(Quantization::kInt8));
static_assert(FERRY_COPY_AUTO == static_cast<int>(CopyPath::kAuto));
static_assert(FERRY_COPY_BULK == static_cast<int>(CopyPath::kBulk));
static_assert(FERRY_COPY_LOAD_STORE == static_cast<int>(CopyPath::kLoadStore));
static_assert(FERRY_ORDER_EXACT == static_cast<int>(CombineOrder::kExact));
static_assert(FERRY_ORDER_RANK_SUMS == static_cast<int>(CombineOrder::kRankSums));
static_assert(FERRY_WIRE_AS_GIVEN == static_cast<int>(WireFormat::kAsGiven));
static_assert(FERRY_WIRE_FP8 == static_cast<int>(WireFormat::kFp8));
static_assert(FERRY_MAX_TENSOR_DIMS == kMaxTensorDims);

}  // namespace

TensorView tensor_view(const ferry_tensor* tensor) {
  TensorView view;
  if (tensor == nullptr || tensor->num_dims == 0) return view;  // absent, whatever its pointer is
  view.data = tensor->data;
  view.dtype = static_cast<DType>(tensor->dtype);
  view.num_dims = tensor->num_dims;
  std::ranges::copy(tensor->shape, view.shape.begin());
  std::ranges::copy(tensor->strides, view.strides.begin());
  if (std::ranges::any_of(tensor->strides, [](std::int64_t stride) { return stride != 0; })) return view;
  // Unsigned, because shapes are not checked yet and may overflow.
  std::uint64_t stride = 1;
  for (int dim = std::min(view.num_dims, kMaxTensorDims) - 1; dim >= 0; --dim) {
    view.strides[static_cast<std::size_t>(dim)] = static_cast<std::int64_t>(stride);
    stride *= static_cast<std::uint64_t>(view.extent(dim));
  }
  return view;
}

ferry_tensor to_tensor(const ConstTensorView& view) {
  ferry_tensor tensor{};
  if (!view.present()) return tensor;
  tensor.data = const_cast<void*>(view.data);
  tensor.dtype = static_cast<std::int32_t>(view.dtype);
  tensor.num_dims = view.num_dims;
  std::ranges::copy(view.shape, tensor.shape);
  std::ranges::copy(view.strides, tensor.strides);
  return tensor;
}

ExecutionOptions to_execution(const ferry_execution_options& options) {
  ExecutionOptions execution;
  if (options.backend != nullptr) execution.backend = options.backend;
  if (options.use_device != 0) execution.device = options.device;
  return execution;
}

Status read_experts(const char* call, const std::int32_t* first, std::int64_t num_entries, std::int64_t num_experts,
                    std::vector<std::int32_t>& expert_to_rank) {
  if (first == nullptr && num_entries == 0) return {};
  if (first == nullptr || num_entries != num_experts || num_entries < 1) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: expert_to_rank is {} with num_expert_to_rank {}, expected one entry for each of {} "
                              "experts, or NULL and 0",
                              call, static_cast<const void*>(first), num_entries, num_experts));
  }
  expert_to_rank.assign(first, first + num_entries);
  return {};
}

Status read_ranks(const char* call, const char* name, const std::int32_t* first, std::int64_t num,
                  std::vector<int>& list) {
  // An uninitialised number is not taken for a length.
  constexpr std::int64_t kMaxRanks = 1 << 16;
  if (num < 0 || num > kMaxRanks || (first == nullptr && num > 0)) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} is {} with length {}, expected a list of at most {} numbers", call, name,
                              static_cast<const void*>(first), num, kMaxRanks));
  }
  list.assign(first, first + num);
  return {};
}

}  // namespace ferry::c
