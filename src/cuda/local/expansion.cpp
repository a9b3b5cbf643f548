#include "cuda/local/expansion.hpp"

#include "cuda/memory/memory_checks.hpp"
#include "cuda/numeric/local_call.hpp"

namespace ferry::cuda {

Status expand_rows(const plan::ExpandParams& params, int device, Stream stream) {
  return run_local(
      "expand_rows", {device, stream}, [&](int gpu) { return check_expand_memory(params, gpu); },
      [&](int num_sms, cudaStream_t handle) { return launch_expand(params, num_sms, handle); });
}

Status reduce_rows(const plan::ReduceParams& params, int device, Stream stream) {
  return run_local(
      "reduce_rows", {device, stream}, [&](int gpu) { return check_reduce_memory(params, gpu); },
      [&](int num_sms, cudaStream_t handle) { return launch_reduce(params, num_sms, handle); });
}

}  // namespace ferry::cuda
