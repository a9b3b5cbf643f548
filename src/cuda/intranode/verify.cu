/// Kernels that compute and compare the checksums of rows; verify_params.hpp has their order. A warp takes a row, or a
/// token with its rows.

#include "cuda/driver/launch.hpp"
#include "cuda/intranode/verify_params.hpp"
#include "cuda/intranode/verify_sums.cuh"
#include "cuda/sync/entry.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;
using numeric::checksum_start;

constexpr int kVerifyThreads = kVerifyWarps * kWarpLanes;

__device__ std::int64_t first_item() { return std::int64_t{blockIdx.x} * kVerifyWarps + warp_idx(); }
__device__ std::int64_t item_step() { return std::int64_t{gridDim.x} * kVerifyWarps; }

/// A peer's memory in this call.
struct Peer {
  const std::byte* rows;
  std::int64_t row_stride;
  const std::byte* checksums;
  const std::byte* weights;
};

struct alignas(kSharedAlignment) Shared {
  Peer peers[kMaxRanks];
  int num_blocks[kMaxRanks];
};

/// Clears the words of the check to come. One thread calls it.
__device__ void begin_state(VerifyState& state) {
  state.num_wrong = 0;
  state.first_wrong = UINT64_MAX;
  state.num_blocks_done = 0;
}

/// Counts a wrong row. One lane calls it.
__device__ void count_wrong(VerifyState& state, std::int64_t item) {
  atomicAdd(reinterpret_cast<unsigned long long*>(&state.num_wrong), 1ULL);
  atomicMin(reinterpret_cast<unsigned long long*>(&state.first_wrong), static_cast<unsigned long long>(item));
}

/// Whether this block is the last of the kernel to end its checks. All threads of a block call it.
__device__ bool is_last_block(VerifyState& state) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) last = add_acq_rel_device(&state.num_blocks_done, 1) + 1 == gridDim.x;
  return __syncthreads_or(static_cast<int>(last)) != 0;
}

/// Reports the first wrong row, described by `report`, unless an earlier check has found one. One thread calls it.
__device__ void report_wrong(CorruptReport* to, const CorruptReport& report) {
  if (*static_cast<volatile std::uint64_t*>(&to->state) != 0) return;
  to->epoch = report.epoch;
  to->call = report.call;
  to->sender = report.sender;
  to->row = report.row;
  to->token = report.token;
  to->num_wrong = report.num_wrong;
  fence_system();
  store_release_system(&to->state, 1);
}

/// Enters the exchange of a check and keeps the peers' locations in shared memory. All threads of a block call it.
__device__ Outcome enter(const RankParams& ranks, const EntryMessage& entry, std::uint64_t epoch, Shared& shared) {
  if (blockIdx.x == 0 && warp_idx() == 0) post_entry(ranks, entry, epoch);
  const auto take = [&](int rank, const ReceivedEntry& received) {
    const std::byte* const base = ranks.peer_bases[rank];
    const Peer peer{base + received.rows_offset(), received.rows_stride(), base + received.tables_offset(),
                    base + received.weights_offset()};
    const int num_blocks = received.num_blocks();
    if (lane_idx() == 0) {
      shared.peers[rank] = peer;
      shared.num_blocks[rank] = num_blocks;
    }
  };
  return await_entries(ranks, entry, epoch, take);
}

/// Ends the exchange. All threads of a block call it.
__device__ void leave(const RankParams& ranks, std::uint64_t epoch, Outcome outcome, const Shared& shared) {
  post_block_done(ranks, epoch);
  if (blockIdx.x != 0) return;
  if (outcome == Outcome::kGo) {
    finish_blocks(ranks, epoch, shared.num_blocks);
  } else {
    finish_refused(ranks, epoch, static_cast<int>(gridDim.x));
  }
}

// ---- Dispatch -------------------------------------------------------------------------------------------------------

__device__ Destination destination_of(const Destination* table, std::int64_t token, int num_topk) {
  Destination none{};
  none.rank = -1;
  return lane_idx() < num_topk ? table[token * num_topk + lane_idx()] : none;
}

__device__ bool begins_row(const Destination& destination) {
  return destination.rank >= 0 && (destination.flags & kFirstOfRow) != 0;
}

