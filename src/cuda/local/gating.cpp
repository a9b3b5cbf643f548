#include "cuda/local/gating.hpp"

#include <fmt/format.h>

#include "cuda/local/local_call.hpp"
#include "cuda/local/local_ops.hpp"
#include "cuda/memory/memory_checks.hpp"

namespace ferry::cuda {

Status select_experts(const LocalCall& call, const numeric::GatingParams& params) {
  if (params.num_experts > kMaxGatingExpertsOnGpu) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("{}: logits are of {} experts, expected at most {} on a GPU; use backend \"cpu\"",
                              call.operation, params.num_experts, kMaxGatingExpertsOnGpu));
  }
  return run_local(
      call, [&](int device) { return check_gating_memory(call.operation, params, device); },
      [&](int num_sms, cudaStream_t stream) { return launch_gating(params, num_sms, stream); });
}

}  // namespace ferry::cuda
