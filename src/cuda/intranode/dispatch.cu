/// The dispatch kernel: which block does what, and how a call begins and ends.

#include "cuda/driver/launch.hpp"
#include "cuda/intranode/dispatch_receive.cuh"
#include "cuda/intranode/dispatch_send.cuh"
#include "plan/carver.hpp"

namespace ferry::cuda {
namespace {

using namespace device;

/// A block's shared memory, sizes and pointers from one place. Stages come first, where they are aligned to
/// kLandingBytes.
struct Shared {
  std::byte* stages;    ///< with the copy engine only: stages and their barriers
  Receiver* receivers;  ///< [R]
  std::size_t size_bytes;

  FERRY_HOST_DEVICE static Shared at(std::byte* base, int num_ranks, bool bulk) {
    plan::Carver carver(base);
    Shared shared{};
    shared.stages = carver.take<std::byte>(bulk ? kStagesBytes + kBarriersBytes : 0);
    shared.receivers = carver.take<Receiver>(static_cast<std::size_t>(num_ranks));
    shared.size_bytes = carver.used_bytes();
    return shared;
  }
};

std::size_t shared_bytes(int num_ranks, bool bulk) { return Shared::at(nullptr, num_ranks, bulk).size_bytes; }

/// Tells the receiving blocks how the call goes. They must not read the messages themselves: a peer may write its next
/// message as soon as the sending blocks are done with this one.
__device__ void post_outcome(const CrewParams& crew, std::uint64_t epoch, Outcome outcome) {
  store_release_system(&crew.control.local->outcome, epoch << 2 | static_cast<std::uint64_t>(outcome));
}

__device__ Outcome await_outcome(const CrewParams& crew, std::uint64_t epoch) {
  __shared__ Outcome outcome;
  if (threadIdx.x == 0) {
    const std::uint64_t* word = &crew.control.local->outcome;
    const bool here = wait_flag(crew, {Awaited::kOwn, crew.rank, epoch}, word, epoch << 2);
    outcome = here ? static_cast<Outcome>(load_acquire_system(word) & 3U) : Outcome::kStop;
  }
  __syncthreads();
  return outcome;
}

template <bool kBulk>
__device__ void send(const DispatchParams& params, const Shared& shared, std::uint64_t epoch, Outcome outcome) {
  const int warp = static_cast<int>(blockIdx.x) * kDispatchWarps + warp_idx();
  const int num_warps = params.num_send_blocks * kDispatchWarps;
  const bool go = outcome == Outcome::kGo;
  const bool watched = go && find_receivers(params, shared.receivers);
  // Nobody watches: one chunk, reported at the end.
  const ChunkBorders chunks = watched ? params.chunks : ChunkBorders{params.num_blocks, params.num_blocks};
  const int num_chunks = watched ? chunks.num_chunks() : 1;
  const auto rows_after = [&params, go, watched, chunks](int chunk, int rank) -> std::int64_t {
    if (!go) return 0;
    const int blocks = watched ? chunks.end_block(chunk) : params.num_blocks;
    return params.block_ranks[blocks * params.crew.num_ranks + rank];
  };
  const auto chunk_of = [&params, watched, chunks](std::int64_t token) {
    return watched ? chunks.chunk_of(static_cast<int>(token) / params.tokens_per_block) : 0;
  };
  ChunkReporter reporter(params.crew, {num_warps, num_chunks}, epoch, rows_after, true);
  if (go) {
    const Sender sender(params, shared.receivers, warp, num_warps);
    const TableSender table_sender(params, shared.receivers);
    if constexpr (kBulk) {
      WarpStages stages = make_stages(shared.stages);
      send_bulk(params, sender, table_sender, stages, reporter, chunk_of);
    } else {
      send_by_threads(params, sender, table_sender, reporter, chunk_of);
    }
  }
  reporter.report_before(num_chunks);
}

template <bool kBulk>
__device__ void receive(const DispatchParams& params, const Shared& shared, std::uint64_t epoch) {
  if (await_outcome(params.crew, epoch) == Outcome::kGo) {
    const int block = static_cast<int>(blockIdx.x) - params.num_send_blocks;
    const int num_warps = params.num_receive_blocks * kDispatchWarps;
    Arrivals arrivals(params, epoch, block * kDispatchWarps + warp_idx(), num_warps);
    if constexpr (kBulk) {
      WarpStages stages = make_stages(shared.stages);
      BulkReceiver(params, stages, arrivals).run();
    } else {
      receive_by_threads(params, arrivals);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_system();
    add_acq_rel_device(&params.crew.control.local->num_receivers_done, 1);
  }
}

/// One warp of the first block, after its own sending.
__device__ void end_call(const DispatchParams& params, std::uint64_t epoch) {
  const CrewParams& crew = params.crew;
  LocalState& local = *crew.control.local;
  const bool own = wait_until(
      crew, {Awaited::kOwn, crew.rank, epoch},
      [&local] { return static_cast<std::uint64_t>(load_acquire_device(&local.num_receivers_done)); },
      static_cast<std::uint64_t>(params.num_receive_blocks));
  if (__all_sync(0xFFFFFFFFU, own) == 0) return;
  if (lane_idx() == 0) local.num_receivers_done = 0;
  finish_call(crew, epoch);
}

template <bool kBulk>
__global__ void __launch_bounds__(kDispatchThreads, 1) dispatch_kernel(const __grid_constant__ DispatchParams params) {
  extern __shared__ __align__(kLandingBytes) std::byte memory[];
  const CrewParams& crew = params.crew;
  if (is_broken(crew)) return;
  const bool first = blockIdx.x == 0;
  if (params.summary != nullptr && params.summary->valid == 0) {
    if (first && threadIdx.x == 0) report_refused_route(crew, *params.summary);
    return;
  }
  const std::uint64_t epoch = current_epoch(crew);
  const Shared shared = Shared::at(memory, crew.num_ranks, kBulk);
  if (static_cast<int>(blockIdx.x) >= params.num_send_blocks) {
    receive<kBulk>(params, shared, epoch);
    return;
  }
  if (first && warp_idx() == 0) post_entry(crew, params.entry, epoch);
  const Outcome outcome = await_entries(crew, params.entry, epoch);
  if (first && threadIdx.x == 0) {
    post_outcome(crew, epoch, outcome);
    if (outcome == Outcome::kSkip && params.entry.agreement != 0) report_disagreement(crew, epoch);
  }
  if (outcome == Outcome::kStop) return;
  send<kBulk>(params, shared, epoch, outcome);
  if (first && warp_idx() == 0) end_call(params, epoch);
}

}  // namespace

cudaError_t launch_dispatch(const DispatchParams& params, cudaStream_t stream) {
  const int num_blocks = params.num_send_blocks + params.num_receive_blocks;
  const LaunchShape shape{static_cast<unsigned>(num_blocks), kDispatchThreads,
                          shared_bytes(params.crew.num_ranks, params.bulk)};
  return launch_kernel(params.bulk ? dispatch_kernel<true> : dispatch_kernel<false>, shape, params, stream);
}

cudaError_t load_padding_kernel();

cudaError_t load_dispatch_kernels(std::size_t shared_limit, bool& has_bulk) {
  if (const cudaError_t error = load_padding_kernel(); error != cudaSuccess) return error;
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, dispatch_kernel<true>);
  if (error != cudaSuccess) return error;
  constexpr int kFirstWithBulk = 90;  // PTX ISA, cp.async.bulk: sm_90
  has_bulk = attributes.ptxVersion >= kFirstWithBulk && attributes.binaryVersion >= kFirstWithBulk &&
             shared_bytes(kMaxRanks, true) <= shared_limit;
  error = cudaFuncSetAttribute(dispatch_kernel<false>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes(kMaxRanks, false)));
  if (error != cudaSuccess || !has_bulk) return error;
  return cudaFuncSetAttribute(dispatch_kernel<true>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared_bytes(kMaxRanks, true)));
}

}  // namespace ferry::cuda
