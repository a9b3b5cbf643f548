#ifndef FERRY_CUDA_SYNC_RAIL_PARAMS_HPP
#define FERRY_CUDA_SYNC_RAIL_PARAMS_HPP

/// Facts about the rail peers that kernels need, and the words that a rank's kernels keep about them. Kernels identify
/// ranks by their index in the node (RankParams), and rail peers by their node.
///
/// An exchange is one launch of the exchange kernel. All ranks of a group make the same exchanges in the same order, so
/// the number of an exchange, counted on the device, is the same at both ends of a ring.
///
///   word           writer                         order               publishes
///   verdicts[n]    the block that receives from   st.release.gpu /    the verdict on the call header from node n,
///                  node n                         ld.acquire.gpu      chunk_items[n], num_early[n], and the record of
///                                                                     its call in the log, if it differs
///   outcome        the block that decides: the    the same            the outcome of all headers and entries
///                  first that receives
///   num_done       all blocks                     atom.add.acq_rel    the end of the block's part
///   gate           the same block of a call's     end of the kernel   whether the rest of the call moves data
///                  first exchange
///   known          the same of a dispatch         st.release.sys      `first` and `num` of all arrivals
///   count          the block whose turn it is     the same            rows and records of that many items in staging
///   summed[w]      warp w of a combine's sums     st.release.gpu /    the sums of that many of the warp's turns
///                                                 ld.acquire.gpu
///   returned[n]    the block whose turn it is     st.release.sys /    that many sums of node n
///                                                 ld.acquire.gpu
///   out[n], in[n]  blocks that serve a ring       st.release.gpu /    `exchange`: the first chunk; `turn`: actions of
///                                                 ld.acquire.gpu      other blocks on the chunks below it; `seen`:
///                                                                     chunks that have room, or have arrived

#include <cstddef>
#include <cstdint>

#include "core/agreement.hpp"
#include "cuda/sync/report.hpp"
#include "net/ring_words.hpp"
#include "plan/host_device.hpp"

namespace ferry::cuda {

/// Upper bound of the nodes of a group of GPUs: at least two blocks of a kernel serve each rail peer, and all run at
/// the same time.
inline constexpr int kMaxNodes = 32;

/// Upper bound of the warps that make a rank's sums in a combine.
inline constexpr int kMaxSumWarps = 256;

/// Shares one end of a ring among the blocks that serve it: block i takes each chunk whose number, counted from the
/// exchange's first chunk, is i modulo the number of blocks.
struct RingTurn {
  std::uint64_t exchange;  ///< written last
  std::uint64_t first;     ///< number of the first chunk of the exchange
  std::uint64_t num_done;  ///< chunks of the exchange that blocks have filled, or used
  std::uint64_t turn;      ///< receiver's end: number of the next chunk whose items are reported
  std::uint64_t seen;      ///< value of `credits` or `arrived` that a block saw last; both are across PCIe
};

/// State in device memory, initially zero.
struct RailState {
  std::uint64_t exchange;               ///< number of finished exchanges
  std::uint64_t verdicts[kMaxNodes];    ///< exchange << 1 | 1 if the peer makes the same call
  std::uint64_t outcome;                ///< exchange << 2 | device::Outcome
  std::int32_t chunk_items[kMaxNodes];  ///< most items of a chunk with rows that the peer sends in the call; 0: none
  std::uint32_t num_early[kMaxNodes];   ///< chunks with items that the peer sends before it knows the outcome
  std::uint32_t num_done;
  std::uint32_t num_own_done;  ///< blocks that have copied this node's items
  std::uint32_t num_taken;     ///< rows that warps have taken over
  RouteSummary gate;           ///< `valid`: ranks agree on the current call
  // The same sums as in LocalState, for the rail peers.
  std::uint64_t wait_ns[kMaxNodes];
  std::uint64_t counted_until_ns[kMaxNodes];
  /// Lower half of the number of the exchange that sends the sums << 32 | turns (sum_turns.cuh) completed.
  std::uint64_t summed[kMaxSumWarps];
  /// Lower half of the number of the exchange << 32 | items of a combine that have arrived from each node.
  std::uint64_t returned[kMaxNodes];
  RingTurn out[kMaxNodes];
  RingTurn in[kMaxNodes];
  RingTurn calls_out[kMaxNodes];  ///< RailParams::call_rings; each end has one block
  RingTurn calls_in[kMaxNodes];
};

/// Facts about this rank's rails that the other ranks of the node need; therefore in the arena, initially zero. Holds
/// the records of rail peers that differ from this rank's record of the current call: a kernel that reports a refused
/// call reads them.
struct RailLog {
  struct Entry {
    std::int64_t number;  ///< number of this rank's record; written last
    CallRecord record;
  };
  Entry entries[kMaxNodes];

  /// Items that have arrived in this rank's staging. The ranks of its node take rows from there as they arrive.
  struct Arrivals {
    std::int32_t first;  ///< first of the items from a node, and their number; of the epoch in `known`
    std::int32_t num;
    std::uint64_t count;  ///< lower half of the epoch << 32 | items that have arrived
  };
  Arrivals arrivals[kMaxNodes];
  std::uint64_t known;  ///< last epoch whose `first` and `num` are valid
};

/// Call of a rank's rail peer in another node, as that rank of this node found it; read by the host. In pinned memory.
struct FoundRecord {
  std::uint64_t present;  ///< 0: the peer makes the same call
  CallRecord record;
};

/// Rings with all rail peers.
struct RailRings {
  net::RingWords* words = nullptr;       ///< [nodes]
  const std::byte* chunks_in = nullptr;  ///< rings of all peers in order of node, without this node
  std::byte* chunks_out = nullptr;
  std::size_t num_chunks = 0;   ///< chunks of one ring
  std::size_t chunk_bytes = 0;  ///< including the header
};

struct RailParams {
  int node = 0;
  int num_nodes = 1;
  RailState* state = nullptr;
  RailLog* log = nullptr;
  RailRings rings;  ///< for items
  /// For call headers, in host memory, where `rings` are in GPU memory: what a card does not have to write there is one
  /// message. Otherwise absent, and a header is the first chunk in `rings`.
  RailRings call_rings;

  FERRY_HOST_DEVICE bool has_call_rings() const { return call_rings.words != nullptr; }
  FERRY_HOST_DEVICE std::size_t ring_offset(const RailRings& of, int peer) const {
    const int idx = peer < node ? peer : peer - 1;
    return static_cast<std::size_t>(idx) * of.num_chunks * of.chunk_bytes;
  }
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_SYNC_RAIL_PARAMS_HPP
