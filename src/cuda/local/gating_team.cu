/// Gating of many tokens, several per warp, for the numbers of experts that models have.

#include "cuda/local/gating_team.cuh"

#include <algorithm>

#include "cuda/driver/launch.hpp"
#include "cuda/local/gating_team.hpp"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

constexpr int kBlockWarps = 4;
/// More blocks than run at the same time, so that blocks that end early are replaced.
constexpr std::int64_t kBlocksPerSm = 16;
/// Blocks whose registers fit a multiprocessor.
constexpr unsigned kResidentBlocks = 7;
/// Logits per multiprocessor below which one token per warp is faster (on an H200, several at a time were faster with
/// 128 and 256 experts from 1024 and 2048 tokens on, with 384 from 4096 on).
constexpr std::int64_t kLeastLogitsPerSm = 12 * 256;

template <int kTeam, int kSlice>
__global__ void __launch_bounds__(kBlockWarps* kWarpLanes, kResidentBlocks)
    gating_team_kernel(GatingKernelParams params) {
  constexpr int kTokens = kWarpLanes / kTeam;
  const GatingParams& gating = params.gating;
  const TeamPlace place = stage_bias<kTeam, kSlice>(gating, kBlockWarps);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kBlockWarps * kTokens;
  const std::int64_t token_bytes = kTeam * kSlice * (gating.is_bfloat16 ? sizeof(std::uint16_t) : sizeof(float));
  std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * kBlockWarps + warp_idx()) * kTokens;
  const std::byte* logits = static_cast<const std::byte*>(gating.logits) + first * token_bytes;
  for (; first < gating.num_tokens; first += step, logits += step * token_bytes) {
    const int count = static_cast<int>(min(static_cast<std::int64_t>(kTokens), gating.num_tokens - first));
    gate_in_teams<kTeam, kSlice>(params, first, count, logits, place);
  }
}

struct TeamKernel {
  int team = 0;
  int slice = 0;
  std::size_t shared_bytes = 0;
  void (*kernel)(GatingKernelParams) = nullptr;
};

template <int kTeam, int kSlice>
constexpr TeamKernel kTeamKernel = {kTeam, kSlice, TeamWords<kTeam, kSlice>::of_block(kBlockWarps) * sizeof(float),
                                    gating_team_kernel<kTeam, kSlice>};
const TeamKernel kTeamKernels[] = {kTeamKernel<8, 16>, kTeamKernel<8, 32>, kTeamKernel<16, 24>, kTeamKernel<16, 32>};

bool suits(const TeamKernel& one, const GatingParams& gating) {
  const GatingOptions& options = gating.options;
  if (gating.num_experts != one.team * one.slice || options.num_topk > kKept || options.noise > 0) return false;
  if (reinterpret_cast<std::uintptr_t>(gating.logits) % sizeof(uint4) != 0) return false;
  // Only the whole-warp kernels compute sums over a row.
  const bool by_logit = numeric::selects_by_logit(options, gating.bias != nullptr);
  if (!by_logit && options.score != GatingScore::kSigmoid) return false;
  if (options.score == GatingScore::kSoftmax && !numeric::sum_of_row_cancels(options)) return false;
  if (!numeric::is_group_limited(options)) return true;
  const int lanes = gating.num_experts / options.num_groups / one.slice;
  return lanes * one.slice * options.num_groups == gating.num_experts && (lanes & (lanes - 1)) == 0 && lanes > 0;
}

}  // namespace

bool launch_gating_teams(const GatingParams& gating, int num_sms, cudaStream_t stream, cudaError_t* error) {
  if (gating.num_tokens * gating.num_experts < num_sms * kLeastLogitsPerSm) return false;
  const TeamKernel* const kernel = std::find_if(std::begin(kTeamKernels), std::end(kTeamKernels),
                                                [&](const TeamKernel& one) { return suits(one, gating); });
  if (kernel == std::end(kTeamKernels)) return false;
  GatingKernelParams params;
  params.gating = gating;
  params.slot_lanes = kernel->team;
  params.group_lanes = gating.num_experts / gating.options.num_groups / kernel->slice;
  const std::int64_t block_tokens = static_cast<std::int64_t>(kBlockWarps) * kWarpLanes / kernel->team;
  const std::int64_t most = num_sms * kBlocksPerSm;
  const auto num_blocks = static_cast<unsigned>(std::min((gating.num_tokens + block_tokens - 1) / block_tokens, most));
  *error = launch_kernel(kernel->kernel, {num_blocks, kBlockWarps * kWarpLanes, kernel->shared_bytes}, params, stream);
  return true;
}

cudaError_t load_gating_team_kernels() {
  for (const TeamKernel& one : kTeamKernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(one.kernel));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
