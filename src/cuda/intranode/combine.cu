/// The combine kernel: the work of each block, and how a call begins and ends.

#include "cuda/driver/launch.hpp"
#include "cuda/intranode/combine_stage.cuh"
#include "cuda/intranode/combine_sum.cuh"
#include "cuda/intranode/combine_sum_bulk.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

/// Warps of a block that sums by loads: as many as registers allow without spilling the loads in flight.
constexpr int kThreadPathWarps = 12;
/// Warps of a block that sums rows landed by the copy engine: as many as have their sets in shared memory.
constexpr int kBulkPathWarps = 12;

/// Barriers of a warp: one per set when it sums, one per piece when it stages.
constexpr int kStageBarriers = kSumSets > kStagerPieces ? kSumSets : kStagerPieces;

FERRY_HOST_DEVICE constexpr int warps_of(bool bulk) { return bulk ? kBulkPathWarps : kThreadPathWarps; }

/// A block's work. Blocks begin in the order of their numbers; where only some have room, the others begin when these
/// end. So no block may wait for a block of a higher number, of its own rank or of a peer. Summing blocks wait for rows
/// that peers stage, so staging blocks have the lower numbers. The first block ends the call and waits for all others,
/// so a call needs room for two blocks.
struct BlockWork {
  bool stages;
  int idx;  ///< number among the staging blocks, or among the summing ones

  __device__ static BlockWork of(const CombineParams& params) {
    const auto block = static_cast<int>(blockIdx.x);
    if (block == 0) return {false, 0};
    if (block <= params.num_stage_blocks) return {true, block - 1};
    return {false, block - params.num_stage_blocks};
  }
};

/// Waits for the entries and reports their outcome to the host. All threads of a block call it.
template <typename Take>
__device__ Outcome enter(const CombineParams& params, std::uint64_t epoch, Take take) {
  const Outcome outcome = await_entries(params.ranks, params.entry, epoch, take);
  if (blockIdx.x == 0 && threadIdx.x == 0 && outcome == Outcome::kSkip && params.entry.agreement != 0) {
    report_disagreement(params.ranks, epoch);
  }
  return outcome;
}

/// Layout of a block's shared memory: one function yields both sizes and pointers. Sets are at the start, where they
/// are aligned to kLandingBytes.
struct Shared {
  std::byte* sets;          ///< [warps, kSumSets, kSetBytes]
  Holder* holders;          ///< [R]
  int* num_blocks;          ///< [R] blocks of each rank's kernel
  Terms* terms;             ///< [warps, kSumTokens], or [warps] without sets
  FetchedEntries* entries;  ///< [warps]
  float* weights;           ///< [warps, kFetchedWeights]
  std::uint64_t* barriers;  ///< [warps, kStageBarriers]
  std::uint32_t* marks;     ///< [warps] marks of RoundMarker
  std::uint32_t* known;     ///< [R] rows of each rank that are known to be staged
  std::size_t size_bytes;

  FERRY_HOST_DEVICE static Shared at(std::byte* base, int num_ranks, bool bulk) {
    const auto num_warps = static_cast<std::size_t>(warps_of(bulk));
    plan::Carver carver(base);
    Shared shared{};
    shared.sets = carver.take<std::byte>(bulk ? num_warps * kSumSets * kSetBytes : 0);
    shared.holders = carver.take<Holder>(static_cast<std::size_t>(num_ranks));
    shared.num_blocks = carver.take<int>(static_cast<std::size_t>(num_ranks));
    shared.terms = carver.take<Terms>(bulk ? num_warps * kSumTokens : num_warps);
    shared.entries = carver.take<FetchedEntries>(bulk ? num_warps : 0);
    shared.weights = carver.take<float>(num_warps * kFetchedWeights);
    shared.barriers = carver.take<std::uint64_t>(bulk ? num_warps * kStageBarriers : 0);
    shared.marks = carver.take<std::uint32_t>(num_warps);
    shared.known = carver.take<std::uint32_t>(static_cast<std::size_t>(num_ranks));
    shared.size_bytes = carver.used_bytes();
    return shared;
  }
};

/// This warp's part of the shared memory. No other warp uses that part.
__device__ SumStages make_stages(const Shared& shared) {
  const auto warp = static_cast<std::size_t>(warp_idx());
  const SumStages stages{shared.sets + warp * kSumSets * kSetBytes, shared.barriers + warp * kStageBarriers,
                         shared.terms + warp * kSumTokens, shared.entries + warp};
  if (lane_idx() == 0) {
    for (int i = 0; i < kStageBarriers; ++i) init_barrier(stages.barriers + i);
    publish_barriers();
  }
  __syncwarp();
  return stages;
}

