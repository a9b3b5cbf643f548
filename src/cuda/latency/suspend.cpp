/// Which ranks were silent when a rank suspends its group (Group::suspend).

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/latency/calls.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {

/// Ranks that this one masks and that do not mask it.
Result<std::vector<int>> LatencyMode::masked_ranks(cudaStream_t stream) const {
  MaskState mine;
  LatencyMaskWords theirs;
  const std::byte* const window = ranks().peer_bases[ranks().rank] + layout_.offset;
  const RelaxedCapture relaxed;
  cudaError_t error = cudaMemcpyAsync(&mine, mask_.state, sizeof(mine), cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) {
    error =
        cudaMemcpyAsync(&theirs, window + layout_.control.mask_words(), sizeof(theirs), cudaMemcpyDeviceToHost, stream);
  }
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) return runtime_status(error, "suspend: reading the masks");
  std::vector<int> silent;
  for (int rank = 0; rank < ranks().num_ranks; ++rank) {
    if (mine.masked[rank] != 0 && theirs.masked_by[rank] == 0) silent.push_back(rank);
  }
  return silent;
}

Result<std::vector<int>> LatencyMode::suspend() {
  const Parts& parts = context_.parts();
  const DeviceGuard guard(parts.device);
  if (!guard.status().ok()) return guard.status();
  if (!masks() || !has_memory() || !parts.sync->broken().ok()) return parts.sync->state().silent_ranks();
  const cudaStream_t stream = parts.stream->get();
  Result<std::vector<int>> silent = masked_ranks(stream);
  if (!silent.ok()) return silent;
  Status status = update_mask(kEveryRank, true, Stream{stream});
  if (!parts.sync->broken().ok()) return silent;  // found now: the others have the error
  if (!status.ok()) return status;
  const RelaxedCapture relaxed;
  status = runtime_status(cudaStreamSynchronize(stream), "suspend: masking the other ranks");
  return status.ok() ? silent : status;
}

}  // namespace ferry::cuda
