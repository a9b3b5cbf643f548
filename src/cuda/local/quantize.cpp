#include "cuda/numeric/quantize.hpp"

#include "cuda/local/local_call.hpp"
#include "cuda/local/local_ops.hpp"
#include "cuda/memory/memory_checks.hpp"

namespace ferry::cuda {
namespace {

using LaunchQuantize = cudaError_t (*)(const numeric::QuantizeParams&, int, cudaStream_t);

Status run(const LocalCall& call, const numeric::QuantizeParams& params, LaunchQuantize launch) {
  return run_local(
      call, [&](int device) { return check_quantize_memory(call.operation, params, device); },
      [&](int num_sms, cudaStream_t stream) { return launch(params, num_sms, stream); });
}

}  // namespace

Status quantize(const LocalCall& call, const numeric::QuantizeParams& params) {
  return run(call, params, launch_quantize);
}

Status dequantize(const LocalCall& call, const numeric::QuantizeParams& params) {
  return run(call, params, launch_dequantize);
}

}  // namespace ferry::cuda
