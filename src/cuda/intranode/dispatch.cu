/// The dispatch kernel: which block does what, and how a call begins and ends.

#include "cuda/call/padding.hpp"
#include "cuda/driver/launch.hpp"
#include "cuda/intranode/dispatch_receive.cuh"
#include "cuda/intranode/dispatch_receive_runs.cuh"
#include "cuda/intranode/dispatch_runs.cuh"
#include "cuda/intranode/dispatch_shared.cuh"
#include "cuda/intranode/dispatch_tokens.cuh"
#include "cuda/sync/entry.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/part_barrier.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

/// Warps of a block that receive row by row. The last warp of a receiving block watches what arrives, for all of them.
constexpr int kReceiveWarps = kDispatchWarps - 1;
static_assert(kRunWarps <= kReceiveWarps);

std::size_t shared_bytes(int num_ranks, bool bulk) { return Shared::at(nullptr, num_ranks, bulk).size_bytes; }

/// Warps of a block that send in runs.
__device__ int sending_warps(const DispatchParams& params) {
  return params.few_run_warps ? DispatchParams::kFewRunWarps : kRunWarps;
}

__device__ void meet_sending_warps(const DispatchParams& params) {
  if (params.few_run_warps) {
    meet_warps<DispatchParams::kFewRunWarps>();
  } else {
    meet_warps<kRunWarps>();
  }
}

/// Whether this rank sends in runs.
template <bool kBulk>
__device__ bool may_send_runs(const DispatchParams& params) {
  return kBulk && params.entry.agreement != 0 && params.one_row_per_token;
}

/// What this rank sends to the rank of this thread's number, or a receiving block gets from it.
static_assert(kMaxRanks <= DispatchParams::kFewRunWarps * kWarpLanes);
__device__ Run load_run(const DispatchParams& params) {
  const int num_ranks = params.ranks.num_ranks;
  const auto rank = static_cast<int>(threadIdx.x);
  if (rank >= num_ranks) return {};
  if (static_cast<int>(blockIdx.x) >= params.num_send_blocks) return run_from(params, rank);
  return {params.rank_base[rank], params.block_ranks[params.num_blocks * num_ranks + rank]};
}

/// The part in sending that one warp of a block takes.
struct RunPart {
  RunTargets targets;
  int warp;
  int num_warps;

  __device__ static RunPart of(const DispatchParams& params) {
    const RankParams& ranks = params.ranks;
    const auto block = static_cast<int>(blockIdx.x);
    const int num_link_blocks = params.num_send_blocks - params.num_own_blocks;
    const bool own = block >= num_link_blocks;
    const int first_block = own ? num_link_blocks : 0;
    const int num_blocks = own ? params.num_own_blocks : num_link_blocks;
    // Small batches spread over the blocks.
    RunPart part{{ranks.rank, 1}, warp_idx() * num_blocks + block - first_block, num_blocks * sending_warps(params)};
    if (params.num_own_blocks == 0) part.targets = {ranks.rank, ranks.num_ranks};
    if (params.num_own_blocks != 0 && !own) part.targets = {(ranks.rank + 1) % ranks.num_ranks, ranks.num_ranks - 1};
    return part;
  }
};

/// Sends in runs, after `prime`. Where a receiver watches progress, one warp of each block reports it.
__device__ void send_runs(const DispatchParams& params, const Shared& shared, RunSender& sender, std::uint64_t epoch,
                          bool watched) {
  const ChunkBorders chunks = run_chunks(params, shared.runs);
  if (warp_idx() < sending_warps(params)) {
    ChunkMarker marker(shared.marks + warp_idx());
    sender.run(marker, chunks, watched);
  } else if (watched && warp_idx() == kRunWarps) {
    const auto rows_after = [&chunks, &shared](int chunk, int rank) -> std::int64_t {
      const std::int32_t end_row = chunks.end_block(chunk) * kBorderRows;
      const std::int32_t num_rows = shared.runs[rank].num_rows;
      return num_rows < end_row ? num_rows : end_row;
    };
    const int num_link_blocks = params.num_send_blocks - params.num_own_blocks;
    ChunkReporter reporter(params.ranks, {num_link_blocks, chunks.num_chunks()}, epoch, rows_after);
    report_marks(shared.marks, sending_warps(params), chunks.num_chunks(), reporter);
  }
}

