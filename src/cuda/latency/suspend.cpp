/// Which ranks were silent when a rank suspends its group (Group::suspend).

#include <utility>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/latency/calls.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

constexpr std::string_view kReading = "suspend: reading the words of latency mode";

}  // namespace

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
  if (error != cudaSuccess) return runtime_status(error, kReading);
  std::vector<int> silent;
  for (int rank = 0; rank < ranks().num_ranks; ++rank) {
    if (mine.masked[rank] != 0 && theirs.masked_by[rank] == 0) silent.push_back(rank);
  }
  return silent;
}

/// Ranks that have entered neither the next dispatch nor the next combine of this rank: one of these is the call in
/// which its wait has ended.
Result<std::vector<int>> LatencyMode::late_ranks(cudaStream_t stream) const {
  const LatencyControl& control = layout_.control;
  std::vector<std::uint64_t> words(to_size(control.size_bytes) / sizeof(std::uint64_t));
  LatencyLocal local;
  const std::byte* const window = ranks().peer_bases[ranks().rank] + layout_.offset;
  const RelaxedCapture relaxed;
  cudaError_t error =
      cudaMemcpyAsync(words.data(), window, to_size(control.unset_bytes()), cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(&local, window + control.local, sizeof(local), cudaMemcpyDeviceToHost, stream);
  }
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) return runtime_status(error, kReading);
  const auto num_ranks = to_size(ranks().num_ranks);
  const auto word_at = [&words](std::int64_t offset, std::size_t index) {
    return words[to_size(offset) / sizeof(std::uint64_t) + index];
  };
  const auto has_entered = [&](std::size_t kind, std::size_t rank) {
    constexpr int kHalfBits = 32;
    const std::uint64_t number = local.sent[kind] + 1;
    const std::size_t granted = (kind * num_ranks + to_size(ranks().rank)) * kGrantSlots + number % kGrantSlots;
    const auto set = static_cast<std::uint32_t>(word_at(control.grants, granted));
    if (set >= kHeaderSets) return false;
    const std::size_t header = ((kind * kHeaderSets + set) * num_ranks + rank) * kLatencyHeaderSlotWords;
    return word_at(control.headers, header) >> kHalfBits == (number << kHalfBits) >> kHalfBits;
  };
  std::vector<int> late;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    if (static_cast<int>(rank) == ranks().rank) continue;
    if (!has_entered(0, rank) && !has_entered(1, rank)) late.push_back(static_cast<int>(rank));
  }
  return late;
}

Result<std::vector<int>> LatencyMode::suspend() {
  const Parts& parts = context_.parts();
  const DeviceGuard guard(parts.device);
  if (!guard.status().ok()) return guard.status();
  const Status& broken = parts.sync->broken();
  const cudaStream_t stream = parts.stream->get();
  if (!masks() || !has_memory() || !broken.ok()) {
    std::vector<int> late;
    if (has_memory() && broken.code() == ErrorCode::kTimeout) {
      Result<std::vector<int>> found = late_ranks(stream);
      if (!found.ok()) return found;
      late = std::move(*found);
    }
    return parts.sync->state().silent_ranks(late);
  }
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
