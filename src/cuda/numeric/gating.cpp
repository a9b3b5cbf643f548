#include "cuda/numeric/gating.hpp"

#include <fmt/format.h>

#include "cuda/memory/memory_checks.hpp"
#include "cuda/numeric/local_call.hpp"

namespace ferry::cuda {

Status select_experts(std::string_view operation, const numeric::GatingParams& params, int device, Stream stream) {
  if (params.num_experts > kMaxGatingExpertsOnGpu) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("{}: logits are of {} experts, expected at most {} on a GPU; use backend \"cpu\"",
                              operation, params.num_experts, kMaxGatingExpertsOnGpu));
  }
  const auto check_memory = [&](int on) { return check_gating_memory(operation, params, on); };
  const auto launch = [&](int num_sms, cudaStream_t handle) { return launch_gating(params, num_sms, handle); };
  return run_local(operation, {device, stream}, check_memory, launch);
}

}  // namespace ferry::cuda
