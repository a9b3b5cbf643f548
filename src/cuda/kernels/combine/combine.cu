/// The combine kernel: which block does what, and how a call begins and ends.

#include "cuda/kernels/combine/stage.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

/// Counts a block as finished with the peers' memory.
__device__ void arrive(const CrewParams& crew) {
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_system();
    add_acq_rel_device(&crew.control.local->num_blocks_done, 1);
  }
}

/// One warp of the first block: when all blocks of this rank are finished, the peers hear; when all peers are, it ends.
__device__ void end_call(const CombineParams& params, std::uint64_t epoch) {
  const CrewParams& crew = params.crew;
  LocalState& local = *crew.control.local;
  const bool own = wait_until(
      crew, {Awaited::kOwn, crew.rank, epoch},
      [&local] { return static_cast<std::uint64_t>(load_acquire_device(&local.num_blocks_done)); }, gridDim.x);
  if (__all_sync(0xFFFFFFFFU, own) == 0) return;
  if (lane_idx() == 0) local.num_blocks_done = 0;
  post_done(crew, epoch);
  finish_call(crew, epoch);
}

template <bool kFloat32>
__global__ void __launch_bounds__(kCombineThreads, 1) combine_kernel(const __grid_constant__ CombineParams params) {
  extern __shared__ __align__(16) std::byte shared[];
  const CrewParams& crew = params.crew;
  if (is_broken(crew)) return;
  const bool first = blockIdx.x == 0;
  if (params.summary != nullptr && params.summary->valid == 0) {
    if (first && threadIdx.x == 0) report_refused_route(crew, *params.summary);
    return;
  }
  const std::uint64_t epoch = current_epoch(crew);
  if (first && warp_idx() == 0) post_entry(crew, params.entry, epoch);
  const Outcome outcome = await_entries(crew, params.entry, epoch);
  if (outcome == Outcome::kStop) return;
  if (first && threadIdx.x == 0 && outcome == Outcome::kSkip && params.entry.agreement != 0)
    report_disagreement(crew, epoch);

  const int block = static_cast<int>(blockIdx.x);
  if (block >= params.num_sum_blocks) {
    const int warp = (block - params.num_sum_blocks) * kCombineWarps + warp_idx();
    stage_rows(params, epoch, outcome, warp, params.num_stage_blocks * kCombineWarps);
  } else if (outcome == Outcome::kGo) {
    auto* holders = reinterpret_cast<Holder*>(shared);
    auto* terms = reinterpret_cast<Terms*>(shared + static_cast<std::size_t>(crew.num_ranks) * sizeof(Holder));
    find_holders(params, holders);
    Summing<kFloat32> summing(params, holders, terms + warp_idx(), epoch);
    const std::int64_t num_warps = static_cast<std::int64_t>(params.num_sum_blocks) * kCombineWarps;
    for (std::int64_t token = static_cast<std::int64_t>(block) * kCombineWarps + warp_idx();
         token < params.num_tokens && summing.sum_token(token); token += num_warps) {
    }
  }
  arrive(crew);
  if (first && warp_idx() == 0) end_call(params, epoch);
}

std::size_t shared_bytes(int num_ranks) {
  return static_cast<std::size_t>(num_ranks) * sizeof(Holder) + kCombineWarps * sizeof(Terms);
}

}  // namespace

cudaError_t launch_combine(const CombineParams& params, cudaStream_t stream) {
  const int num_blocks = params.num_sum_blocks + params.num_stage_blocks;
  const std::size_t bytes = shared_bytes(params.crew.num_ranks);
  if (params.float32) {
    combine_kernel<true><<<num_blocks, kCombineThreads, bytes, stream>>>(params);
  } else {
    combine_kernel<false><<<num_blocks, kCombineThreads, bytes, stream>>>(params);
  }
  return cudaGetLastError();
}

cudaError_t load_combine_kernels() {
  const auto most_bytes = static_cast<int>(shared_bytes(kMaxRanks));
  constexpr cudaFuncAttribute kAttribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  const cudaError_t error = cudaFuncSetAttribute(combine_kernel<true>, kAttribute, most_bytes);
  return error != cudaSuccess ? error : cudaFuncSetAttribute(combine_kernel<false>, kAttribute, most_bytes);
}

}  // namespace ferry::cuda
