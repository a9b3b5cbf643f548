/// Gating on a GPU. A warp takes one token at a time or, with few experts, each of its threads takes one;
/// gating_team.cu handles many tokens.

#include "cuda/local/gating.hpp"

#include <algorithm>

#include "cuda/driver/launch.hpp"
#include "cuda/local/gating_rechoose.cuh"
#include "cuda/local/gating_team.hpp"
#include "cuda/local/gating_thread.cuh"
#include "cuda/local/gating_warp.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

constexpr int kBlockWarps = 4;
/// More blocks than run at the same time with the registers they take, so that blocks that end early are replaced.
constexpr std::int64_t kBlocksPerSm = 16;
/// Blocks whose registers fit a multiprocessor: 64 registers per thread suffice for runs of 8 without spills, 80 for
/// 12, 96 for 16.
template <int kRun>
constexpr unsigned kResidentBlocks = kRun <= 8    ? 8
                                     : kRun <= 12 ? 6
                                                  : 5;
/// Few threads, so that a batch of some thousand tokens spreads over all multiprocessors.
constexpr int kSmallBlockThreads = 64;
/// Warps of a multiprocessor that run at the same time.
constexpr int kWarpsInFlight = 32;
/// Loads of choices that a warp has in flight when it enforces the capacity.
constexpr int kAhead = 8;
constexpr int kDropWarps = 8;

/// Words of shared memory of a warp; none if groups are whole lanes.
__host__ __device__ int scratch_words(const GatingKernelParams& params) {
  if (!numeric::is_group_limited(params.gating.options) || params.group_lanes > 0) return 0;
  return params.gating.num_experts + params.gating.options.num_groups;
}

template <int kRun>
__global__ void __launch_bounds__(kBlockWarps* kWarpLanes, kResidentBlocks<kRun>)
    gating_kernel(GatingKernelParams params) {
  std::uint32_t* const scratch =
      reinterpret_cast<std::uint32_t*>(dynamic_shared()) + warp_idx() * scratch_words(params);
  float bias[kRun];
  load_bias<kRun>(params, bias);
  const auto num_warps = static_cast<std::int64_t>(gridDim.x) * kBlockWarps;
  const auto never = [](int) { return false; };
  const int slot = lane_idx() / params.slot_lanes;
  const int k = lane_idx() % params.slot_lanes;
  const std::int64_t num_tokens = params.gating.num_tokens;
  const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * kBlockWarps + warp_idx();
  for (std::int64_t first = warp * params.batch_tokens; first < num_tokens; first += num_warps * params.batch_tokens) {
    const int count = static_cast<int>(min(static_cast<std::int64_t>(params.batch_tokens), num_tokens - first));
    LaneChoice choice;
    for (int i = 0; i < count; ++i) {
      choose<kRun>(params, first + i, i * params.slot_lanes, bias, scratch, never, choice);
    }
    const float weight = weigh(params.gating, first + slot, choice, params.slot_lanes);
    if (slot < count && k < params.gating.options.num_topk) {
      store_entry(params.gating, {first + slot, k}, choice.id, weight);
    }
  }
}

__global__ void __launch_bounds__(kSmallBlockThreads) gating_thread_kernel(GatingKernelParams params) {
  const std::int64_t num_threads = static_cast<std::int64_t>(gridDim.x) * kSmallBlockThreads;
  std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * kSmallBlockThreads + threadIdx.x;
  for (; token < params.gating.num_tokens; token += num_threads) gate_in_thread(params, token);
}

