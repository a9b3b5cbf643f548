#ifndef FERRY_C_CONVERT_HPP
#define FERRY_C_CONVERT_HPP

/// Conversion of plain values of the C interface to the C++ interface. Unknown enumerators pass: the calls check them.

#include <cstdint>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"
#include "ferry/ferry.h"
#include "ferry/quantization.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry::c {

/// Backend name of a group that is bound to fail because this rank's arguments cannot be read. The rank joins the
/// creation so that the other ranks learn of the refusal instead of waiting for it.
inline constexpr const char* kUnreadable = "of arguments that cannot be read";
/// Deadline of that creation, for the other ranks to join it.
inline constexpr std::int64_t kRefusalTimeoutNs = 10'000'000'000;

/// Null: absent.
TensorView tensor_view(const ferry_tensor* tensor);
inline TensorView tensor_view(const ferry_tensor& tensor) { return tensor_view(&tensor); }
ferry_tensor to_tensor(const ConstTensorView& view);

inline Stream to_stream(void* handle) { return Stream{handle}; }

/// Null: `otherwise`.
inline std::string text_or(const char* text, const char* otherwise) { return text != nullptr ? text : otherwise; }

/// Zero: `otherwise`.
template <typename Number>
Number nonzero_or(Number number, Number otherwise) {
  return number != 0 ? number : otherwise;
}

/// RouteOptions::expert_to_rank: an entry per expert, or none.
/// @errors kInvalidArgument: wrong number of entries
Status read_experts(const char* call, const std::int32_t* first, std::int64_t num_entries, std::int64_t num_experts,
                    std::vector<std::int32_t>& expert_to_rank);

/// List of ranks, or of numbers of members.
/// @errors kInvalidArgument: null with a length, or a length below 0 or above that of any list; `list` is unchanged
Status read_ranks(const char* call, const char* name, const std::int32_t* first, std::int64_t num,
                  std::vector<int>& list);

/// `backend` still points to the caller's string.
ExecutionOptions to_execution(const ferry_execution_options& options);

/// Options that all calls have in common.
template <typename Options>
KernelOptions kernel_options(const Options& options) {
  return {options.num_sms, options.num_copy_sms, options.chunk_tokens, static_cast<CopyPath>(options.copy_path)};
}

}  // namespace ferry::c

#endif  // FERRY_C_CONVERT_HPP
