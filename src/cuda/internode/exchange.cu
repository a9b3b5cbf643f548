/// Exchanges with the rail peers: some blocks send to each peer, the same number receive from it, and some copy the
/// items that stay in the node, or make the sums of a combine.

#include "cuda/copy/warp_copy.cuh"
#include "cuda/driver/launch.hpp"
#include "cuda/internode/arrivals.cuh"
#include "cuda/internode/call_agreement.cuh"
#include "cuda/internode/exchange_params.hpp"
#include "cuda/internode/pull.cuh"
#include "cuda/internode/rail_ring.cuh"
#include "cuda/internode/sum_turns.cuh"
#include "cuda/internode/token_sum.cuh"
#include "cuda/sync/entry.cuh"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

using namespace device;

/// Loads of 16 bytes per lane that copy_row has under way, and their bytes: half a row of 7168 FP8 channels.
constexpr int kPieceLoads = 7;
constexpr int kPieceBytes = kPieceLoads * 16 * kWarpLanes;

/// Not inlined, like this kernel's waiting functions: the instruction cache holds only one copy of each.
__device__ __noinline__ void copy_row(std::byte* to, const std::byte* from, std::int64_t bytes) {
  copy_by_warp<kPieceLoads>(to, from, bytes);
}

/// Copies bytes [begin, end) of an item's row from the tables to a chunk, or back.
template <bool kPack>
__device__ void copy_row_part(const ExchangeParams& params, std::int64_t position, std::int64_t begin, std::int64_t end,
                              std::byte* chunk) {
  const std::byte* const from = params.row.from + position * params.row.from_stride + begin;
  std::byte* const to = params.row.to + position * params.row.to_stride + begin;
  copy_row(kPack ? chunk : to, kPack ? from : chunk, end - begin);
}

/// Writes words [begin, end) of the record of one of this rank's tokens.
__device__ __noinline__ void make_record(const RecordParams& source, std::int64_t token, int begin, int end,
                                         std::uint32_t* to) {
  const SourceRecord record(source, token);
#pragma unroll 1
  for (int word = begin + lane_idx(); word < end; word += kWarpLanes) to[word - begin] = record(word);
}

__device__ __noinline__ void land_record(const PullParams& pull, const std::uint32_t* words, std::int64_t row) {
  pull_record(pull, StoredRecord{words}, row);
}

/// The same for bytes of an item's record.
template <bool kPack>
__device__ void copy_record_part(const ExchangeParams& params, std::int64_t position, std::int64_t begin,
                                 std::int64_t end, std::byte* chunk) {
  const ItemPart& record = params.item_record;
  if (kPack && params.makes_records) {
    constexpr std::int64_t kWordBytes = sizeof(std::uint32_t);
    make_record(params.source, position, static_cast<int>(begin / kWordBytes), static_cast<int>(end / kWordBytes),
                reinterpret_cast<std::uint32_t*>(chunk));
  } else if (kPack) {
    copy_record(chunk, record.from + position * record.from_stride + begin, end - begin);
  } else if (params.lands) {
    land_record(params.pull, reinterpret_cast<const std::uint32_t*>(chunk), position);
  } else {
    copy_record(record.to + position * record.to_stride + begin, chunk, end - begin);
  }
}

/// Position of an outgoing item in this rank's tables.
__device__ std::int64_t position_of(const ExchangeParams& params, std::int64_t item) {
  return params.items != nullptr ? params.items[item] : item;
}

