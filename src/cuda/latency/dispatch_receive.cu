/// The receive half of latency_dispatch. Blocks share the tokens of one source; a few warps take each, find its rows in
/// the slab from the counts, and copy it there as soon as it has come. The last block writes what the host and the
/// Routing's views show. The block that is done last gives the set back.

#include "cuda/driver/launch.hpp"
#include "cuda/latency/receive_report.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kReceiveThreads = 512;
constexpr int kReceiveWarps = kReceiveThreads / kWarpLanes;
constexpr LatencyKind kKind = LatencyKind::kDispatch;
/// Of ReceiveShared; the tables of experts follow.
constexpr std::size_t kSharedBytes =
    (sizeof(ReceiveShared) + plan::kPartAlignment - 1) / plan::kPartAlignment * plan::kPartAlignment;
/// Loads of a lane that are on their way together.
constexpr int kReceiveUnroll = 4;

/// What a warp knows of a token: lane k of its entry k.
struct Arrival {
  int source = 0;
  std::int64_t token = 0;
  int expert = -1;        ///< index among this rank's experts, -1: not here
  int row = -1;           ///< in that expert's slab
  unsigned here = 0;      ///< lanes that are the first of a row of this rank
  int rank_ordinal = -1;  ///< ranks below this one that the token goes to
  int slot = -1;          ///< row in the slab of the entry's rank, wherever that is
};

/// A part of the copy of a row: `parts` warps share it.
struct Share {
  int part = 0;
  int parts = 1;
};

__device__ DispatchSlot slot_of(const LatencyParams& call, const SentCall& sent, int source) {
  return DispatchSlot::at(own_window(call).slot(call.layout, kKind, static_cast<int>(sent.set), source),
                          call.max_tokens, call.num_topk);
}

/// Waits for a token's entries; false when the group broke. All lanes of a warp.
__device__ bool find_arrival(const LatencyParams& call, const SentCall& sent, const ExpertTables& experts,
                             Arrival& arrival) {
  const int lane = lane_idx();
  Payload entry{kNoExpert, true};
  if (lane < call.num_topk) {
    entry = wait_payload(call.ranks, {Awaited::kRow, arrival.source, sent.number},
                         slot_of(call, sent, arrival.source).entries + arrival.token * call.num_topk + lane);
  }
  if (__all_sync(kAllLanes, static_cast<int>(entry.came)) == 0) return false;
  int owner = -1;
  if (entry.value != kNoExpert) {
    const int home = experts.homes[entry_expert(entry.value)];
    owner = home_rank(home);
    const int row = experts.bases[entry_expert(entry.value)] + entry_ordinal(entry.value);
    arrival.slot = static_cast<int>(home_expert(home) * call.slab_capacity) + row;
    if (owner == call.ranks.rank) {
      arrival.expert = home_expert(home);
      arrival.row = row;
    }
  }
  const unsigned same_owner = __match_any_sync(kAllLanes, owner);
  const bool first_of_rank = owner >= 0 && __ffs(static_cast<int>(same_owner)) - 1 == lane;
  const unsigned below = __ballot_sync(kAllLanes, static_cast<int>(first_of_rank && owner < call.ranks.rank));
  // An expert's row holds one token, so the slot tells entries of one expert from others.
  const unsigned same_row = __match_any_sync(kAllLanes, arrival.expert < 0 ? -1 - lane : arrival.slot);
  const bool first_of_row = arrival.expert >= 0 && __ffs(static_cast<int>(same_row)) - 1 == lane;
  arrival.here = __ballot_sync(kAllLanes, static_cast<int>(first_of_row));
  if (arrival.here != 0) arrival.rank_ordinal = __popc(below);
  return true;
}