/// Sends token by token. Where a receiver watches progress, one warp of each block reports it.
template <bool kBulk>
__device__ void send_tokens(const DispatchParams& params, const Shared& shared, std::uint64_t epoch, bool watched) {
  const int warps_per_block = watched ? kDispatchWarps - 1 : kDispatchWarps;
  const int warp = static_cast<int>(blockIdx.x) * warps_per_block + warp_idx();
  const int num_chunks = params.chunks.num_chunks();
  WarpStages stages{};
  if constexpr (kBulk) stages = make_stages(shared.stages);
  if (warp_idx() == warps_per_block) {
    const auto rows_after = [&params](int chunk, int rank) -> std::int64_t {
      return params.block_ranks[params.chunks.end_block(chunk) * params.ranks.num_ranks + rank];
    };
    ChunkReporter reporter(params.ranks, {params.num_send_blocks, num_chunks}, epoch, rows_after);
    report_marks(shared.marks, warps_per_block, num_chunks, reporter);
    return;
  }
  const auto chunk_of = [&params, watched](std::int64_t token) {
    return watched ? params.chunks.chunk_of(static_cast<int>(token) / params.tokens_per_block) : 0;
  };
  ChunkMarker marker(shared.marks + warp_idx());
  const Sender sender(params, shared.receivers, warp, params.num_send_blocks * warps_per_block);
  const TableSender table_sender(params, shared.receivers);
  if constexpr (kBulk) {
    send_bulk(params, sender, table_sender, stages, marker, chunk_of);
  } else {
    send_by_threads(params, sender, table_sender, marker, chunk_of);
  }
  marker.report_before(num_chunks);
}

/// Passes the outcome to the receiving blocks. They must not read the entries themselves: a peer may write its next
/// entry as soon as the sending blocks are done with this one.
__device__ void post_outcome(const RankParams& ranks, std::uint64_t epoch, Outcome outcome) {
  store_release_system(&ranks.control.local->outcome, epoch << 2 | static_cast<std::uint64_t>(outcome));
}

__device__ Outcome await_outcome(const RankParams& ranks, std::uint64_t epoch, Outcome* outcome) {
  if (threadIdx.x == 0) {
    const std::uint64_t* word = &ranks.control.local->outcome;
    const bool here = wait_flag(ranks, {Awaited::kOwn, ranks.rank, epoch}, word, epoch << 2);
    *outcome = here ? static_cast<Outcome>(load_acquire_system(word) & 3U) : Outcome::kStop;
  }
  __syncthreads();
  return *outcome;
}

/// Waits for the entries and tells the receiving blocks and the host what they came to. All threads of a sending block.
template <typename Take>
__device__ Outcome enter(const DispatchParams& params, std::uint64_t epoch, Take take) {
  const Outcome outcome = await_entries(params.ranks, params.entry, epoch, take);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    post_outcome(params.ranks, epoch, outcome);
    if (outcome == Outcome::kSkip && params.entry.agreement != 0) report_disagreement(params.ranks, epoch);
  }
  return outcome;
}

