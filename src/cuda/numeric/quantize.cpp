#include "cuda/numeric/quantize.hpp"

#include "cuda/memory/memory_checks.hpp"
#include "cuda/numeric/local_call.hpp"

namespace ferry::cuda {
namespace {

using LaunchQuantize = cudaError_t (*)(const numeric::QuantizeParams&, int, cudaStream_t);

Status run(std::string_view operation, const numeric::QuantizeParams& params, const LocalPlace& place,
           LaunchQuantize launch) {
  return run_local(
      operation, place, [&](int device) { return check_quantize_memory(operation, params, device); },
      [&](int num_sms, cudaStream_t stream) { return launch(params, num_sms, stream); });
}

}  // namespace

Status quantize(std::string_view operation, const numeric::QuantizeParams& params, int device, Stream stream) {
  return run(operation, params, {device, stream}, launch_quantize);
}

Status dequantize(std::string_view operation, const numeric::QuantizeParams& params, int device, Stream stream) {
  return run(operation, params, {device, stream}, launch_dequantize);
}

}  // namespace ferry::cuda
