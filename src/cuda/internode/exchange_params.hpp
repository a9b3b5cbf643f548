#ifndef FERRY_CUDA_INTERNODE_EXCHANGE_PARAMS_HPP
#define FERRY_CUDA_INTERNODE_EXCHANGE_PARAMS_HPP

/// The exchange kernel: data that a rank and its rail peers send each other in one step of a call. An item is a part of
/// a row table and a part of a record table, sent contiguously. It is read from the sender's tables and written to the
/// receiver's, at positions that both have from route. Meanwhile other blocks copy the items for this rank's own node,
/// without a ring.
///
/// The first exchange of a call begins with a call header to every rail peer, an entry to every rank of the node, and
/// to these, later, a verdict on the headers of the rail peers, so that all ranks of the group reach the same outcome
/// before any of them writes what the caller sees. A few chunks follow the header at once; a receiver uses them where
/// the outcome is to go on, and else drops them.
///
/// A combine is one exchange: every rank sums the rows that its node has for each token that it forwards and for each
/// of its own, while the first of these sums are returned to the tokens' ranks, which add up the nodes as sums come in
/// (node_sum.cuh, token_sum.cuh). The entries of the node's ranks suffice to begin the sums. Sums with weights need
/// those of the tokens' ranks: an exchange before it begins the call and carries them. Where a node's sum is a row as
/// it is, as for a rank alone in its node without weights, no rank makes any.

#include <cuda_runtime_api.h>

#include <array>

#include "cuda/internode/dispatch_params.hpp"
#include "cuda/internode/node_sum_params.hpp"
#include "cuda/internode/token_sum_params.hpp"
#include "cuda/sync/rail_params.hpp"
#include "cuda/sync/rank_params.hpp"

namespace ferry::cuda {

/// Items to one node and from it, as positions in the tables. For this rank's own node, items go from `first_out` to
/// `first_in`.
struct ItemFlow {
  std::int32_t first_out = 0;
  std::int32_t num_out = 0;
  std::int32_t first_in = 0;
  std::int32_t num_in = 0;
};

/// Parts of items, of equal size at both ends.
struct ItemPart {
  const std::byte* from = nullptr;
  std::int64_t from_stride = 0;
  std::byte* to = nullptr;
  std::int64_t to_stride = 0;
  std::int64_t bytes = 0;  ///< bytes of an item: a multiple of 16 in rows, of 4 in records
};

/// Warps of a block of the exchange.
inline constexpr int kExchangeWarps = 16;

struct ExchangeParams {
  RankParams ranks;
  RailParams rails;
  /// Timeout of waits for rail peers, shorter than for ranks of the node, which may themselves be waiting for rail
  /// peers. If a rank does not arrive, its rail peers are therefore the first to give up, and they report that rank.
  std::uint64_t rail_timeout_ns = 0;
  /// Whether this is the call's first exchange, and the data of the call that it then sends.
  bool begins_call = false;
  /// For the ranks of the node, from an exchange that begins a call or makes sums. Agreement 0: this rank refuses the
  /// call.
  EntryMessage entry;
  CallRecord record;
  FoundRecord* found = nullptr;  ///< [ranks of the node, nodes] records that differ
  FaultReport* fault = nullptr;  ///< report of a refused call
  /// Summary of the Routing that the call uses. If the Routing was refused, as it then is on all ranks, no data moves.
  /// A dispatch or combine of throughput mode then exchanges nothing, since ranks whose hosts have seen the refusal
  /// make no such call. Null: the Routing cannot have been refused, or there is none.
  const RouteSummary* routed = nullptr;
  std::uint64_t* result = nullptr;   ///< pinned: the Outcome + 1, for a host that waits for it; or null
  std::uint64_t* started = nullptr;  ///< pinned: 1 as soon as the kernel runs; or null

  const ItemFlow* flows = nullptr;      ///< [nodes]; null: no items
  const std::int32_t* items = nullptr;  ///< position of each outgoing item in the source tables; null: its own number
  ItemPart row;
  ItemPart item_record;
  /// Dispatch only: what records of outgoing items are made of; item_record.from is not used.
  RecordParams source;
  bool makes_records = false;
  /// Dispatch only: items are this rank's rows in the order in which they come, at row.to, and their records go
  /// straight to the outputs (`pull`) in place of item_record.to. Items are not longer than a chunk.
  bool lands = false;
  /// Dispatch only: the ranks of the node take their rows from staging as they arrive, if this exchange begins the
  /// call.
  bool pulls = false;
  PullParams pull;
  /// Combine only: this node's items need no copy. The blocks for them make the sums of the node that the others send,
  /// if `sums_nodes`, and then add up tokens as sums arrive.
  NodeSumParams node_sums;
  bool sums_nodes = false;
  TokenSumParams token_sums;
  bool sums_tokens = false;
  int blocks_per_ring = 1;
  /// Most items of a chunk with the call's rows that this rank sends; 0: as exchange_chunk_bytes says. Every exchange
  /// of a call has it: the first one tells the rail peers, each of which may have another number.
  int chunk_items = 0;
  bool carries_rows = false;  ///< the items are the call's rows; others are in chunks as exchange_chunk_bytes says
  int num_own_blocks = 0;     ///< blocks that copy this node's items, or add up tokens

  FERRY_HOST_DEVICE int num_blocks() const { return 2 * (rails.num_nodes - 1) * blocks_per_ring + num_own_blocks; }
  FERRY_HOST_DEVICE bool may_stand_alone() const {
    return begins_call && routed != nullptr &&
           (record.operation == Operation::kDispatch || record.operation == Operation::kCombine);
  }
  /// Warps that make sums of the node; 0: none does.
  FERRY_HOST_DEVICE int num_sum_warps() const { return sums_nodes ? num_own_blocks * kExchangeWarps : 0; }
  FERRY_HOST_DEVICE bool takes_rows() const { return pulls && begins_call; }
  FERRY_HOST_DEVICE std::int64_t item_bytes() const { return row.bytes + (item_record.bytes + 15) / 16 * 16; }
};

cudaError_t launch_rail_exchange(const ExchangeParams& params, cudaStream_t stream);
cudaError_t load_rail_exchange_kernel();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTERNODE_EXCHANGE_PARAMS_HPP