/// A warp calls use(entry, number of earlier choices of the expert among these tokens) for each choice of the expert,
/// and returns the number of such choices.
template <typename Use>
__device__ std::int64_t visit_choices(const GatingParams& gating, int expert, std::int64_t first_token,
                                      std::int64_t end_token, Use use) {
  const int num_topk = gating.options.num_topk;
  const unsigned lower_lanes = (1U << lane_idx()) - 1;
  std::int64_t num_before = 0;
  Entry entry{first_token + lane_idx() / num_topk, lane_idx() % num_topk};
  const std::int64_t num_entries = (end_token - first_token) * num_topk;
  for (std::int64_t first = 0; first < num_entries; first += kAhead * kWarpLanes) {
    Entry entries[kAhead];
    bool hits[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      entries[i] = entry;
      hits[i] = entry.token < end_token && load_id(gating, entry) == expert;
      entry = entry_after_warp(entry, num_topk);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const unsigned all_hits = __ballot_sync(kAllLanes, hits[i]);
      if (hits[i]) use(entries[i], num_before + __popc(all_hits & lower_lanes));
      num_before += __popc(all_hits);
    }
  }
  return num_before;
}

/// The block of each expert counts the tokens that chose it, with all warps in parallel, and then drops it from the
/// choices of the tokens that find it full. Entries that other blocks drop meanwhile read as before or as -1: neither
/// is this block's expert.
__global__ void __launch_bounds__(kDropWarps* kWarpLanes) drop_kernel(GatingKernelParams params) {
  const GatingParams& gating = params.gating;
  const int expert = static_cast<int>(blockIdx.x);
  auto* const counts = reinterpret_cast<std::int64_t*>(dynamic_shared());
  const std::int64_t part = (gating.num_tokens + kDropWarps - 1) / kDropWarps;
  const std::int64_t first = min(warp_idx() * part, gating.num_tokens);
  const std::int64_t end = min(first + part, gating.num_tokens);
  const std::int64_t count = visit_choices(gating, expert, first, end, [](const Entry&, std::int64_t) {});
  if (lane_idx() == 0) counts[warp_idx()] = count;
  __syncthreads();
  std::int64_t room = gating.options.capacity;
  for (int warp = 0; warp < warp_idx(); ++warp) room -= counts[warp];
  if (count <= room) return;
  visit_choices(gating, expert, first, end, [&](const Entry& entry, std::int64_t num_before) {
    if (num_before >= room) store_entry(gating, entry, -1, 0.0F);
  });
}

/// As many warps as have enough registers.
template <int kRun>
constexpr int kRechooseWarps = kRun <= 8 ? 32 : 16;

template <int kRun>
__global__ void __launch_bounds__(kRechooseWarps<kRun>* kWarpLanes) rechoose_kernel(GatingKernelParams params) {
  rechoose_all<kRun>(params, scratch_words(params));
}

using Kernel = void (*)(GatingKernelParams);

struct Kernels {
  int run = 0;
  Kernel choose = nullptr;
  Kernel rechoose = nullptr;
  int most_rechoose_warps = 0;
};

template <int kRun>
constexpr Kernels kKernels = {kRun, gating_kernel<kRun>, rechoose_kernel<kRun>, kRechooseWarps<kRun>};
const Kernels kAllKernels[] = {kKernels<1>, kKernels<2>, kKernels<4>, kKernels<8>, kKernels<12>, kKernels<16>};

bool is_power_of_two(int value) { return value > 0 && (value & (value - 1)) == 0; }

/// Number of blocks for `num_tokens` at `block_tokens` per block, limited to the useful number.
unsigned num_blocks(std::int64_t num_tokens, int block_tokens, int num_sms) {
  return static_cast<unsigned>(std::min((num_tokens + block_tokens - 1) / block_tokens, num_sms * kBlocksPerSm));
}

