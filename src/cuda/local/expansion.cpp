#include "cuda/local/expansion.hpp"

#include "cuda/local/local_call.hpp"
#include "cuda/local/local_ops.hpp"
#include "cuda/memory/memory_checks.hpp"

namespace ferry::cuda {

Status expand_rows(const LocalCall& call, const plan::ExpandParams& params) {
  return run_local(
      call, [&](int device) { return check_expand_memory(params, device); },
      [&](int num_sms, cudaStream_t stream) { return launch_expand(params, num_sms, stream); });
}

Status reduce_rows(const LocalCall& call, const plan::ReduceParams& params) {
  return run_local(
      call, [&](int device) { return check_reduce_memory(params, device); },
      [&](int num_sms, cudaStream_t stream) { return launch_reduce(params, num_sms, stream); });
}

}  // namespace ferry::cuda