/// Copies the same bytes [begin, end) of `num_items` items, at `position(i)` in the tables, to or from a chunk, where
/// an item's row and its record are contiguous. Warps take pieces of rows, and records, so that all warps of a block
/// have work whatever the length of items.
template <bool kPack, typename Position>
__device__ void copy_items(const ExchangeParams& params, std::int64_t num_items, std::int64_t begin, std::int64_t end,
                           std::byte* chunk, Position position) {
  const std::int64_t row_bytes = params.row.bytes;
  const std::int64_t row_end = end < row_bytes ? end : row_bytes;
  const auto rows_part = static_cast<int>(begin < row_end ? row_end - begin : 0);
  const std::int64_t record_begin = begin > row_bytes ? begin - row_bytes : 0;
  const std::int64_t record_end =
      end - row_bytes < params.item_record.bytes ? end - row_bytes : params.item_record.bytes;
  const int num_row_pieces = (rows_part + kPieceBytes - 1) / kPieceBytes;
  const int num_pieces = num_row_pieces + (record_begin < record_end ? 1 : 0);
#pragma unroll 1
  for (int i = warp_idx(); i < static_cast<int>(num_items) * num_pieces; i += kExchangeWarps) {
    const int item = i / num_pieces;
    const int piece = i - item * num_pieces;
    std::byte* const at = chunk + static_cast<std::int64_t>(item) * (end - begin);
    if (piece == num_row_pieces) {
      copy_record_part<kPack>(params, position(item), record_begin, record_end, at + rows_part);
      continue;
    }
    const int from = piece * kPieceBytes;
    const int to = from + kPieceBytes < rows_part ? from + kPieceBytes : rows_part;
    copy_row_part<kPack>(params, position(item), begin + from, begin + to, at + from);
  }
}

/// `may_send(chunk_idx)`: whether to send a chunk; the first that may not ends the block's part.
template <typename MaySend>
__device__ void send_items(const ExchangeParams& params, Sender& sender, int peer, int worker, std::uint64_t exchange,
                           MaySend may_send) {
  const ItemFlow& flow = params.flows[peer];
  for_each_chunk(params, sent_division(params, peer), worker, [&](const ItemChunk& items) {
    if (!may_send(items.chunk_idx)) return false;
    if (params.sums_nodes && !await_sums(params, peer, items.first, items.num_items, exchange)) return false;
    std::byte* const chunk = sender.reserve(first_item_chunk(params) + items.chunk_idx);
    if (chunk == nullptr) return false;
    copy_items<true>(params, items.num_items, items.begin, items.end, chunk,
                     [&](int item) { return position_of(params, flow.first_out + items.first + item); });
    sender.commit(items.num_items, items.end - items.begin);
    return true;
  });
}

/// `arrived`: word of the number of arrived items, tagged with `tag`, or null.
__device__ void receive_items(const ExchangeParams& params, Receiver& receiver, int peer, int worker,
                              std::uint64_t* arrived, std::uint64_t tag) {
  const ItemFlow& flow = params.flows[peer];
  const int chunk_items =
      params.carries_rows ? *static_cast<const volatile std::int32_t*>(&params.rails.state->chunk_items[peer]) : 0;
  for_each_chunk(params, division_of(params, flow.num_in, chunk_items), worker, [&](const ItemChunk& items) {
    const std::byte* const chunk = receiver.front(first_item_chunk(params) + items.chunk_idx, Awaited::kRailItems,
                                                  items.num_items, items.end - items.begin);
    if (chunk == nullptr) return false;
    copy_items<false>(params, items.num_items, items.begin, items.end, const_cast<std::byte*>(chunk),
                      [&](int item) { return flow.first_in + items.first + item; });
    // If items are divided into slices, only the last slice completes them.
    const bool whole = items.end == params.item_bytes();
    if (arrived == nullptr) {
      receiver.release();
    } else {
      receiver.release_in_turn(whole ? arrived : nullptr, arrival_count(tag, items.first + items.num_items));
    }
    return true;
  });
}

/// Releases what the peer has sent of a call that was refused.
__device__ __noinline__ void drop_items(const ExchangeParams& params, Receiver& receiver, int peer, int worker) {
  const auto num_early =
      static_cast<std::uint64_t>(*static_cast<const volatile std::uint32_t*>(&params.rails.state->num_early[peer]));
#pragma unroll 1
  for (auto idx = static_cast<std::uint64_t>(worker); idx < num_early;
       idx += static_cast<std::uint64_t>(params.blocks_per_ring)) {
    if (receiver.front(first_item_chunk(params) + idx, Awaited::kRailItems, 0, Receiver::kAny) == nullptr) return;
    receiver.release();
  }
}

__device__ __noinline__ void land_own_record(const ExchangeParams& params, std::int64_t token, std::int64_t row) {
  pull_record(params.pull, SourceRecord(params.source, token), row);
}

