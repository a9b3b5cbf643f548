#ifndef FERRY_CUDA_INTERNODE_EXCHANGE_PARAMS_HPP
#define FERRY_CUDA_INTERNODE_EXCHANGE_PARAMS_HPP

/// The exchange kernel: what a rank and its rail peers send each other in one step of a call. An item is a part of a
/// row table and a part of a record table, sent side by side; it comes out of the sender's tables and goes into the
/// receiver's, at positions that both know from route. Items for this rank's own node are copied in between.
///
/// The first exchange of a call begins with a call header to every rail peer and an entry to every rank of the node, so
/// that all ranks of the group find the same outcome before anything moves.

#include <cuda_runtime_api.h>

#include <array>

#include "cuda/internode/dispatch_params.hpp"
#include "cuda/sync/rail_params.hpp"
#include "cuda/sync/rank_params.hpp"

namespace ferry::cuda {

/// Items that go to one node, and come from it: positions in the tables. The own node's go from `first_out` to
/// `first_in`.
struct ItemFlow {
  std::int32_t first_out = 0;
  std::int32_t num_out = 0;
  std::int32_t first_in = 0;
  std::int32_t num_in = 0;
};

/// Equal parts of items, on both ends.
struct ItemPart {
  const std::byte* from = nullptr;
  std::int64_t from_stride = 0;
  std::byte* to = nullptr;
  std::int64_t to_stride = 0;
  std::int64_t bytes = 0;  ///< of an item: a multiple of 16 in rows, of 4 in records
};

struct ExchangeParams {
  RankParams ranks;
  RailParams rails;
  /// For waits for rail peers; less than that for ranks of the node, which may be waiting for rail peers themselves.
  /// The rail peers of a rank that does not come are then the first to give up, and blame that rank.
  std::uint64_t rail_timeout_ns = 0;
  /// Of the call, in its first exchange.
  bool begins_call = false;
  std::uint64_t agreement = 0;  ///< 0: this rank refuses the call
  std::int64_t record_number = 0;
  CallRecord record;
  FoundRecord* found = nullptr;  ///< [ranks of the node, nodes] and whose records differ
  FaultReport* fault = nullptr;  ///< where a call that is refused is reported
  /// Of the Routing that the call uses: of one that was refused, as it then is on all ranks, nothing moves. A dispatch
  /// or combine of throughput mode then takes no part in anything, since ranks that know make none. Null: it cannot
  /// be, or there is none.
  const RouteSummary* routed = nullptr;
  std::uint64_t* result = nullptr;   ///< pinned: the Outcome + 1, for a host that waits for it; or null
  std::uint64_t* started = nullptr;  ///< pinned: 1 as soon as the kernel runs; or null

  const ItemFlow* flows = nullptr;  ///< [nodes]; null: no items
  const std::int32_t* items =
      nullptr;  ///< position of each outgoing item in the tables it is taken from; null: its own
  ItemPart row;
  ItemPart item_record;
  /// Of a dispatch: the ranks of the node take their rows out of staging as they arrive, if this begins the call.
  bool pulls = false;
  PullParams pull;
  /// Warps of the kernel before, a combine's sums, beside which this one runs and sends what they have made
  /// (sum_turns.cuh); 0: it begins after that kernel.
  int num_sum_warps = 0;
  int blocks_per_ring = 1;
  int num_own_blocks = 0;  ///< blocks that copy the own node's items

  FERRY_HOST_DEVICE int num_blocks() const { return 2 * (rails.num_nodes - 1) * blocks_per_ring + num_own_blocks; }
  FERRY_HOST_DEVICE bool may_stand_alone() const {
    return begins_call && routed != nullptr &&
           (record.operation == Operation::kDispatch || record.operation == Operation::kCombine);
  }
  FERRY_HOST_DEVICE bool takes_rows() const { return pulls && begins_call; }
  FERRY_HOST_DEVICE std::int64_t item_bytes() const { return row.bytes + (item_record.bytes + 15) / 16 * 16; }
};

cudaError_t launch_rail_exchange(const ExchangeParams& params, cudaStream_t stream);
cudaError_t load_rail_exchange_kernel();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTERNODE_EXCHANGE_PARAMS_HPP