/// Waits for the entries and sums this block's share of the tokens. `block`: number among the summing blocks. All
/// threads of a summing block call it.
template <typename Rows, bool kBulk>
__device__ Outcome sum(const CombineParams& params, const Shared& shared, const SumStages& stages, std::uint64_t epoch,
                       int block) {
  const auto take = [&params, &shared](int rank, const ReceivedEntry& entry) {
    const Holder holder = holder_of<Rows::kQuantized>(params, rank, entry);
    const int num_blocks = entry.num_blocks();
    if (lane_idx() == 0) {
      shared.holders[rank] = holder;
      shared.num_blocks[rank] = num_blocks;
      shared.known[rank] = 0;
    }
  };
  // Consecutive items go to different blocks, so that small batches spread over the blocks.
  const int first = warp_idx() * params.num_sum_blocks + block;
  const int step = params.num_sum_blocks * warps_of(kBulk);
  TermFinder finder(params, shared.holders, shared.known, epoch);
  ReturnedWeights weights(params, shared.holders, shared.weights + warp_idx() * kFetchedWeights);
  if constexpr (kBulk) {
    BulkSummer<Rows> summer(params, finder, weights, stages, first, step);
    const Outcome outcome = enter(params, epoch, take);
    if (outcome == Outcome::kGo) {
      summer.run();
    } else {
      summer.drop();
    }
    return outcome;
  } else {
    const Outcome outcome = enter(params, epoch, take);
    if (outcome == Outcome::kGo) {
      sum_by_threads<Rows>(params, finder, weights, shared.terms[warp_idx()], first, step);
    }
    return outcome;
  }
}

template <typename Rows, bool kBulk>
__global__ void __launch_bounds__(warps_of(kBulk) * kWarpLanes, 1)
    combine_kernel(const __grid_constant__ CombineParams params) {
  if constexpr (kBulk) await_kernel_before();
  const RankParams& ranks = params.ranks;
  const BlockWork work = BlockWork::of(params);
  // Prefetched beside the loads that begin the call: a staging block's first rows depend on it.
  if (work.stages && threadIdx.x == 0) prefetch_l2(params.source_base + ranks.rank);
  const CallStart start = start_call(ranks, params.summary);
  if (start.broken) return;
  const bool first = blockIdx.x == 0;
  if (!start.routed) {
    if (first && threadIdx.x == 0) report_refused_route(ranks, *params.summary);
    return;
  }
  if (first && warp_idx() == warps_of(kBulk) - 1) post_entry(ranks, params.entry, start.epoch);
  const Shared shared = Shared::at(dynamic_shared(), ranks.num_ranks, kBulk);
  SumStages stages{};
  if constexpr (kBulk) stages = make_stages(shared);
  Outcome outcome = Outcome::kStop;
  if (!work.stages) {
    outcome = sum<Rows, kBulk>(params, shared, stages, start.epoch, work.idx);
  } else {
    const StageBlock stage_block{work.idx, warps_of(kBulk) - 1, shared.marks};
    if (warp_idx() == 0 && lane_idx() < stage_block.num_warps) shared.marks[lane_idx()] = 0;
    __syncthreads();
    stage_rows<Rows, kBulk>(params, stages, start.epoch, stage_block);
    outcome = enter(params, start.epoch, [](int /*rank*/, const ReceivedEntry& /*entry*/) {});
  }
  if (outcome == Outcome::kStop) return;
  post_block_done(ranks, start.epoch);
  if (!first) return;
  if (outcome == Outcome::kGo) {
    finish_blocks(ranks, start.epoch, shared.num_blocks);
    if (threadIdx.x == 0) ranks.control.local->num_items_claimed = 0;  // all of this rank's blocks are done
  } else {
    finish_refused(ranks, start.epoch, static_cast<int>(gridDim.x));
  }
}

using CombineKernel = void (*)(CombineParams);

template <template <bool> typename Rows>
CombineKernel choose_kernel(bool float32, bool bulk) {
  if (float32) return bulk ? combine_kernel<Rows<true>, true> : combine_kernel<Rows<true>, false>;
  return bulk ? combine_kernel<Rows<false>, true> : combine_kernel<Rows<false>, false>;
}

CombineKernel choose_kernel(bool float32, bool bulk, bool fp8) {
  return fp8 ? choose_kernel<Fp8Rows>(float32, bulk) : choose_kernel<PlainRows>(float32, bulk);
}

}  // namespace

cudaError_t launch_combine(const CombineParams& params, cudaStream_t stream) {
  const auto num_blocks = static_cast<unsigned>(params.num_sum_blocks + params.num_stage_blocks);
  const auto num_threads = static_cast<unsigned>(warps_of(params.bulk) * kWarpLanes);
  const std::size_t shared_bytes = Shared::at(nullptr, params.ranks.num_ranks, params.bulk).size_bytes;
  const LaunchShape shape{.num_blocks = num_blocks,
                          .num_threads = num_threads,
                          .shared_bytes = shared_bytes,
                          .overlaps = params.overlaps,
                          .num_copy_blocks = static_cast<unsigned>(params.num_stage_blocks)};
  return launch_kernel(choose_kernel(params.float32, params.bulk, params.fp8), shape, params, stream);
}

cudaError_t load_combine_kernels(std::size_t shared_limit, bool& has_bulk) {
  has_bulk = has_bulk && Shared::at(nullptr, kMaxRanks, true).size_bytes <= shared_limit;
  for (const bool bulk : {false, true}) {
    if (bulk && !has_bulk) continue;
    const auto most_bytes = static_cast<int>(Shared::at(nullptr, kMaxRanks, bulk).size_bytes);
    for (const bool float32 : {false, true}) {
      for (const bool fp8 : {false, true}) {
        const CombineKernel kernel = choose_kernel(float32, bulk, fp8);
        const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                       cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