/// Sum over the ids and weights in the row of this lane's destination, as its receiver gets them. All lanes call it.
__device__ std::uint64_t sum_sent_tables(const DispatchParams& call, const Destination& destination, float weight,
                                         std::int64_t position) {
  std::uint64_t sum = 0;
  float row_weight = weight;
  bool same_row = true;
  for (int entry = 0; entry < call.num_topk; ++entry) {
    // kTokens: all entries of the token. Other layouts: the entries after this lane's, while they are of the same row.
    const int lane = call.one_row_per_token ? entry : (lane_idx() + entry + 1) % kWarpLanes;
    const int rank = __shfl_sync(kAllLanes, static_cast<int>(destination.rank), lane);
    const int expert = __shfl_sync(kAllLanes, destination.local_expert, lane);
    const int topk = __shfl_sync(kAllLanes, static_cast<int>(destination.topk), lane);
    const int flags = __shfl_sync(kAllLanes, static_cast<int>(destination.flags), lane);
    const float other = __shfl_sync(kAllLanes, weight, lane);
    if (call.one_row_per_token) {
      const bool mine = rank >= 0 && rank == destination.rank;
      if (call.record.has_ids) sum += sum_id(mine ? expert : -1, position, topk);
      if (call.record.has_weights) sum += sum_weight(mine ? other : 0.0F, position, topk, call.num_topk);
    } else {
      same_row = same_row && lane > lane_idx() && rank >= 0 && (flags & kFirstOfRow) == 0;
      if (same_row) row_weight = __fadd_rn(row_weight, other);
    }
  }
  if (!call.one_row_per_token && call.record.has_weights) sum = sum_weight(row_weight, position, 0, 0);
  return sum;
}

__global__ void __launch_bounds__(kVerifyThreads)
    seal_sent_kernel(const __grid_constant__ DispatchVerifyParams params) {
  const DispatchParams& call = params.call;
  if (is_broken(call.ranks) || call.summary->valid == 0) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) begin_state(*params.tables.state);
  const std::uint64_t epoch = current_epoch(call.ranks);
  const std::int64_t position = words_before_tables(call.row_bytes, call.scales);
  for (std::int64_t token = first_item(); token < call.num_tokens; token += item_step()) {
    const Destination destination = destination_of(call.destinations, token, call.num_topk);
    const std::uint64_t sum = add_lanes(sum_payload(call.x + token * call.x_stride, call.row_bytes) +
                                        sum_scales(call.scales, token, position - call.scales.num_scales));
    float weight = 0.0F;
    if (call.record.has_weights && lane_idx() < call.num_topk) {
      weight = call.weights[token * call.num_topk + destination.topk];
    }
    const std::uint64_t tables = sum_sent_tables(call, destination, weight, position);
    if (lane_idx() >= call.num_topk) continue;
    SealedEntry entry{0, -1, -1};
    if (begins_row(destination)) {
      entry.checksum = checksum_start({epoch, call.ranks.rank, static_cast<std::int32_t>(token)}) + sum + tables;
      entry.row = destination.row;
      entry.rank = destination.rank;
    }
    params.tables.entries[token * call.num_topk + lane_idx()] = entry;
  }
}

/// This lane's part of the sum over the ids and weights of a received row.
__device__ std::uint64_t sum_received_tables(const DispatchParams& call, std::int64_t row, std::int64_t position) {
  const DispatchOutputs& out = call.out;
  if (!call.one_row_per_token) {
    const bool takes = call.record.has_weights && lane_idx() == 0;
    return takes ? sum_weight(out.weights[row], position, 0, 0) : 0;
  }
  if (lane_idx() >= call.num_topk) return 0;
  const std::int64_t at = row * call.num_topk + lane_idx();
  std::uint64_t sum = 0;
  if (call.record.has_ids) {
    const std::int64_t id =
        out.wide_ids ? static_cast<const std::int64_t*>(out.ids)[at] : static_cast<const std::int32_t*>(out.ids)[at];
    sum += sum_id(id, position, lane_idx());
  }
  if (call.record.has_weights) sum += sum_weight(out.weights[at], position, lane_idx(), call.num_topk);
  return sum;
}

