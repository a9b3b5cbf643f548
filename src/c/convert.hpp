#ifndef FERRY_C_CONVERT_HPP
#define FERRY_C_CONVERT_HPP

/// Plain values of the C interface as those of the C++ interface. Numbers that stand for no enumerator pass: the calls
/// check them.

#include <cstdint>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"
#include "ferry/ferry.h"
#include "ferry/quantization.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry::c {

/// As the backend of a group that cannot be created, since the caller's arguments cannot be read: for the other ranks,
/// who would wait for this one, to be told of it.
inline constexpr const char* kUnreadable = "of arguments that cannot be read";
/// How long it waits for them to come and hear of it.
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

/// RouteOptions::expert_to_rank, of E entries or none.
/// @errors kInvalidArgument: another number of entries
Status read_experts(const char* call, const std::int32_t* first, std::int64_t num_entries, std::int64_t num_experts,
                    std::vector<std::int32_t>& expert_to_rank);

/// `backend` stays the caller's string.
ExecutionOptions to_execution(const ferry_execution_options& options);

/// The members that all options of calls have.
template <typename Options>
KernelOptions kernel_options(const Options& options) {
  return {options.num_sms, options.num_copy_sms, options.chunk_tokens, static_cast<CopyPath>(options.copy_path)};
}

}  // namespace ferry::c

#endif  // FERRY_C_CONVERT_HPP