/// Copies the items that stay in the node. `block`: number among the blocks that copy them.
__device__ void copy_own_items(const ExchangeParams& params, const ItemFlow& flow, int block) {
  const ItemPart& row = params.row;
  const ItemPart& record = params.item_record;
  const int num_warps = params.num_own_blocks * kExchangeWarps;
#pragma unroll 1
  for (int i = block * kExchangeWarps + warp_idx(); i < flow.num_out; i += num_warps) {
    const std::int64_t from = position_of(params, flow.first_out + i);
    const std::int64_t to = flow.first_in + i;
    copy_row(row.to + to * row.to_stride, row.from + from * row.from_stride, row.bytes);
    if (record.bytes == 0) continue;
    std::byte* const target = record.to + to * record.to_stride;
    if (params.lands) {
      land_own_record(params, from, to);
    } else if (params.makes_records) {
      make_record(params.source, from, 0, params.source.format.num_words, reinterpret_cast<std::uint32_t*>(target));
    } else {
      copy_record(target, record.from + from * record.from_stride, record.bytes);
    }
  }
}

/// Publishes to the node's ranks that all items of this node are complete, once all blocks that copy them have called
/// it.
__device__ void publish_own_items(const ExchangeParams& params, const ItemFlow& flow, std::uint64_t epoch) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  fence_system();
  std::uint32_t& num_done = params.rails.state->num_own_done;
  if (add_acq_rel_device(&num_done, 1) + 1 != static_cast<std::uint32_t>(params.num_own_blocks)) return;
  num_done = 0;
  store_release_system(&params.rails.log->arrivals[params.rails.node].count, arrival_count(epoch, flow.num_out));
}

/// Takes this rank's rows from the ranks of its node. All threads of a block call it after the block's part in the
/// exchange.
__device__ void pull_rows(const ExchangeParams& params, std::uint64_t epoch) {
  // The entries have arrived and stay valid until all ranks are done.
  PullView view(params, reinterpret_cast<std::byte*>(node_ranks() + params.ranks.num_ranks), epoch);
  const auto take = [&](int rank, const ReceivedEntry& received) {
    const std::byte* base = params.ranks.peer_bases[rank];
    const PullSource source{{base + received.rows_offset(), base + received.scales_offset()},
                            reinterpret_cast<const RailLog*>(base + received.tables_offset())};
    if (lane_idx() == 0) view.set(rank, source);
  };
  const Outcome outcome = await_entries(params.ranks, params.entry, epoch, take);
  if (outcome == Outcome::kGo && view.open()) pull_arriving_rows(params, view);
}

/// Tells the next exchange of a ring that hosts use too where it begins.
__device__ void end_ring(const RingTurn& turn, std::uint64_t exchange, std::uint64_t* num_chunks) {
  if (turn.exchange == exchange) *num_chunks = turn.first + turn.num_done;
}

__device__ void end_rings(const ExchangeParams& params, std::uint64_t exchange) {
  const auto peer = static_cast<int>(threadIdx.x);
  const RailParams& rails = params.rails;
  if (peer >= rails.num_nodes || peer == rails.node) return;
  const RailState& state = *rails.state;
  const bool has_call_rings = rails.has_call_rings();
  net::RingWords& words = (has_call_rings ? rails.call_rings : rails.rings).words[peer];
  end_ring((has_call_rings ? state.calls_out : state.out)[peer], exchange, &words.num_filled);
  end_ring((has_call_rings ? state.calls_in : state.in)[peer], exchange, &words.num_used);
}

/// The host may use the rings as soon as it sees the outcome. All threads of a block.
__device__ void tell_result(const ExchangeParams& params, Outcome outcome) {
  if (params.result == nullptr) return;
  __syncthreads();
  if (threadIdx.x == 0) store_release_system(params.result, static_cast<std::uint64_t>(outcome) + 1);
}