/// Whether a received row is as its source sent it. All lanes of a warp call it and get the same answer.
__device__ bool is_as_sent(const DispatchVerifyParams& params, const Shared& shared, std::int64_t row, int2 source,
                           std::uint64_t epoch) {
  const DispatchParams& call = params.call;
  const auto* entries = reinterpret_cast<const SealedEntry*>(shared.peers[source.x].checksums);
  SealedEntry entry{0, -1, -1};
  if (lane_idx() < call.num_topk) entry = entries[std::int64_t{source.y} * call.num_topk + lane_idx()];
  const std::int64_t position = words_before_tables(call.row_bytes, call.out.scales);
  const std::uint64_t sum = add_lanes(sum_payload(call.out.x + row * call.out.x_stride, call.row_bytes) +
                                      sum_scales(call.out.scales, row, position - call.out.scales.num_scales) +
                                      sum_received_tables(call, row, position));
  const bool is_it = entry.rank == call.ranks.rank && entry.row == row;
  return __any_sync(kAllLanes, static_cast<int>(is_it && entry.checksum ==
                                                             checksum_start({epoch, source.x, source.y}) + sum)) != 0;
}

/// Whether the dispatch before this kernel has moved rows.
__device__ bool has_moved(const RankParams& ranks) {
  const LocalState& local = *ranks.control.local;
  return local.outcome == (local.epoch << 2 | static_cast<std::uint64_t>(Outcome::kGo));
}

__global__ void __launch_bounds__(kVerifyThreads)
    verify_received_kernel(const __grid_constant__ DispatchVerifyParams params) {
  const RankParams& ranks = params.call.ranks;
  const CallStart start = start_call(ranks, params.call.summary);
  if (start.broken || !start.routed || !has_moved(ranks)) return;
  auto& shared = static_shared<Shared>();
  const Outcome outcome = enter(ranks, params.entry, start.epoch, shared);
  if (outcome == Outcome::kStop) return;
  const std::uint64_t epoch = start.epoch - 1;  // of the dispatch
  VerifyState& state = *params.tables.state;
  const auto* sources = reinterpret_cast<const int2*>(params.source);
  for (std::int64_t row = first_item(); row < params.num_rows; row += item_step()) {
    const int2 source = sources[row];
    if (source.x < 0) continue;
    if (!is_as_sent(params, shared, row, source, epoch) && lane_idx() == 0) count_wrong(state, row);
  }
  if (is_last_block(state) && threadIdx.x == 0 && state.num_wrong != 0) {
    const auto row = static_cast<std::int64_t>(state.first_wrong);
    report_wrong(params.report, {1, epoch, static_cast<std::int32_t>(CheckedCall::kDispatch), sources[row].x, row,
                                 sources[row].y, static_cast<std::int64_t>(state.num_wrong)});
  }
  leave(ranks, start.epoch, outcome, shared);
}

// ---- Combine --------------------------------------------------------------------------------------------------------

/// This lane's part of the sum of a row with `num_weights` weights.
__device__ std::uint64_t sum_returned(const std::byte* row, std::int64_t row_bytes, const float* weights,
                                      int num_weights) {
  std::uint64_t sum = sum_payload(row, row_bytes);
  const std::int64_t position = row_bytes / static_cast<std::int64_t>(sizeof(std::uint64_t));
  if (lane_idx() < num_weights) sum += sum_weight(weights[lane_idx()], position, lane_idx(), 0);
  return sum;
}

__device__ int num_row_weights(const CombineVerifyParams& params) {
  if (params.call.out_weights == nullptr && params.weights == nullptr) return 0;
  return params.call.one_row_per_token ? params.call.num_topk : 1;
}

__global__ void __launch_bounds__(kVerifyThreads)
    seal_returned_kernel(const __grid_constant__ CombineVerifyParams params) {
  const CombineParams& call = params.call;
  if (is_broken(call.ranks) || call.summary->valid == 0) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) begin_state(*params.tables.state);
  const std::uint64_t epoch = current_epoch(call.ranks);
  const int num_weights = params.weights != nullptr ? num_row_weights(params) : 0;
  for (std::int64_t row = first_item(); row < params.num_rows; row += item_step()) {
    if (reinterpret_cast<const int2*>(call.source)[row].x < 0) continue;
    const std::uint64_t sum = add_lanes(sum_returned(params.sealed_x + row * params.sealed_stride, call.row_bytes,
                                                     params.weights + row * num_weights, num_weights));
    if (lane_idx() != 0) continue;
    params.tables.checksums[row] = checksum_start({epoch, call.ranks.rank, static_cast<std::int32_t>(row)}) + sum;
  }
}

