/// The dispatch kernel: which block does what, and how a call begins and ends.

#include "cuda/driver/launch.hpp"
#include "cuda/intranode/dispatch_receive.cuh"
#include "cuda/intranode/dispatch_runs.cuh"
#include "cuda/intranode/dispatch_tokens.cuh"
#include "cuda/sync/entry.cuh"
#include "plan/carver.hpp"

namespace ferry::cuda {
namespace {

using namespace device;

/// A block's shared memory, sizes and pointers from one place. Stages come first, where they are aligned to
/// kLandingBytes.
struct Shared {
  std::byte* stages;            ///< with the copy engine only: stages and their barriers
  std::uint64_t* run_barriers;  ///< [kRunWarps, kRunBarriers]
  FetchedTables* run_tables;    ///< [kRunWarps]
  Receiver* receivers;          ///< [R]
  Run* runs;                    ///< [R]
  int* num_blocks;              ///< [R] of each rank's kernel
  std::uint32_t* marks;         ///< [kDispatchWarps] ChunkMarker's
  std::size_t size_bytes;

  FERRY_HOST_DEVICE static Shared at(std::byte* base, int num_ranks, bool bulk) {
    const auto ranks = static_cast<std::size_t>(num_ranks);
    plan::Carver carver(base);
    Shared shared{};
    shared.stages = carver.take<std::byte>(bulk ? kStagesBytes + kBarriersBytes : 0);
    shared.run_barriers = carver.take<std::uint64_t>(bulk ? kRunWarps * kRunBarriers : 0);
    shared.run_tables = carver.take<FetchedTables>(bulk ? kRunWarps : 0);
    shared.receivers = carver.take<Receiver>(ranks);
    shared.runs = carver.take<Run>(ranks);
    shared.num_blocks = carver.take<int>(ranks);
    shared.marks = carver.take<std::uint32_t>(kDispatchWarps);
    shared.size_bytes = carver.used_bytes();
    return shared;
  }
};

std::size_t shared_bytes(int num_ranks, bool bulk) { return Shared::at(nullptr, num_ranks, bulk).size_bytes; }

/// Where a rank wants what it receives, from its entry.
__device__ Receiver receiver_of(const DispatchParams& params, int rank, const ReceivedEntry& entry) {
  std::byte* base = params.ranks.peer_bases[rank];
  const std::int64_t flags = entry.flags();
  Receiver receiver{};
  receiver.rows = base + entry.rows_offset();
  receiver.row_stride = entry.rows_stride();
  receiver.records = base + entry.tables_offset();
  receiver.staged = (flags & kRowsStaged) != 0;
  receiver.direct = (flags & kTablesDirect) != 0;
  receiver.wide_ids = (flags & kWideIds) != 0;
  receiver.scales = base + entry.scales_offset();
  receiver.scales_stride = entry.scales_stride();
  receiver.scales_column_stride = params.scales.element_bytes;
  receiver.ids = base + entry.ids_offset();
  receiver.weights = reinterpret_cast<float*>(base + entry.weights_offset());
  if (rank == params.ranks.rank) {  // this rank can reach its own memory, of whatever kind
    const ScaleTable& scales = params.out.scales;
    receiver = {params.out.x,
                params.out.x_stride,
                nullptr,
                scales.data,
                scales.row_stride * scales.element_bytes,
                scales.column_stride * scales.element_bytes,
                params.out.ids,
                params.out.weights,
                false,
                true,
                params.out.wide_ids,
                false,
                0,
                0};
  }
  // Copying a staged row needs the rows that the token takes.
  const plan::TokenRecord& record = params.record;
  receiver.gets_record = !receiver.direct || (receiver.staged && record.has_rows);
  if (receiver.direct) {
    receiver.ids_stride = params.num_topk * static_cast<std::int64_t>(receiver.wide_ids ? sizeof(std::int64_t) : 4);
    receiver.weights_stride = params.num_topk * static_cast<std::int64_t>(sizeof(float));
  } else {
    receiver.scales = receiver.records;
    receiver.scales_stride = receiver.ids_stride = receiver.weights_stride = record.size_bytes();
    receiver.wide_ids = false;
    receiver.ids = receiver.records + record.ids_word * sizeof(std::uint32_t);
    receiver.weights = reinterpret_cast<float*>(receiver.records + record.weights_word * sizeof(std::uint32_t));
  }
  return receiver;
}

/// Whether this rank sends in runs.
template <bool kBulk>
__device__ bool may_send_runs(const DispatchParams& params) {
  return kBulk && params.entry.agreement != 0 && params.one_row_per_token;
}

/// What this rank sends to the rank of this thread's number.
static_assert(kMaxRanks <= kRunWarps * kWarpLanes);
__device__ Run load_run(const DispatchParams& params) {
  const int num_ranks = params.ranks.num_ranks;
  const auto rank = static_cast<int>(threadIdx.x);
  if (rank >= num_ranks) return {};
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
    RunPart part{{ranks.rank, 1}, warp_idx() * num_blocks + block - first_block, num_blocks * kRunWarps};
    if (params.num_own_blocks == 0) part.targets = {ranks.rank, ranks.num_ranks};
    if (params.num_own_blocks != 0 && !own) part.targets = {(ranks.rank + 1) % ranks.num_ranks, ranks.num_ranks - 1};
    return part;
  }
};

/// Hands what each thread has loaded to the warps that send runs, which are those that call it, and prepares their
/// barriers. The warp that posts the entry meanwhile is none of them.
__device__ void share_runs(const Shared& shared, const Run& run, int num_ranks) {
  if (static_cast<int>(threadIdx.x) < num_ranks) shared.runs[threadIdx.x] = run;
  if (lane_idx() == 0) {
    std::uint64_t* barriers = shared.run_barriers + warp_idx() * kRunBarriers;
    for (int i = 0; i < kStages; ++i) init_barrier(barriers + i);
    init_barrier(barriers + kStages, kWarpLanes);
    publish_barriers();
  }
  asm volatile("bar.sync 1, %0;" ::"n"(kRunWarps * kWarpLanes) : "memory");
}

/// Sends in runs, after `prime`. Where a receiver watches progress, one warp of each block reports it.
__device__ void send_runs(const DispatchParams& params, const Shared& shared, RunSender& sender, std::uint64_t epoch,
                          bool watched) {
  const ChunkBorders chunks = run_chunks(params, shared.runs);
  if (warp_idx() < kRunWarps) {
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
    report_marks(shared.marks, kRunWarps, chunks.num_chunks(), reporter);
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

__device__ Outcome await_outcome(const RankParams& ranks, std::uint64_t epoch) {
  __shared__ Outcome outcome;
  if (threadIdx.x == 0) {
    const std::uint64_t* word = &ranks.control.local->outcome;
    const bool here = wait_flag(ranks, {Awaited::kOwn, ranks.rank, epoch}, word, epoch << 2);
    outcome = here ? static_cast<Outcome>(load_acquire_system(word) & 3U) : Outcome::kStop;
  }
  __syncthreads();
  return outcome;
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
    // Whether it can be sent in runs is known when the receivers are; what comes first is loaded meanwhile.
    if (may_send_runs<kBulk>(params)) {
      const bool takes_part = warp_idx() < kRunWarps;
      if (takes_part) share_runs(shared, run, params.ranks.num_ranks);
      const RunPart part = RunPart::of(params);
      std::uint64_t* barriers = shared.run_barriers + warp_idx() * kRunBarriers;
      const RunStages stages{shared.stages + warp_idx() * kStages * kRunStageBytes, barriers,
                             shared.run_tables + warp_idx(), barriers + kStages};
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

template <bool kBulk>
__device__ void receive(const DispatchParams& params, const Shared& shared, std::uint64_t epoch) {
  if (await_outcome(params.ranks, epoch) == Outcome::kGo) {
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
  extern __shared__ __align__(kLandingBytes) std::byte memory[];
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
  const Shared shared = Shared::at(memory, ranks.num_ranks, kBulk);
  if (static_cast<int>(blockIdx.x) >= params.num_send_blocks) {
    receive<kBulk>(params, shared, start.epoch);
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

}  // namespace

cudaError_t launch_dispatch(const DispatchParams& params, cudaStream_t stream) {
  const int num_blocks = params.num_send_blocks + params.num_receive_blocks;
  const LaunchShape shape{static_cast<unsigned>(num_blocks), kDispatchThreads,
                          shared_bytes(params.ranks.num_ranks, params.bulk)};
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
