/// The combine kernel: which block does what, and how a call begins and ends.

#include "cuda/driver/launch.hpp"
#include "cuda/intranode/combine_stage.cuh"
#include "cuda/intranode/combine_sum.cuh"
#include "cuda/intranode/combine_sum_bulk.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

/// Warps of a block that sums by loads: as many as registers allow without spilling what is in flight.
constexpr int kThreadPathWarps = 12;
/// Warps of a block that sums what the copy engine brings: as many as shared memory holds the sets of.
constexpr int kBulkPathWarps = 12;

/// A warp sums with one per set, or stages with one per piece.
constexpr int kStageBarriers = kSumSets > kStagerPieces ? kSumSets : kStagerPieces;

FERRY_HOST_DEVICE constexpr int warps_of(bool bulk) { return bulk ? kBulkPathWarps : kThreadPathWarps; }

/// Counts a block as finished with the peers' memory.
__device__ void arrive(const RankParams& ranks) {
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_system();
    add_acq_rel_device(&ranks.control.local->num_blocks_done, 1);
  }
}

/// One warp of the first block: waits for all blocks of this rank, signals the peers, and ends the call when all ranks
/// are done.
__device__ void end_call(const CombineParams& params, std::uint64_t epoch) {
  const RankParams& ranks = params.ranks;
  LocalState& local = *ranks.control.local;
  const bool own = wait_until(
      ranks, {Awaited::kOwn, ranks.rank, epoch},
      [&local] { return static_cast<std::uint64_t>(load_acquire_device(&local.num_blocks_done)); }, gridDim.x);
  if (__all_sync(0xFFFFFFFFU, own) == 0) return;
  if (lane_idx() == 0) local.num_blocks_done = 0;
  post_done(ranks, epoch);
  finish_call(ranks, epoch);
}

/// A block's shared memory, sizes and pointers from one place. Sets come first, where they are aligned to
/// kLandingBytes.
struct Shared {
  std::byte* sets;          ///< [warps, kSumSets, kSetBytes]
  Holder* holders;          ///< [R]
  Terms* terms;             ///< [warps, kSumTokens], or [warps] without sets
  std::uint64_t* barriers;  ///< [warps, kStageBarriers]
  std::size_t size_bytes;

  FERRY_HOST_DEVICE static Shared at(std::byte* base, int num_ranks, bool bulk) {
    const auto num_warps = static_cast<std::size_t>(warps_of(bulk));
    plan::Carver carver(base);
    Shared shared{};
    shared.sets = carver.take<std::byte>(bulk ? num_warps * kSumSets * kSetBytes : 0);
    shared.holders = carver.take<Holder>(static_cast<std::size_t>(num_ranks));
    shared.terms = carver.take<Terms>(bulk ? num_warps * kSumTokens : num_warps);
    shared.barriers = carver.take<std::uint64_t>(bulk ? num_warps * kStageBarriers : 0);
    shared.size_bytes = carver.used_bytes();
    return shared;
  }
};

/// This warp's part of it. All threads of the block; follow with a block barrier.
__device__ SumStages make_stages(const Shared& shared) {
  const auto warp = static_cast<std::size_t>(warp_idx());
  const SumStages stages{shared.sets + warp * kSumSets * kSetBytes, shared.barriers + warp * kStageBarriers,
                         shared.terms + warp * kSumTokens};
  if (lane_idx() == 0) {
    for (int i = 0; i < kStageBarriers; ++i) init_barrier(stages.barriers + i);
    publish_barriers();
  }
  return stages;
}

template <bool kFloat32, bool kBulk>
__device__ void sum_tokens(const CombineParams& params, const Shared& shared, const SumStages& stages,
                           std::uint64_t epoch) {
  find_holders(params, shared.holders);  // ends with a block barrier
  fence_async_proxy();
  const TermFinder finder(params, shared.holders, epoch);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * warps_of(kBulk) + warp_idx();
  const std::int64_t step = static_cast<std::int64_t>(params.num_sum_blocks) * warps_of(kBulk);
  if constexpr (kBulk) {
    BulkSummer<kFloat32>(params, finder, stages, first, step).run();
  } else {
    sum_by_threads<kFloat32>(params, finder, shared.terms[warp_idx()], first, step);
  }
}

template <bool kFloat32, bool kBulk>
__global__ void __launch_bounds__(warps_of(kBulk) * kWarpLanes, 1)
    combine_kernel(const __grid_constant__ CombineParams params) {
  extern __shared__ __align__(kLandingBytes) std::byte memory[];
  const RankParams& ranks = params.ranks;
  if (is_broken(ranks)) return;
  const bool first = blockIdx.x == 0;
  if (params.summary != nullptr && params.summary->valid == 0) {
    if (first && threadIdx.x == 0) report_refused_route(ranks, *params.summary);
    return;
  }
  const std::uint64_t epoch = current_epoch(ranks);
  if (first && warp_idx() == 0) post_entry(ranks, params.entry, epoch);
  const Outcome outcome = await_entries(ranks, params.entry, epoch);
  if (outcome == Outcome::kStop) return;
  if (first && threadIdx.x == 0 && outcome == Outcome::kSkip && params.entry.agreement != 0) {
    report_disagreement(ranks, epoch);
  }
  const Shared shared = Shared::at(memory, ranks.num_ranks, kBulk);
  SumStages stages{};
  if constexpr (kBulk) stages = make_stages(shared);
  __syncthreads();
  const int block = static_cast<int>(blockIdx.x);
  if (block >= params.num_sum_blocks) {
    const int warp = (block - params.num_sum_blocks) * warps_of(kBulk) + warp_idx();
    stage_rows<kBulk>(params, stages, epoch, outcome, warp, params.num_stage_blocks * warps_of(kBulk));
  } else if (outcome == Outcome::kGo) {
    sum_tokens<kFloat32, kBulk>(params, shared, stages, epoch);
  }
  arrive(ranks);
  if (first && warp_idx() == 0) end_call(params, epoch);
}

using CombineKernel = void (*)(CombineParams);

CombineKernel choose_kernel(bool float32, bool bulk) {
  if (float32) return bulk ? combine_kernel<true, true> : combine_kernel<true, false>;
  return bulk ? combine_kernel<false, true> : combine_kernel<false, false>;
}

}  // namespace

cudaError_t launch_combine(const CombineParams& params, cudaStream_t stream) {
  const auto num_blocks = static_cast<unsigned>(params.num_sum_blocks + params.num_stage_blocks);
  const auto num_threads = static_cast<unsigned>(warps_of(params.bulk) * kWarpLanes);
  const std::size_t shared_bytes = Shared::at(nullptr, params.ranks.num_ranks, params.bulk).size_bytes;
  return launch_kernel(choose_kernel(params.float32, params.bulk), {num_blocks, num_threads, shared_bytes}, params,
                       stream);
}

cudaError_t load_combine_kernels(std::size_t shared_limit, bool& has_bulk) {
  has_bulk = has_bulk && Shared::at(nullptr, kMaxRanks, true).size_bytes <= shared_limit;
  for (const bool float32 : {false, true}) {
    for (const bool bulk : {false, true}) {
      if (bulk && !has_bulk) continue;
      const auto most_bytes = static_cast<int>(Shared::at(nullptr, kMaxRanks, bulk).size_bytes);
      const cudaError_t error =
          cudaFuncSetAttribute(choose_kernel(float32, bulk), cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
