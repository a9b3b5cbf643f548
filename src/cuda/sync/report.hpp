#ifndef FERRY_CUDA_SYNC_REPORT_HPP
#define FERRY_CUDA_SYNC_REPORT_HPP

/// Words of pinned host memory through which kernels and their host communicate, and reports of kernels to later
/// kernels.
///
///   field            writer                     reader   order
///   lost.state       the kernel whose wait      host     st.release.sys after the other fields / acquire load
///                    failed first (once)
///   fault.state      one block of a call        host     the same; the host resets it to 0 when the stream is idle
///   RouteResult      the count exchange         host     once per route. `state`: the same, for several nodes and for
///                                                        refused routes; otherwise it publishes no data, nor do the
///                                                        words that hold the counts (RouteWords): relaxed / acquire
///                                                        load, in any order. `started` publishes no data: the
///                                                        kernels' deadlines run from then on
///   stop.requested   host (any thread)          kernels  release store, after the error record or the loss that
///                                                        caused it is visible to hosts / ld.acquire.sys; never
///                                                        reset
///   lost_ranks.lost  host (PeerWatch)           kernels  release store, after the rank's last writes have arrived /
///                                                        ld.acquire.sys; never reset
///   waiting.words    kernels                    host     relaxed: each word publishes only itself
///   waits            kernels                    host     relaxed: each word publishes only itself and only grows
///                                                        (of steps that end together, one may be seen after the
///                                                        next)

#include <cstdint>

#include "plan/host_device.hpp"

namespace ferry::cuda {

/// Event that a kernel waits for.
enum class Awaited : std::int32_t {
  kCounts = 0,  ///< a peer's counts
  kEntry = 1,   ///< a peer to make the same call
  kRows = 2,    ///< rows from a peer
  kDone = 3,    ///< a peer to finish its part
  kOwn = 4,     ///< this rank's own blocks
  kRow = 5,     ///< latency mode: one row, or its place
  kTile = 6,    ///< latency mode: a tile of this rank's rows to be finished; the epoch is pack_tile()
  // For these the peer is a node: the rail peer in that node.
  kRailCall = 7,       ///< a rail peer to make the same call
  kRailItems = 8,      ///< a rail peer to send a chunk
  kRailRoom = 9,       ///< a rail peer to use a chunk
  kRailProtocol = 10,  ///< no event: the rail peer has sent data that no rank of this build sends
};

/// Deadline of waits for tiles: before that of the ranks that wait for this one's rows, so that the error says why.
FERRY_HOST_DEVICE constexpr std::uint64_t tile_timeout_ns(std::uint64_t timeout_ns) {
  return timeout_ns - timeout_ns / 4;
}

/// A tile of a local expert's rows, in place of the number of a call.
FERRY_HOST_DEVICE constexpr std::uint64_t pack_tile(int expert, int tile) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(expert)) << 32 | static_cast<std::uint32_t>(tile);
}

/// A wait that timed out or was stopped.
struct LostReport {
  std::uint64_t state;  ///< 1: the other fields are valid
  std::int32_t awaited;
  std::int32_t peer;
  std::uint64_t epoch;
  std::uint64_t seen;
  std::uint64_t expected;
  std::uint64_t stopped;   ///< 1: stopped by `StopWord` before the deadline
  std::uint64_t of_group;  ///< 1: `peer` is a rank of the group, as RankParams::of_group says; else as `awaited` says
};

enum class Fault : std::int32_t {
  kReported = 0,      ///< the call was refused, and an exchange before this kernel has reported why
  kDisagreement = 1,  ///< ranks made different calls, or one refused; `record_numbers`: the records to compare
  kBadId = 2,         ///< `value` of (token `row`, entry `column`) is no expert, on rank `rank`
  kSlabCapacity = 3,  ///< expert `row` of rank `rank` gets `value` rows
  kRowCapacity = 4,   ///< rank `rank` gets `value` rows, and its max_recv_rows is `limit`
  kNotRouted = 5,     ///< a captured Routing is used before its graph has run
  // Faults of a placement in GPU memory.
  kBadHome = 6,      ///< entry `row` of rank `rank` is `value`
  kMissingHome = 7,  ///< the placement of rank `rank` has no home of expert `value`
  kOtherHomes = 8,   ///< the placement of rank `rank` differs from that of rank 0
};

/// Stands for the record of a masked rank (GroupOptions::mask_lost_ranks).
inline constexpr std::int64_t kMaskedRecord = -2;

