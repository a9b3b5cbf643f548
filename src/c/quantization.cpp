/// C interface of quantisation.

#include "c/convert.hpp"
#include "c/status.hpp"
#include "c/structs.hpp"
#include "ferry/fp8.hpp"
#include "ferry/int8.hpp"

namespace ferry::c {
namespace {

static_assert(FERRY_FP8_SCALE_FLOAT32 == static_cast<int>(Fp8ScaleFormat::kFloat32));
static_assert(FERRY_FP8_SCALE_POWER_OF_TWO == static_cast<int>(Fp8ScaleFormat::kPowerOfTwo));
static_assert(FERRY_FP8_SCALE_UE8M0 == static_cast<int>(Fp8ScaleFormat::kUe8m0));

/// Runs `run` with the caller's options, converted to ExecutionOptions; `call` names the function in errors.
template <typename Run>
ferry_status* run_quantizing(const char* call, const ferry_execution_options* given, const Run& run) noexcept {
  return guarded([&] {
    ferry_execution_options read;
    if (Status status = read_struct(call, given, read); !status.ok()) return status;
    return run(to_execution(read));
  });
}

}  // namespace
}  // namespace ferry::c

using namespace ferry::c;
using ferry::ExecutionOptions;

ferry_status* ferry_quantize_fp8(const ferry_tensor* x, const ferry_tensor* q, const ferry_tensor* scales,
                                 int32_t scale_format, const ferry_execution_options* options, void* stream) {
  return run_quantizing("ferry_quantize_fp8", options, [&](const ExecutionOptions& execution) {
    return ferry::quantize_fp8(tensor_view(x), tensor_view(q), tensor_view(scales),
                               static_cast<ferry::Fp8ScaleFormat>(scale_format), execution, to_stream(stream));
  });
}

ferry_status* ferry_dequantize_fp8(const ferry_tensor* q, const ferry_tensor* scales, const ferry_tensor* x,
                                   const ferry_execution_options* options, void* stream) {
  return run_quantizing("ferry_dequantize_fp8", options, [&](const ExecutionOptions& execution) {
    return ferry::dequantize_fp8(tensor_view(q), tensor_view(scales), tensor_view(x), execution, to_stream(stream));
  });
}

ferry_status* ferry_quantize_int8(const ferry_tensor* x, const ferry_tensor* q, const ferry_tensor* scales,
                                  const ferry_execution_options* options, void* stream) {
  return run_quantizing("ferry_quantize_int8", options, [&](const ExecutionOptions& execution) {
    return ferry::quantize_int8(tensor_view(x), tensor_view(q), tensor_view(scales), execution, to_stream(stream));
  });
}

ferry_status* ferry_dequantize_int8(const ferry_tensor* q, const ferry_tensor* scales, const ferry_tensor* x,
                                    const ferry_execution_options* options, void* stream) {
  return run_quantizing("ferry_dequantize_int8", options, [&](const ExecutionOptions& execution) {
    return ferry::dequantize_int8(tensor_view(q), tensor_view(scales), tensor_view(x), execution, to_stream(stream));
  });
}