/// Writes what the Routing keeps of a token; false when the group broke. All lanes of one warp.
__device__ bool keep_arrival(const LatencyParams& call, const SentCall& sent, const Arrival& arrival) {
  const LatencyTables& tables = call.tables;
  const int lane = lane_idx();
  const std::int64_t index = arrival.source * call.max_tokens + arrival.token;
  if (lane == 0) tables.rank_ordinals[index] = arrival.rank_ordinal;
  bool came = true;
  if (lane < call.num_topk) {
    const std::int64_t item = index * call.num_topk + lane;
    const std::int64_t entry = arrival.token * call.num_topk + lane;
    tables.items[item] = arrival.expert < 0 ? -1 : arrival.slot;
    if (arrival.source == call.ranks.rank) tables.slots[entry] = arrival.slot;
    if (arrival.expert >= 0 && tables.item_weights != nullptr) {
      const Payload weight = wait_payload(call.ranks, {Awaited::kRow, arrival.source, sent.number},
                                          slot_of(call, sent, arrival.source).weights + entry);
      came = weight.came;
      tables.item_weights[item] = __uint_as_float(weight.value);
    }
    if ((arrival.here >> lane & 1U) != 0) {
      reinterpret_cast<int2*>(tables.source)[arrival.slot] = make_int2(arrival.source, static_cast<int>(arrival.token));
    }
  }
  return __all_sync(kAllLanes, static_cast<int>(came)) != 0;
}

/// Copies this warp's share of a row that has come to all its rows in the slab.
__device__ void copy_arrival(const DispatchReceiveParams& params, const Arrival& arrival, const std::byte* window_row,
                             const Share& share) {
  const int lane = lane_idx();
  const auto* from = reinterpret_cast<const uint4*>(window_row);
  const auto count = static_cast<int>(params.row.x_bytes / static_cast<std::int64_t>(sizeof(uint4)));
  constexpr int kStep = kReceiveUnroll * kWarpLanes;
#pragma unroll 1
  for (int first = share.part * kStep; first < count; first += share.parts * kStep) {
    uint4 values[kReceiveUnroll];
#pragma unroll
    for (int i = 0; i < kReceiveUnroll; ++i) {
      const int at = first + i * kWarpLanes + lane;
      if (at < count) values[i] = from[at];
    }
#pragma unroll 1
    for (unsigned left = arrival.here; left != 0; left &= left - 1) {
      const std::int64_t slot = __shfl_sync(kAllLanes, arrival.slot, __ffs(static_cast<int>(left)) - 1);
      auto* to = reinterpret_cast<uint4*>(params.x + slot * params.x_stride);
#pragma unroll
      for (int i = 0; i < kReceiveUnroll; ++i) {
        const int at = first + i * kWarpLanes + lane;
        if (at < count) to[at] = values[i];
      }
    }
  }
  const SlabScales& scales = params.scales;
  const std::byte* const scale_row = window_row + params.row.scales_offset();
#pragma unroll 1
  for (int first = share.part * kWarpLanes; first < params.row.num_scales; first += share.parts * kWarpLanes) {
    const int column = first + lane;
    const bool mine = column < params.row.num_scales;
    const bool words = params.row.scale_bytes == sizeof(std::uint32_t);
    std::uint32_t value = 0;
    if (mine && words) value = reinterpret_cast<const std::uint32_t*>(scale_row)[column];
    if (mine && !words) value = static_cast<std::uint32_t>(scale_row[column]);
#pragma unroll 1
    for (unsigned left = arrival.here; left != 0; left &= left - 1) {
      const int from_lane = __ffs(static_cast<int>(left)) - 1;
      const std::int64_t expert = __shfl_sync(kAllLanes, arrival.expert, from_lane);
      const std::int64_t row = __shfl_sync(kAllLanes, arrival.row, from_lane);
      const std::int64_t at = expert * scales.expert_stride + row * scales.row_stride + column * scales.column_stride;
      if (mine && words) reinterpret_cast<std::uint32_t*>(scales.data)[at] = value;
      if (mine && !words) scales.data[at] = static_cast<std::byte>(value);
    }
  }
}

