#ifndef FERRY_CUDA_INTERNODE_CALL_AGREEMENT_CUH
#define FERRY_CUDA_INTERNODE_CALL_AGREEMENT_CUH

/// Agreement of all ranks on a call, in its first exchange: headers to the rail peers and entries to the ranks of the
/// node at the same time, then verdicts on the headers to the ranks of the node, and one outcome for all blocks.

#include "cuda/internode/exchange_params.hpp"
#include "cuda/internode/rail_ring.cuh"
#include "cuda/internode/record.cuh"
#include "cuda/sync/entry.cuh"

namespace ferry::cuda::device {

inline constexpr int kExchangeThreads = kExchangeWarps * kWarpLanes;

/// As many chunks as the first stages of an exchange have (ChunkDivision), 3.5 MiB of chunks of 1 MiB: the network
/// sends them in 70 us at 50 GB/s, and ranks agree in 35 to 43 (two H200 over a stand-in for a card with 3 us a trip).
inline constexpr std::uint64_t kMostEarlyChunks = 12;

/// Header of a call's first exchange, in a chunk before the items.
struct alignas(16) CallAnnouncement {
  std::uint64_t agreement;
  std::uint64_t chunk_items;  ///< ExchangeParams::chunk_items of the sender
  std::uint64_t num_early;    ///< chunks with items that the sender sends whatever the outcome
  CallRecord record;
};

/// Copies a struct with all threads of the block.
template <typename T>
__device__ void copy_words(T& to, const T& from) {
  static_assert(sizeof(T) % sizeof(std::uint32_t) == 0);
  const auto* words = reinterpret_cast<const std::uint32_t*>(&from);
  auto* target = reinterpret_cast<std::uint32_t*>(&to);
#pragma unroll 1
  for (std::size_t word = threadIdx.x; word < sizeof(T) / sizeof(std::uint32_t); word += kExchangeThreads) {
    target[word] = words[word];
  }
}

/// Chunks with items to a peer that a rank sends without waiting for the outcome of the call, so that the network works
/// meanwhile. They fit into the ring behind the announcement even if the peer never makes the call.
__device__ inline std::uint64_t num_early_chunks(const ExchangeParams& params, int peer) {
  const bool routed = params.routed == nullptr || static_cast<const volatile RouteSummary*>(params.routed)->valid != 0;
  if (!params.begins_call || params.entry.agreement == 0 || params.flows == nullptr || !routed) return 0;
  const auto num_chunks = static_cast<std::uint64_t>(sent_division(params, peer).num_chunks());
  const std::uint64_t room = params.rails.rings.num_chunks - first_item_chunk(params);
  const std::uint64_t most = room < kMostEarlyChunks ? room : kMostEarlyChunks;
  return num_chunks < most ? num_chunks : most;
}

__device__ __noinline__ inline void announce_call(const ExchangeParams& params, Sender& sender,
                                                  std::uint64_t num_early) {
  std::byte* const chunk = sender.reserve(0);
  if (chunk == nullptr) return;
  auto& announcement = *reinterpret_cast<CallAnnouncement*>(chunk);
  if (threadIdx.x == 0) {
    announcement.agreement = params.entry.agreement;
    announcement.chunk_items = static_cast<std::uint64_t>(params.chunk_items);
    announcement.num_early = num_early;
  }
  copy_words(announcement.record, params.record);
  sender.commit(1, sizeof(CallAnnouncement));
}

/// Compares the peer's call with this rank's, and keeps the peer's record if they differ. One thread reads what it
/// needs, all at once: warps of a block that load one line of host memory wait for each other, 0.8 us each.
__device__ __noinline__ inline void await_call(const ExchangeParams& params, Receiver& receiver, int peer,
                                               std::uint64_t exchange) {
  const std::byte* const chunk = receiver.front(0, Awaited::kRailCall, 1, sizeof(CallAnnouncement));
  if (chunk == nullptr) return;
  const auto& announcement = *reinterpret_cast<const CallAnnouncement*>(chunk);
  std::uint64_t& verdict = params.rails.state->verdicts[peer];
  bool equal = true;
  if (threadIdx.x == 0) {
    const std::uint64_t theirs = *static_cast<const volatile std::uint64_t*>(&announcement.agreement);
    const std::uint64_t chunk_items = *static_cast<const volatile std::uint64_t*>(&announcement.chunk_items);
    const std::uint64_t num_early = *static_cast<const volatile std::uint64_t*>(&announcement.num_early);
    params.rails.state->chunk_items[peer] = static_cast<std::int32_t>(chunk_items);
    params.rails.state->num_early[peer] = static_cast<std::uint32_t>(num_early);
    equal = theirs == params.entry.agreement && theirs != 0;
    if (equal) store_release_device(&verdict, exchange << 1 | 1U);
  }
  equal = __syncthreads_and(static_cast<int>(equal)) != 0;
  if (!equal) {
    RailLog::Entry& entry = params.rails.log->entries[peer];
    copy_words(entry.record, announcement.record);
    __syncthreads();
    if (threadIdx.x == 0) {
      fence_system();
      store_release_system(reinterpret_cast<std::uint64_t*>(&entry.number),
                           static_cast<std::uint64_t>(params.entry.record_number));
      store_release_device(&verdict, exchange << 1);
    }
  }
  receiver.release();
}

/// Whether all rail peers make this rank's call. All threads of the block that decides call it; sets `here` to false if
/// the group broke.
__device__ inline bool await_verdicts(const ExchangeParams& params, std::uint64_t exchange, bool& here) {
  bool all_here = true;
  bool all_equal = true;
  const auto peer = static_cast<int>(threadIdx.x);
  if (peer < params.rails.num_nodes && peer != params.rails.node) {
    const std::uint64_t* word = &params.rails.state->verdicts[peer];
    std::uint64_t seen = 0;
    const auto read = [word, &seen] { return seen = load_acquire_device(word); };
    all_here = wait_until(params.ranks, {Awaited::kOwn, params.ranks.rank, exchange}, read, exchange << 1);
    all_equal = all_here && (seen & 1U) != 0;
  }
  here = __syncthreads_and(static_cast<int>(all_here)) != 0;
  return __syncthreads_and(static_cast<int>(all_equal)) != 0;
}

/// Sends every rank of the node whether the rail peers make this rank's call. All lanes of one warp call it.
__device__ inline void post_rail_verdict(const RankParams& ranks, std::uint64_t epoch, bool equal) {
  fence_system();  // publishes the records that differ, which the block has acquired
  for (int rank = lane_idx(); rank < ranks.num_ranks; rank += kWarpLanes) {
    store_relaxed_system(control_of(ranks, rank).rail_verdicts + ranks.rank, epoch << 1 | (equal ? 1U : 0U));
  }
}

/// Outcome of the verdicts of all ranks of the node. All threads of the block that decides call it.
__device__ inline Outcome await_rail_verdicts(const RankParams& ranks, std::uint64_t epoch) {
  bool here = true;
  bool equal = true;
  for (int rank = static_cast<int>(threadIdx.x); rank < ranks.num_ranks; rank += kExchangeThreads) {
    const std::uint64_t* word = ranks.control.rail_verdicts + rank;
    std::uint64_t seen = 0;
    const auto read = [word, &seen] {
      seen = load_acquire_system(word);
      return seen >> 1;
    };
    const WaitCount count(ranks, rank, rank != ranks.rank);
    here = wait_until(ranks, {Awaited::kEntry, rank, epoch}, read, epoch, count) && here;
    equal = equal && (seen & 1U) != 0;
  }
  const bool all_here = __syncthreads_and(static_cast<int>(here)) != 0;
  const bool all_equal = __syncthreads_and(static_cast<int>(equal)) != 0;
  return !all_here ? Outcome::kStop : all_equal ? Outcome::kGo : Outcome::kSkip;
}

/// Log and record number of a rank of this node for the current call. In shared memory, one per rank.
struct NodeRank {
  const RailLog* log;
  std::int64_t record_number;
};

__device__ inline NodeRank* node_ranks() { return reinterpret_cast<NodeRank*>(&shared() + 1); }

/// Reports to the host that ranks of the group disagree, and the calls of this node's rail peers. All threads of the
/// block that decides call it.
__device__ __noinline__ inline void report_difference(const ExchangeParams& params, std::uint64_t epoch) {
  FaultReport& fault = *params.fault;
  const bool reported = *static_cast<volatile std::uint64_t*>(&fault.state) != 0;
  if (__syncthreads_or(static_cast<int>(reported)) != 0) return;  // only the first fault counts
  const int num_ranks = params.ranks.num_ranks;
  const int num_nodes = params.rails.num_nodes;
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); rank < num_ranks; rank += kExchangeThreads) {
    const std::int64_t number = record_number_of(params.ranks, rank, epoch);
    node_ranks()[rank].record_number = number;
    fault.record_numbers[rank] = number;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = warp_idx(); i < num_ranks * num_nodes; i += kExchangeWarps) {
    const NodeRank& rank = node_ranks()[i / num_nodes];
    const RailLog::Entry& entry = rank.log->entries[i % num_nodes];
    const bool differs =
        i % num_nodes != params.rails.node &&
        static_cast<std::int64_t>(load_acquire_system(reinterpret_cast<const std::uint64_t*>(&entry.number))) ==
            rank.record_number;
    FoundRecord& found = params.found[i];
    if (lane_idx() == 0) found.present = differs ? 1 : 0;
    if (differs) {
      copy_record(reinterpret_cast<std::byte*>(&found.record), reinterpret_cast<const std::byte*>(&entry.record),
                  sizeof(CallRecord));
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  fault.fault = static_cast<std::int32_t>(Fault::kDisagreement);
  fault.rank = -1;
  fence_system();
  store_release_system(&fault.state, 1);
}

/// Reports that the call is made on a Routing that was refused. One thread calls it.
__device__ __noinline__ inline void report_refused_routing(const ExchangeParams& params) {
  report_refused_route(params.ranks, *params.routed);
}

/// Outcome of the call for all ranks of the group. All threads of the block that decides call it.
__device__ __noinline__ inline Outcome agree(const ExchangeParams& params, std::uint64_t exchange,
                                             std::uint64_t epoch) {
  bool here = true;
  const bool equal = await_verdicts(params, exchange, here);
  if (!here) return Outcome::kStop;
  if (warp_idx() == 0) post_rail_verdict(params.ranks, epoch, equal);
  const auto take = [&params](int rank, const ReceivedEntry& received) {
    const std::byte* const log = params.ranks.peer_bases[rank] + received.tables_offset();
    if (lane_idx() == 0) node_ranks()[rank].log = reinterpret_cast<const RailLog*>(log);
  };
  // Both, whatever the first says: a report needs the records that verdicts publish.
  const Outcome entries = await_entries(params.ranks, params.entry, epoch, take, /*counts=*/true);
  if (entries == Outcome::kStop) return entries;
  const Outcome verdicts = await_rail_verdicts(params.ranks, epoch);
  if (verdicts == Outcome::kStop) return verdicts;
  const Outcome outcome = entries == Outcome::kGo ? verdicts : entries;
  if (outcome == Outcome::kSkip && params.entry.agreement != 0) report_difference(params, epoch);
  if (threadIdx.x == 0) {
    const bool routed = params.routed == nullptr || params.routed->valid != 0;
    if (outcome == Outcome::kGo && !routed) report_refused_routing(params);
    params.rails.state->gate.valid = outcome == Outcome::kGo && routed ? 1 : 0;
  }
  return outcome;
}

/// Waits for the outcome. All threads of any other block than that which decides call it.
__device__ __noinline__ inline Outcome await_outcome(const ExchangeParams& params, std::uint64_t exchange) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const std::uint64_t* word = &params.rails.state->outcome;
    std::uint64_t seen = 0;
    const auto read = [word, &seen] { return seen = load_acquire_device(word); };
    const bool here = wait_until(params.ranks, {Awaited::kOwn, params.ranks.rank, exchange}, read, exchange << 2);
    shared().outcome = here ? seen & 3U : static_cast<std::uint64_t>(Outcome::kStop);
  }
  __syncthreads();
  return static_cast<Outcome>(shared().outcome);
}

/// Decides for the other blocks too.
__device__ __noinline__ inline Outcome decide(const ExchangeParams& params, std::uint64_t exchange,
                                              std::uint64_t epoch) {
  const Outcome outcome = agree(params, exchange, epoch);
  if (threadIdx.x == 0) {
    // Read by the kernel that fills rows without a token.
    params.ranks.control.local->outcome = epoch << 2 | static_cast<std::uint64_t>(outcome);
    store_release_device(&params.rails.state->outcome, exchange << 2 | static_cast<std::uint64_t>(outcome));
  }
  return outcome;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTERNODE_CALL_AGREEMENT_CUH