/// Ends the exchange once all blocks are done. All threads of block 0 call it.
__device__ __noinline__ void finish(const ExchangeParams& params, std::uint64_t exchange, std::uint64_t epoch,
                                    Outcome outcome) {
  RailState& state = *params.rails.state;
  bool here = true;
  if (threadIdx.x == 0) {
    here = wait_until(
        params.ranks, {Awaited::kOwn, params.ranks.rank, exchange},
        [&state] { return static_cast<std::uint64_t>(load_acquire_device(&state.num_done)); },
        static_cast<std::uint64_t>(gridDim.x - 1));
    if (here) {
      state.num_done = 0;
      state.num_taken = 0;
      state.exchange = exchange;
    }
  }
  // Blocks also end when the group broke.
  here = here && !is_broken(params.ranks);
  here = __syncthreads_and(static_cast<int>(here)) != 0;
  if (!here) return;
  if (!params.begins_call) {
    end_rings(params, exchange);
    return;
  }
  post_block_done(params.ranks, epoch);
  if (outcome == Outcome::kSkip) {
    finish_refused(params.ranks, epoch, 1);
  } else {
    bool all = true;
    for (int rank = warp_idx(); rank < params.ranks.num_ranks; rank += kExchangeWarps) {
      all = wait_blocks(params.ranks, rank, 1, epoch) && all;
    }
    if (__syncthreads_and(static_cast<int>(all)) != 0 && warp_idx() == 0) end_epoch(params.ranks, epoch);
  }
  // Last: stores to host memory, for which the fences above would wait.
  end_rings(params, exchange);
  tell_result(params, outcome);
}

/// Ends a call on a Routing that was refused. All threads call it.
__device__ __noinline__ void end_alone(const ExchangeParams& params) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  if (params.entry.agreement != 0) report_refused_routing(params);
  params.rails.state->gate.valid = 0;
}

/// Makes the sums of a combine: those of the node as soon as the rows of its ranks are ready, those of tokens once all
/// ranks of the group agree. `block`: number among the blocks that do. All threads of a block.
template <bool kFloat32>
__device__ void make_sums(const ExchangeParams& params, std::uint64_t exchange, std::uint64_t epoch, int block) {
  auto* const base = reinterpret_cast<std::byte*>(node_ranks() + params.ranks.num_ranks);
  const SumMemory memory = SumMemory::at(base, params.ranks.num_ranks);
  if (params.sums_nodes) {
    const Outcome entries = find_rows(params, epoch, block, memory);
    if (entries == Outcome::kSkip && params.begins_call) skip_items(params, exchange, block);
    if (entries != Outcome::kGo) return;
    sum_items<kFloat32>(params, exchange, block, memory);
    if (!params.begins_call) post_block_done(params.ranks, epoch, static_cast<unsigned>(block));
  }
  if (params.begins_call && await_outcome(params, exchange) != Outcome::kGo) return;
  sum_arriving<kFloat32>(params, exchange, block, memory.terms);
  if (params.sums_nodes && !params.begins_call && block == 0) finish_blocks(params.ranks, epoch, memory.num_blocks);
}

__device__ __noinline__ void make_sums(const ExchangeParams& params, std::uint64_t exchange, std::uint64_t epoch,
                                       int block) {
  if (params.token_sums.float32) {
    make_sums<true>(params, exchange, epoch, block);
  } else {
    make_sums<false>(params, exchange, epoch, block);
  }
}

/// Ends the part of any block except block 0.
__device__ void leave(const ExchangeParams& params) {
  __syncthreads();
  if (threadIdx.x == 0) add_acq_rel_device(&params.rails.state->num_done, 1);
}