/// This block's part of one source's tokens; false in warps that found the group broken.
__device__ bool receive_tokens(const DispatchReceiveParams& params, const SentCall& sent, const ExpertTables& experts,
                               const ReceiveShared& shared, int source, const Share& blocks) {
  const LatencyParams& call = params.call;
  const Share share{warp_idx() % params.warps_per_row, params.warps_per_row};
  const int tokens_at_once = blocks.parts * (kReceiveWarps / params.warps_per_row);
  const std::byte* const rows =
      own_window(call).rows(call.layout, kKind, static_cast<int>(sent.set)) + source * call.layout.source_bytes;
  const DispatchSlot slot = slot_of(call, sent, source);
#pragma unroll 1
  for (int token = warp_idx() / params.warps_per_row * blocks.parts + blocks.part; token < shared.tokens[source];
       token += tokens_at_once) {
    Arrival arrival;
    arrival.source = source;
    arrival.token = token;
    if (!find_arrival(call, sent, experts, arrival)) return false;
    if (share.part == 0 && !keep_arrival(call, sent, arrival)) return false;
    if (arrival.here == 0) continue;
    bool came = true;
    if (lane_idx() == 0) {
      came = wait_word(call.ranks, {Awaited::kRow, source, sent.number}, slot.row_flags + token).came;
    }
    if (__all_sync(kAllLanes, static_cast<int>(came)) == 0) return false;
    __syncwarp();  // hands what the first lane has acquired to all of them
    copy_arrival(params, arrival, rows + token * params.row.stride(), share);
  }
  return true;
}

/// Rows of the slab that hold no token: in the source table, and if the caller wants that, in x and scales. All blocks
/// but the last share them.
__device__ void clear_gaps(const DispatchReceiveParams& params, const ExpertTables& experts) {
  const LatencyParams& call = params.call;
  const int num_blocks = static_cast<int>(gridDim.x) - 1;
  const int num_threads = num_blocks * kReceiveThreads;
  const int thread = static_cast<int>(blockIdx.x) * kReceiveThreads + static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int local = 0; local < call.num_local_experts; ++local) {
#pragma unroll 1
    for (std::int64_t row = experts.local_rows[local] + thread; row < call.slab_capacity; row += num_threads) {
      reinterpret_cast<int2*>(call.tables.source)[local * call.slab_capacity + row] = make_int2(-1, -1);
    }
    if (!params.zero_padding) continue;
#pragma unroll 1
    for (std::int64_t row = experts.local_rows[local] + thread / kWarpLanes; row < call.slab_capacity;
         row += num_threads / kWarpLanes) {
      auto* x = reinterpret_cast<uint4*>(params.x + (local * call.slab_capacity + row) * params.x_stride);
      const std::int64_t count = params.row.x_bytes / static_cast<std::int64_t>(sizeof(uint4));
#pragma unroll 1
      for (std::int64_t i = lane_idx(); i < count; i += kWarpLanes) x[i] = make_uint4(0, 0, 0, 0);
      const SlabScales& scales = params.scales;
#pragma unroll 1
      for (int column = lane_idx(); column < params.row.num_scales; column += kWarpLanes) {
        const std::int64_t at = local * scales.expert_stride + row * scales.row_stride + column * scales.column_stride;
        if (params.row.scale_bytes == sizeof(std::uint32_t)) {
          reinterpret_cast<std::uint32_t*>(scales.data)[at] = 0;
        } else {
          scales.data[at] = std::byte{0};
        }
      }
    }
  }
}

/// What a block does with a call that all ranks make alike; false when the group broke. The last block of the grid
/// reports, the others copy rows.
__device__ bool receive(const DispatchReceiveParams& params, const SentCall& sent, const ExpertTables& experts,
                        ReceiveShared& shared) {
  const LatencyParams& call = params.call;
  const bool reports = blockIdx.x + 1 == gridDim.x;
  const int num_blocks = static_cast<int>(gridDim.x) - 1;
  const int num_ranks = call.ranks.num_ranks;
  const int per_source = num_blocks >= num_ranks ? num_blocks / num_ranks : 1;
  const Share blocks{static_cast<int>(blockIdx.x) % per_source, per_source};
  if (reports) begin_report(call, shared);
  bool whole = true;
  // Every block needs the counts, if only to know what rows are gaps; so one without a source goes through here too.
  int source = reports ? num_ranks : static_cast<int>(blockIdx.x) / per_source;
  do {
    if (!sum_counts(call, sent, experts, shared, {source, reports ? call.tables.source_ranges : nullptr})) return false;
    if (shared.first_full_expert != kNone) return true;
    if (source < num_ranks) whole = receive_tokens(params, sent, experts, shared, source, blocks);
    source += num_blocks / per_source;
    whole = __syncthreads_and(static_cast<int>(whole)) != 0;  // nobody reads the bases of this source any more
  } while (whole && source < num_ranks);
  if (!whole) return false;
  if (reports) {
    report_counts(params, experts, shared);
  } else {
    clear_gaps(params, experts);
  }
  return true;
}

