#include "cuda/local/token_layout.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/local/local_call.hpp"
#include "cuda/local/local_ops.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "cuda/sync/control.hpp"

namespace ferry::cuda {
namespace {

/// Entries that one block counts by itself. It adds to one counter each cycle and no more (H200: 10 us for 16,384
/// entries, whatever the instruction). More are shared between blocks, which costs clearing the counts first.
constexpr std::int64_t kEntriesAlone = 8192;
constexpr std::int64_t kEntriesPerBlock = 2048;
constexpr std::int64_t kMaxBlocks = 64;

/// Whether the launch goes into a graph, whose nodes programs and drivers without support for such an edge may copy or
/// update.
bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  return error != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

LayoutBlocks blocks_of(const plan::TokenLayoutParams& params, cudaStream_t stream) {
  const std::int64_t num_entries = params.num_tokens * params.num_topk;
  if (num_entries <= kEntriesAlone) return {};
  return {std::min(num_entries / kEntriesPerBlock, kMaxBlocks), layout_can_overlap() && !is_captured(stream)};
}

}  // namespace

Status count_layout(const LocalCall& call, const plan::TokenLayoutParams& params) {
  if (params.num_experts > kMaxExperts || params.num_ranks > kMaxRanks) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("dispatch_layout: {} experts and {} ranks, expected at most {} and {} with backend "
                              "\"cuda\"",
                              params.num_experts, params.num_ranks, kMaxExperts, kMaxRanks));
  }
  const Result<int> device = device_of(call);
  if (!device.ok()) return device.status();
  const DeviceGuard guard(*device);
  if (!guard.status().ok()) return guard.status();
  if (Status status = check_layout_memory(params, *device); !status.ok()) return status;
  const auto handle = static_cast<cudaStream_t>(call.stream.handle);
  return runtime_status(launch_layout(params, blocks_of(params, handle), handle),
                        "dispatch_layout: launching its kernel");
}

}  // namespace ferry::cuda