/// Waits for the entries, and sends what is to be sent. All threads of a sending block.
template <bool kBulk>
__device__ Outcome send(const DispatchParams& params, const Shared& shared, const Run& run, std::uint64_t epoch) {
  bool watched = false;                                             // some receiver watches progress
  if (threadIdx.x < kDispatchWarps) shared.marks[threadIdx.x] = 0;  // the entry ends with a barrier
  const auto take = [&params, &shared, &watched](int rank, const ReceivedEntry& entry) {
    const Receiver receiver = receiver_of(params, rank, entry);
    const int num_blocks = entry.num_blocks();
    if (lane_idx() == 0) {
      shared.receivers[rank] = receiver;
      shared.num_blocks[rank] = num_blocks;
    }
    watched = watched || receiver.staged || receiver.gets_record;
  };
  if constexpr (kBulk) {
    // What comes first is loaded while the entries come.
    if (may_send_runs<kBulk>(params)) {
      const bool takes_part = warp_idx() < sending_warps(params);
      RunStages stages{};
      stages.stage_bytes = run_stage_bytes(sending_warps(params));  // the others use nothing else of theirs
      if (takes_part) {
        if (static_cast<int>(threadIdx.x) < params.ranks.num_ranks) shared.runs[threadIdx.x] = run;
        stages = make_run_stages(shared, sending_warps(params));
        meet_sending_warps(params);  // the warp that posts the entry meanwhile is none of them
      }
      const RunPart part = RunPart::of(params);
      RunSender sender(params, shared.receivers, shared.runs, stages, part.targets, part.warp, part.num_warps);
      if (takes_part) sender.prime();
      const Outcome outcome = enter(params, epoch, take);
      const bool any_watched = __syncthreads_or(static_cast<int>(watched)) != 0;
      if (outcome == Outcome::kGo) {
        const bool to_peers = part.targets.num > 1 || part.targets.first != params.ranks.rank;
        send_runs(params, shared, sender, epoch, any_watched && to_peers);
      } else if (takes_part) {
        sender.drop();
      }
      return outcome;
    }
  }
  const Outcome outcome = enter(params, epoch, take);
  const bool any_watched = __syncthreads_or(static_cast<int>(watched)) != 0;
  if (outcome == Outcome::kGo) send_tokens<kBulk>(params, shared, epoch, any_watched);
  return outcome;
}

/// Receives with every warp of the block but the last, which watches what arrives.
template <bool kBulk>
__device__ void receive_rows(const DispatchParams& params, const Shared& shared, std::uint64_t epoch) {
  const int block = static_cast<int>(blockIdx.x) - params.num_send_blocks;
  const bool watches = warp_idx() == kReceiveWarps;
  if constexpr (kBulk) {
    if (may_send_runs<kBulk>(params)) {
      if (watches) watch_arrivals(params, epoch, shared.arrived);
      if (warp_idx() >= kRunWarps) return;
      // Small batches spread over the blocks.
      const int warp = warp_idx() * params.num_receive_blocks + block;
      RunReceiver(params, shared.arrived, shared.runs, make_run_stages(shared, kRunWarps), warp,
                  params.num_receive_blocks * kRunWarps)
          .run();
      return;
    }
  }
  WarpStages stages{};
  if constexpr (kBulk) stages = make_stages(shared.stages);
  if (watches) {
    watch_arrivals(params, epoch, shared.arrived);
    return;
  }
  const int num_warps = params.num_receive_blocks * kReceiveWarps;
  Arrivals arrivals(params, shared.arrived, block * kReceiveWarps + warp_idx(), num_warps);
  if constexpr (kBulk) {
    BulkReceiver(params, stages, arrivals).run();
  } else {
    receive_by_threads(params, arrivals);
  }
}

/// All threads of a receiving block. `run`: what comes from the rank of this thread's number.
template <bool kBulk>
__device__ void receive(const DispatchParams& params, const Shared& shared, const Run& run, std::uint64_t epoch) {
  if (static_cast<int>(threadIdx.x) < params.ranks.num_ranks) {
    shared.runs[threadIdx.x] = run;
    shared.arrived[threadIdx.x] = 0;
  }
  // Ends with a barrier.
  if (await_outcome(params.ranks, epoch, shared.outcome) == Outcome::kGo) receive_rows<kBulk>(params, shared, epoch);
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_system();
    add_acq_rel_device(&params.ranks.control.local->num_receivers_done, 1);
  }
}