/// Checks the rows of a token in the holders' memory. All lanes of a warp call it.
__device__ void verify_token(const CombineVerifyParams& params, const Shared& shared, std::int64_t token,
                             std::uint64_t epoch) {
  const CombineParams& call = params.call;
  const Destination destination = destination_of(call.destinations, token, call.num_topk);
  const int num_weights = call.out_weights != nullptr ? num_row_weights(params) : 0;
  for (unsigned left = __ballot_sync(kAllLanes, static_cast<int>(begins_row(destination))); left != 0;
       left &= left - 1) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    const int rank = __shfl_sync(kAllLanes, static_cast<int>(destination.rank), lane);
    const int row = __shfl_sync(kAllLanes, destination.row, lane);
    const Peer& peer = shared.peers[rank];
    const auto* weights = reinterpret_cast<const float*>(peer.weights) + std::int64_t{row} * num_weights;
    const std::uint64_t sum =
        add_lanes(sum_returned(peer.rows + row * peer.row_stride, call.row_bytes, weights, num_weights));
    if (lane_idx() != 0) continue;
    const std::uint64_t expected = reinterpret_cast<const std::uint64_t*>(peer.checksums)[row];
    if (checksum_start({epoch, rank, row}) + sum != expected) {
      count_wrong(*params.tables.state, token * call.num_topk + lane);
    }
  }
}

/// Passes the outcome to the combine that follows. One thread calls it.
__device__ void set_gate(const CombineVerifyParams& params, bool go) {
  RouteSummary gate = *params.call.summary;
  if (gate.valid != 0 && !go) {
    gate.valid = 0;
    gate.fault = static_cast<std::int32_t>(Fault::kReported);
  }
  params.tables.state->gate = gate;
}

__global__ void __launch_bounds__(kVerifyThreads)
    verify_returned_kernel(const __grid_constant__ CombineVerifyParams params) {
  const RankParams& ranks = params.call.ranks;
  const bool refuses = params.entry.agreement == 0;
  const CallStart start = start_call(ranks, params.call.summary);
  if (start.broken) return;
  const bool first = blockIdx.x == 0 && threadIdx.x == 0;
  if (!start.routed) {
    if (first && refuses) report_refused_route(ranks, *params.call.summary);
    if (first && !refuses) set_gate(params, false);
    return;
  }
  auto& shared = static_shared<Shared>();
  const Outcome outcome = enter(ranks, params.entry, start.epoch, shared);
  if (outcome == Outcome::kStop) return;
  if (first && !refuses) {
    set_gate(params, outcome == Outcome::kGo);
    if (outcome == Outcome::kSkip) report_disagreement(ranks, start.epoch);
  }
  if (outcome == Outcome::kGo) {
    VerifyState& state = *params.tables.state;
    for (std::int64_t token = first_item(); token < params.call.num_tokens; token += item_step()) {
      verify_token(params, shared, token, start.epoch);
    }
    if (is_last_block(state) && threadIdx.x == 0 && state.num_wrong != 0) {
      const auto entry = static_cast<std::int64_t>(state.first_wrong);
      const Destination& destination = params.call.destinations[entry];
      report_wrong(params.report,
                   {1, start.epoch, static_cast<std::int32_t>(CheckedCall::kCombine), destination.rank, destination.row,
                    entry / params.call.num_topk, static_cast<std::int64_t>(state.num_wrong)});
    }
  }
  leave(ranks, start.epoch, outcome, shared);
}

template <typename Params>
cudaError_t launch(void (*kernel)(Params), const Params& params, cudaStream_t stream) {
  const auto num_blocks = static_cast<unsigned>(params.entry.num_blocks);
  return launch_kernel(kernel, {.num_blocks = num_blocks, .num_threads = kVerifyThreads}, params, stream);
}

}  // namespace

cudaError_t launch_seal_dispatch(const DispatchVerifyParams& params, cudaStream_t stream) {
  return launch(seal_sent_kernel, params, stream);
}

cudaError_t launch_verify_dispatch(const DispatchVerifyParams& params, cudaStream_t stream) {
  return launch(verify_received_kernel, params, stream);
}

cudaError_t launch_seal_combine(const CombineVerifyParams& params, cudaStream_t stream) {
  return launch(seal_returned_kernel, params, stream);
}

cudaError_t launch_verify_combine(const CombineVerifyParams& params, cudaStream_t stream) {
  return launch(verify_returned_kernel, params, stream);
}

cudaError_t load_verify_kernels() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(seal_sent_kernel));
  for (const void* kernel :
       {reinterpret_cast<const void*>(verify_received_kernel), reinterpret_cast<const void*>(seal_returned_kernel),
        reinterpret_cast<const void*>(verify_returned_kernel)}) {
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  }
  return error;
}

}  // namespace ferry::cuda
