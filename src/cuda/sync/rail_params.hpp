#ifndef FERRY_CUDA_SYNC_RAIL_PARAMS_HPP
#define FERRY_CUDA_SYNC_RAIL_PARAMS_HPP

/// What kernels need to know about the rail peers, and the words that the kernels of a rank keep about them. Kernels
/// know ranks by their index in the node (RankParams) and rail peers by their node.
///
/// An exchange is one launch of the exchange kernel. All ranks of a group make the same ones in the same order, so the
/// number of an exchange, counted on the device, is the same at both ends of a ring.
///
///   word           writer                         order               publishes
///   verdicts[n]    the block that receives from   st.release.gpu /    what the call header from node n came to, and in
///                  node n                         ld.acquire.gpu      the log, if it differs, the record of its call
///   outcome        block 0                        the same            what all headers and entries came to
///   num_done       all blocks                     atom.add.acq_rel    the end of the block's part
///   gate           block 0 of a call's first      end of the kernel   whether the rest of the call moves anything
///                  exchange
///   known          block 0 of a dispatch          st.release.sys      `first` and `num` of all arrivals
///   count          the block whose turn it is     the same            rows and records of so many items in staging
///   summed[w]      warp w of a combine's sums     st.release.gpu /    the sums of so many of the warp's turns
///                                                 ld.acquire.gpu
///   out[n], in[n]  blocks that serve a ring       st.release.gpu /    `exchange`: the first chunk; `turn`: what other
///                                                 ld.acquire.gpu      blocks did to the chunks below it; `seen`:
///                                                                     chunks that have room, or have arrived

#include <cstddef>
#include <cstdint>

#include "core/agreement.hpp"
#include "cuda/sync/report.hpp"
#include "net/ring_words.hpp"
#include "plan/host_device.hpp"

namespace ferry::cuda {

/// Bound on the nodes of a group of GPUs: two blocks of a kernel or more serve each rail peer, and all run at once.
inline constexpr int kMaxNodes = 32;

/// Bound on the warps that make a rank's sums in a combine.
inline constexpr int kMaxSumWarps = 128;

/// How the blocks that serve one end of a ring share it: block i takes each chunk whose number, counted from the first
/// of the exchange, is i modulo the number of blocks.
struct RingTurn {
  std::uint64_t exchange;  ///< written last
  std::uint64_t first;     ///< number of the first chunk of the exchange
  std::uint64_t turn;      ///< number of the chunk that is published or released next
  std::uint64_t seen;      ///< what a block last saw of `credits` or `arrived`, which are across PCIe
};

/// In device memory, initially zero.
struct RailState {
  std::uint64_t exchange;             ///< exchanges finished
  std::uint64_t verdicts[kMaxNodes];  ///< exchange << 1 | 1 where the peer makes the same call
  std::uint64_t outcome;              ///< exchange << 2 | device::Outcome
  std::uint32_t num_done;
  std::uint32_t num_own_done;  ///< blocks that have copied the own node's items
  std::uint32_t num_taken;     ///< rows that warps have taken upon them
  RouteSummary gate;           ///< `valid`: ranks agree on the current call
  // As in LocalState, for the rail peers.
  std::uint64_t wait_ns[kMaxNodes];
  std::uint64_t counted_until_ns[kMaxNodes];
  /// Lower half of the exchange that sends the sums << 32 | turns (sum_turns.cuh) that are done.
  std::uint64_t summed[kMaxSumWarps];
  RingTurn out[kMaxNodes];
  RingTurn in[kMaxNodes];
};

/// What the other ranks of the node need to know about this rank's rails; so in the arena, initially zero. Records of
/// rail peers that differ from this rank's, of the current call: a kernel that reports a refused call looks there.
struct RailLog {
  struct Entry {
    std::int64_t number;  ///< of this rank's record; written last
    CallRecord record;
  };
  Entry entries[kMaxNodes];

  /// What has come into this rank's staging, for the ranks of its node, which take rows from there as they come.
  struct Arrivals {
    std::int32_t first;  ///< of the items from a node, and their number: of the epoch in `known`
    std::int32_t num;
    std::uint64_t count;  ///< lower half of the epoch << 32 | items that are there
  };
  Arrivals arrivals[kMaxNodes];
  std::uint64_t known;  ///< the last epoch whose `first` and `num` are there
};

/// What a rank of this node has found to be the call of its rail peer in another node, for the host. In pinned memory.
struct FoundRecord {
  std::uint64_t present;  ///< 0: that peer makes the same call
  CallRecord record;
};

struct RailParams {
  int node = 0;
  int num_nodes = 1;
  RailState* state = nullptr;
  RailLog* log = nullptr;
  net::RingWords* words = nullptr;       ///< [nodes]
  const std::byte* chunks_in = nullptr;  ///< rings of all peers in turn, this node left out
  std::byte* chunks_out = nullptr;
  std::size_t num_chunks = 0;   ///< of a ring
  std::size_t chunk_bytes = 0;  ///< including the header

  FERRY_HOST_DEVICE std::size_t ring_offset(int peer) const {
    const int idx = peer < node ? peer : peer - 1;
    return static_cast<std::size_t>(idx) * num_chunks * chunk_bytes;
  }
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_SYNC_RAIL_PARAMS_HPP