__global__ void __launch_bounds__(kExchangeThreads, 1) exchange_kernel(const __grid_constant__ ExchangeParams params) {
  const RailParams& rails = params.rails;
  const auto block = static_cast<int>(blockIdx.x);
  const bool first = block == 0;
  // A receiver: it has nothing else to do before the outcome, while others send chunks and make sums.
  const bool decides = params.begins_call && block == 1;
  if (first && threadIdx.x == 0 && params.started != nullptr) store_release_system(params.started, 1);
  const RouteSummary* const first_look = params.may_stand_alone() ? params.routed : nullptr;
  const CallStart start = start_call(params.ranks, params.begins_call ? first_look : &rails.state->gate);
  if (start.broken || !start.routed) {
    if (!start.broken && params.begins_call) end_alone(params);
    return;
  }
  if (decides && warp_idx() == kExchangeWarps - 1) post_entry(params.ranks, params.entry, start.epoch);
  const std::uint64_t exchange = *static_cast<const volatile std::uint64_t*>(&rails.state->exchange) + 1;
  const int num_rings = 2 * (rails.num_nodes - 1);
  const int worker = block / num_rings;
  const int peer = (rails.node + 1 + block % num_rings / 2) % rails.num_nodes;
  const bool serves = worker < params.blocks_per_ring;
  const bool sends = serves && block % 2 == 0;
  const bool receives = serves && block % 2 == 1;
  const int own_block = block - num_rings * params.blocks_per_ring;  // of those that serve no ring
  const bool routed = params.routed == nullptr || params.routed->valid != 0;
  const bool moves = routed && params.flows != nullptr;
  if (!serves && params.sums_tokens) {
    if (moves) make_sums(params, exchange, start.epoch, own_block);
    leave(params);
    return;
  }
  const bool is_shared = !rails.has_call_rings();
  Sender sender(params, {rails.rings, rails.state->out, sends ? peer : 0, worker, is_shared}, exchange);
  Receiver receiver(params, {rails.rings, rails.state->in, receives ? peer : 0, worker, is_shared}, exchange);
  Outcome outcome = Outcome::kGo;
  bool agreed = !params.begins_call;
  const bool pulls = params.takes_rows();
  const auto agree_once = [&] {
    if (agreed) return;
    agreed = true;
    outcome = decides ? decide(params, exchange, start.epoch) : await_outcome(params, exchange);
    if (decides && pulls && moves && outcome == Outcome::kGo) publish_flows(params, start.epoch);
  };
  const std::uint64_t num_early = sends ? num_early_chunks(params, peer) : 0;
  if (params.begins_call && worker == 0 && !rails.has_call_rings()) {
    if (sends) announce_call(params, sender, num_early);
    if (receives) await_call(params, receiver, peer, exchange);
  } else if (params.begins_call && worker == params.blocks_per_ring - 1 && rails.has_call_rings()) {
    // The last block of a ring: the others' first chunks are before its own.
    if (sends) {
      Sender caller(params, {rails.call_rings, rails.state->calls_out, peer, 0}, exchange);
      announce_call(params, caller, num_early);
    }
    if (receives) {
      Receiver called(params, {rails.call_rings, rails.state->calls_in, peer, 0}, exchange);
      await_call(params, called, peer, exchange);
    }
  }
  if (sends && moves) {
    send_items(params, sender, peer, worker, exchange, [&](std::uint64_t chunk_idx) {
      if (chunk_idx >= num_early) agree_once();
      return chunk_idx < num_early ? outcome != Outcome::kStop : outcome == Outcome::kGo;
    });
  }
  agree_once();
  if (outcome == Outcome::kSkip && receives) drop_items(params, receiver, peer, worker);
  if (outcome == Outcome::kGo && moves) {
    if (receives) {
      std::uint64_t* arrived = pulls ? &rails.log->arrivals[peer].count : nullptr;
      if (params.sums_tokens) arrived = &rails.state->returned[peer];
      receive_items(params, receiver, peer, worker, arrived, params.sums_tokens ? exchange : start.epoch);
    }
    if (!serves) {
      copy_own_items(params, params.flows[rails.node], own_block);
      if (pulls) publish_own_items(params, params.flows[rails.node], start.epoch);
    }
    if (pulls) pull_rows(params, start.epoch);
  }
  if (!first) {
    leave(params);
    return;
  }
  __syncthreads();
  if (outcome != Outcome::kStop) finish(params, exchange, start.epoch, outcome);
}

}  // namespace

cudaError_t launch_rail_exchange(const ExchangeParams& params, cudaStream_t stream) {
  const auto num_blocks = static_cast<unsigned>(params.num_blocks());
  // A dispatch takes rows where a combine adds them up.
  const std::size_t part_bytes =
      params.sums_tokens ? SumMemory::size_bytes(kExchangeWarps, to_size(params.ranks.num_ranks))
                         : PullView::size_bytes(kExchangeWarps, params.ranks.num_ranks, params.rails.num_nodes);
  const std::size_t shared_bytes =
      sizeof(Shared) + static_cast<std::size_t>(params.ranks.num_ranks) * sizeof(NodeRank) + part_bytes;
  return launch_kernel(exchange_kernel, {num_blocks, kExchangeThreads, shared_bytes}, params, stream);
}

cudaError_t load_rail_exchange_kernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(exchange_kernel));
}

}  // namespace ferry::cuda