__global__ void __launch_bounds__(kReceiveThreads)
    dispatch_receive_kernel(const __grid_constant__ DispatchReceiveParams params) {
  auto& shared = *reinterpret_cast<ReceiveShared*>(dynamic_shared());
  const LatencyParams& call = params.call;
  const auto thread = static_cast<int>(threadIdx.x);
  const ExpertTables experts =
      ExpertTables::at(dynamic_shared() + kSharedBytes, call.num_experts, call.num_local_experts);
#pragma unroll 1
  for (int expert = thread; expert < call.num_experts; expert += kReceiveThreads) {
    experts.homes[expert] = home_of(params.placement.owner[expert], params.placement.local_expert[expert]);
  }
  if (thread == 0) {
    shared.first_bad_rank = kNone;
    shared.first_full_expert = kNone;
  }
  __syncthreads();
  await_kernel_before();  // the send half, where the two are one call
  // A send half that found the group broken has not written what follows.
  if (__syncthreads_or(static_cast<int>(is_broken(call.ranks))) != 0) return;
  const bool reports = blockIdx.x + 1 == gridDim.x;
  if (reports && thread == 0 && params.host.result != nullptr) store_relaxed_system(&params.host.result->started, 1);
  SentCall& words = *call.tables.dispatch;
  const volatile SentCall& seen = words;
  const SentCall sent{seen.number, seen.set, seen.pending, 0};  // until all blocks are done it stays as it is
  if (sent.pending == 0) {
    if (reports && thread == 0) report_not_sent(call);
    return;
  }
  const auto take = [&shared](int rank, const ReceivedHeader& header) {
    const std::int64_t num_tokens = header.num_tokens();
    const std::int64_t bad_entry = header.bad_entry();
    if (lane_idx() != 0) return;
    shared.tokens[rank] = static_cast<std::int32_t>(num_tokens);
    if (bad_entry >= 0) atomicMin(&shared.first_bad_rank, static_cast<unsigned>(rank));
  };
  const Outcome outcome = await_headers(call, kKind, static_cast<int>(sent.set), sent.number, take);
  if (outcome == Outcome::kStop) return;
  const bool agreed = outcome == Outcome::kGo && shared.first_bad_rank == kNone;
  if (agreed && !receive(params, sent, experts, shared)) return;
  if (reports && thread == 0 && (!agreed || shared.first_full_expert != kNone)) {
    report_refused(params, sent, shared, outcome);
  }
  if (!is_last_block(words)) return;
  if (thread == 0) {
    words.pending = 0;
    words.arrivals = 0;
  }
  finish_receive(call, kKind, sent);
}

std::size_t shared_bytes_of(int num_experts, int num_local_experts) {
  return kSharedBytes + ExpertTables::at(nullptr, num_experts, num_local_experts).size_bytes;
}

}  // namespace

cudaError_t launch_dispatch_receive(const DispatchReceiveParams& params, cudaStream_t stream) {
  const LatencyParams& call = params.call;
  return launch_kernel(dispatch_receive_kernel,
                       {static_cast<unsigned>(call.num_blocks), kReceiveThreads,
                        shared_bytes_of(call.num_experts, call.num_local_experts), params.overlaps},
                       params, stream);
}

cudaError_t load_dispatch_receive_kernel() {
  constexpr int kExperts = static_cast<int>(kMaxExperts);
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(dispatch_receive_kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared_bytes_of(kExperts, kExperts)));
}

}  // namespace ferry::cuda