GatingKernelParams kernel_params(const GatingParams& gating, int run, int num_sms) {
  constexpr int kVector = 4;
  GatingKernelParams params;
  params.gating = gating;
  params.run_length = numeric::gating_run_length(gating.num_experts);
  const std::size_t vector_bytes = kVector * (gating.is_bfloat16 ? sizeof(std::uint16_t) : sizeof(float));
  params.whole_runs = params.run_length == run && run % kVector == 0 && gating.num_experts % run == 0 &&
                      reinterpret_cast<std::uintptr_t>(gating.logits) % vector_bytes == 0;
  const int group_size = gating.num_experts / gating.options.num_groups;
  const int group_lanes = group_size / params.run_length;
  if (group_size % params.run_length == 0 && is_power_of_two(group_lanes)) params.group_lanes = group_lanes;
  constexpr std::size_t kRowAlignment = sizeof(float4);
  params.whole_rows = gating.num_experts == kThreadExperts && !gating.is_bfloat16 &&
                      reinterpret_cast<std::uintptr_t>(gating.logits) % kRowAlignment == 0;
  params.slot_lanes = 1;
  while (params.slot_lanes < gating.options.num_topk) params.slot_lanes *= 2;
  // With few tokens each warp takes one: concurrency then matters more than a lower number of instructions.
  const std::int64_t tokens_per_warp = gating.num_tokens / (static_cast<std::int64_t>(num_sms) * kWarpsInFlight);
  params.batch_tokens = static_cast<int>(std::clamp<std::int64_t>(tokens_per_warp, 1, kWarpLanes / params.slot_lanes));
  return params;
}

/// Launches with as many warps as shared memory allows.
cudaError_t launch_rechoose(const Kernels& kernels, const GatingKernelParams& params, cudaStream_t stream) {
  constexpr int kMostWords = (48 << 10) / sizeof(std::uint32_t);  // shared memory of a launch that does not request
                                                                  // more
  const int words = rechoose_words(params);
  const int warp_words = scratch_words(params);
  const int num_warps = std::min(kernels.most_rechoose_warps, (kMostWords - words) / std::max(warp_words, 1));
  const auto num_bytes = static_cast<std::size_t>(words + num_warps * warp_words) * sizeof(std::uint32_t);
  return launch_kernel(kernels.rechoose, {1, static_cast<unsigned>(num_warps * kWarpLanes), num_bytes}, params, stream);
}

}  // namespace

cudaError_t launch_gating(const GatingParams& gating, int num_sms, cudaStream_t stream) {
  if (gating.num_tokens == 0) return cudaSuccess;
  const int run_length = numeric::gating_run_length(gating.num_experts);
  const Kernels* kernels = std::begin(kAllKernels);
  while (kernels->run < run_length) ++kernels;
  const GatingKernelParams params = kernel_params(gating, kernels->run, num_sms);
  const std::size_t scratch_bytes = static_cast<std::size_t>(scratch_words(params)) * sizeof(std::uint32_t);
  cudaError_t error = cudaSuccess;
  if (gating.num_experts <= kThreadExperts && !numeric::is_group_limited(gating.options)) {
    error =
        launch_kernel(gating_thread_kernel,
                      {num_blocks(gating.num_tokens, kSmallBlockThreads, num_sms), kSmallBlockThreads}, params, stream);
  } else if (!launch_gating_teams(gating, num_sms, stream, &error)) {
    const unsigned blocks = num_blocks(gating.num_tokens, kBlockWarps * params.batch_tokens, num_sms);
    error =
        launch_kernel(kernels->choose, {blocks, kBlockWarps * kWarpLanes, kBlockWarps * scratch_bytes}, params, stream);
  }
  if (error != cudaSuccess || gating.options.capacity == 0) return error;
  if (gating.options.overflow == GatingOverflow::kDrop) {
    const auto num_drop_blocks = static_cast<unsigned>(gating.num_experts);
    const std::size_t counts_bytes = kDropWarps * sizeof(std::int64_t);
    return launch_kernel(drop_kernel, {num_drop_blocks, kDropWarps * kWarpLanes, counts_bytes}, params, stream);
  }
  return launch_rechoose(*kernels, params, stream);
}

cudaError_t load_gating_kernels() {
  const auto load = [](Kernel kernel) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  };
  cudaError_t error = load(drop_kernel);
  if (error == cudaSuccess) error = load(gating_thread_kernel);
  if (error == cudaSuccess) error = load_gating_team_kernels();
  for (const Kernels& kernels : kAllKernels) {
    if (error == cudaSuccess) error = load(kernels.choose);
    if (error == cudaSuccess) error = load(kernels.rechoose);
  }
  return error;
}

}  // namespace ferry::cuda