/// Reason why the exchange refused the call. No row was sent, and the group remains usable.
struct FaultReport {
  std::uint64_t state;  ///< 1: the other fields are valid
  std::int32_t fault;
  std::int32_t rank;
  std::int64_t row;
  std::int64_t column;
  std::int64_t value;
  std::int64_t limit;
  std::int64_t record_numbers[128];  ///< [R], kMaxRanks; kMaskedRecord: the rank takes no part
  std::int64_t of_group;             ///< 1: `record_numbers` are by rank of the group, 0: by rank of this node
  std::int64_t latency;              ///< 1: fault of latency_dispatch, 0: of route; the host resets it to 0 with
                                     ///< `state`, and `of_group` too
};

/// Host flag that ends the waits of kernels: a peer will not arrive. In separate cache lines: kernels poll it over
/// PCIe.
struct alignas(128) StopWord {
  std::uint64_t requested;
};

/// Host flags for kernels that continue without lost ranks: the rank has died, left or given up.
struct alignas(128) LostRanks {
  std::uint64_t lost[128];  ///< [R], kMaxRanks; 1: the rank is lost
};

/// Waits of kernels that last, so that the host can show what its GPU waits for: the latest wait for each peer, written
/// each time that a waiting thread polls the stop word. A word that no longer changes is of a wait that is over.
struct alignas(128) WaitingWords {
  static constexpr int kGroupRanks = 128;             ///< first word of ranks of the group (RankParams::of_group)
  static constexpr int kRails = 2 * kGroupRanks;      ///< first word of rail peers, by node
  static constexpr int kNumWords = kRails + 32;       ///< kMaxNodes
  static constexpr std::uint64_t kTimeShift = 20;     ///< the time is in units of 2^20 ns
  static constexpr std::uint64_t kAwaitedShift = 56;  ///< above 56 bits of time
  /// Before the ranks of the group: ranks of the node.
  std::uint64_t words[kNumWords];

  FERRY_HOST_DEVICE static constexpr std::uint64_t word_of(Awaited awaited, std::uint64_t now_ns) {
    return static_cast<std::uint64_t>(awaited) << kAwaitedShift | now_ns >> kTimeShift;
  }
  static constexpr Awaited awaited_of(std::uint64_t word) { return static_cast<Awaited>(word >> kAwaitedShift); }
};

/// Time that this rank's kernels have waited for each rank; the host adds up the sums for one rank.
struct alignas(128) WaitTimes {
  std::uint64_t ns[128];        ///< [R], kMaxRanks: ranks of the node, waits for them to enter a call and to leave it
  std::uint64_t steps_ns[128];  ///< the same ranks: waits for rows, and for words of latency mode
  std::uint64_t rails_ns[32];   ///< [nodes], kMaxNodes: the rail peer in that node
  std::uint64_t group_ns[128];  ///< [R], kMaxRanks: ranks of the group, latency mode over several nodes
};

struct DeviceReport {
  LostReport lost;
  FaultReport fault;
  StopWord stop;
  LostRanks lost_ranks;
  WaitingWords waiting;
  WaitTimes waits;
};

/// Outcome of the count exchange, read by every later kernel.
struct RouteSummary {
  std::uint32_t valid;         ///< 0: refused; dispatch and combine move nothing
  std::int32_t num_used_rows;  ///< also Routing::num_recv_rows_view
  std::int32_t num_token_rows;
  std::int32_t fault;  ///< Fault, if not valid
  std::int64_t fault_rank;
  std::int64_t fault_row;
  std::int64_t fault_column;
  std::int64_t fault_value;
  std::int64_t fault_limit;
};

/// Report of route to the host. With several nodes, arrays follow: from_rank[R], to_rank[R], rows_per_expert[L] i32,
/// row_offsets[L + 1] i64. With one node RouteWords follow instead, which also replace the numbers here.
struct RouteResult {
  /// Values of `state`. kRefusedBySome: hosts of other ranks may have known of the refusal at once; they make no calls
  /// with the Routing.
  static constexpr std::uint64_t kValid = 1;
  static constexpr std::uint64_t kRefused = 2;
  static constexpr std::uint64_t kRefusedBySome = 3;

  std::uint64_t state;    ///< 0: not known yet
  std::uint64_t started;  ///< 1: the stream has reached the route
  std::int64_t num_used_rows;
  std::int64_t num_token_rows;  ///< distinct (source, token) pairs
  std::int64_t repeats;         ///< 1: some token of some rank names an expert twice
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_SYNC_REPORT_HPP