/// This rank's receiving blocks have all ended; false when the group broke. All threads of the first block.
__device__ bool await_receivers(const DispatchParams& params, std::uint64_t epoch) {
  LocalState& local = *params.ranks.control.local;
  bool own = true;
  if (threadIdx.x == 0) {
    own = wait_until(
        params.ranks, {Awaited::kOwn, params.ranks.rank, epoch},
        [&local] { return static_cast<std::uint64_t>(load_acquire_device(&local.num_receivers_done)); },
        static_cast<std::uint64_t>(params.num_receive_blocks));
    if (own) local.num_receivers_done = 0;
  }
  return __syncthreads_and(static_cast<int>(own)) != 0;
}

template <bool kBulk>
__global__ void __launch_bounds__(kDispatchThreads, 1) dispatch_kernel(const __grid_constant__ DispatchParams params) {
  if constexpr (kBulk) await_kernel_before();
  const RankParams& ranks = params.ranks;
  // Loaded along with what the call starts with: each may go to memory.
  Run run{};
  if (may_send_runs<kBulk>(params)) run = load_run(params);
  const CallStart start = start_call(ranks, params.summary);
  if (start.broken) return;
  const bool first = blockIdx.x == 0;
  if (!start.routed) {
    if (first && threadIdx.x == 0) report_refused_route(ranks, *params.summary);
    return;
  }
  const Shared shared = Shared::at(dynamic_shared(), ranks.num_ranks, kBulk);
  if (static_cast<int>(blockIdx.x) >= params.num_send_blocks) {
    receive<kBulk>(params, shared, run, start.epoch);
    return;
  }
  if (first && warp_idx() == kDispatchWarps - 1) post_entry(ranks, params.entry, start.epoch);
  const Outcome outcome = send<kBulk>(params, shared, run, start.epoch);
  if (outcome == Outcome::kStop) return;
  post_block_done(ranks, start.epoch);
  if (!first || !await_receivers(params, start.epoch)) return;
  if (outcome == Outcome::kGo) {
    finish_blocks(ranks, start.epoch, shared.num_blocks);
  } else {
    finish_refused(ranks, start.epoch, params.num_send_blocks);
  }
}

using DispatchKernel = void (*)(DispatchParams);
DispatchKernel choose_kernel(bool bulk) { return bulk ? dispatch_kernel<true> : dispatch_kernel<false>; }

}  // namespace

cudaError_t launch_dispatch(const DispatchParams& params, cudaStream_t stream) {
  const int num_blocks = params.num_send_blocks + params.num_receive_blocks;
  const int num_copy_blocks = params.num_receive_blocks > 0 ? params.num_receive_blocks : params.num_own_blocks;
  const LaunchShape shape{.num_blocks = static_cast<unsigned>(num_blocks),
                          .num_threads = kDispatchThreads,
                          .shared_bytes = shared_bytes(params.ranks.num_ranks, params.bulk),
                          .overlaps = params.overlaps,
                          .num_copy_blocks = static_cast<unsigned>(num_copy_blocks)};
  return launch_kernel(choose_kernel(params.bulk), shape, params, stream);
}

cudaError_t load_dispatch_kernels(std::size_t shared_limit, bool& has_bulk) {
  if (const cudaError_t error = load_padding_kernel(); error != cudaSuccess) return error;
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(choose_kernel(true)));
  if (error != cudaSuccess) return error;
  constexpr int kFirstWithBulk = 90;  // PTX ISA, cp.async.bulk: sm_90
  has_bulk = attributes.ptxVersion >= kFirstWithBulk && attributes.binaryVersion >= kFirstWithBulk &&
             shared_bytes(kMaxRanks, true) <= shared_limit;
  for (const bool bulk : {false, true}) {
    if (bulk && !has_bulk) continue;
    error = cudaFuncSetAttribute(reinterpret_cast<const void*>(choose_kernel(bulk)),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes(kMaxRanks, bulk)));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
