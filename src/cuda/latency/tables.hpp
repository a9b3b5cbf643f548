#ifndef FERRY_CUDA_LATENCY_TABLES_HPP
#define FERRY_CUDA_LATENCY_TABLES_HPP

/// A Routing of latency mode in device memory: sizes and pointers. The dispatch's send half writes the tables of this
/// rank's tokens, the receive half all others.

#include <cstddef>
#include <cstdint>

#include "cuda/call/routing_tables.hpp"
#include "cuda/sync/report.hpp"
#include "ferry/latency.hpp"
#include "plan/carver.hpp"
#include "plan/host_device.hpp"

namespace ferry::cuda {

/// State that a send half leaves for its receive half.
struct alignas(16) SentCall {
  std::uint64_t number;    ///< number of the call
  std::uint32_t set;       ///< set in which this rank receives the call
  std::uint32_t pending;   ///< 1: sent and not received
  std::uint32_t arrivals;  ///< blocks of the receive half that are done
};

/// Replaces the home of an entry whose rank has been masked since. Its own inverse. Less than -1.
FERRY_HOST_DEVICE constexpr std::int32_t lost_home(std::int32_t home) { return -2 - home; }

/// Where combines of one order return rows between nodes (far_send.cuh). Rows from one rank to another lie one after
/// the other, from a first place in a set of returns that their receiver chooses.
struct FarReturns {
  std::int32_t* own_places = nullptr;  ///< [T, K] place of the entry's row among those that its rank returns
  std::int32_t* own_firsts = nullptr;  ///< [R] place of the first row that each rank returns
  std::int32_t* places = nullptr;    ///< [R, M] the token's first place among the rows that are returned to its source
  std::int32_t* firsts = nullptr;    ///< [R] own_firsts of this rank on each source
  std::int32_t* num_rows = nullptr;  ///< [R] rows that are returned to each source

  static constexpr FarReturns take(plan::Carver& carver, std::size_t num_entries, std::size_t num_ranks,
                                   std::size_t max_tokens) {
    FarReturns returns;
    returns.own_places = carver.take<std::int32_t>(num_entries);
    returns.own_firsts = carver.take<std::int32_t>(num_ranks);
    returns.places = carver.take<std::int32_t>(num_ranks * max_tokens);
    returns.firsts = carver.take<std::int32_t>(num_ranks);
    returns.num_rows = carver.take<std::int32_t>(num_ranks);
    return returns;
  }
};

struct LatencyTables {
  struct Shape {
    std::size_t num_ranks = 0;
    std::size_t num_tokens = 0;  ///< T
    std::size_t max_tokens = 0;  ///< M
    std::size_t num_topk = 0;
    std::size_t num_local_experts = 0;
    std::size_t num_slab_rows = 0;  ///< L * C
    bool weights = false;
    bool far = false;  ///< the group has several nodes
  };

  RouteSummary* summary = nullptr;
  SentCall* dispatch = nullptr;
  SentCall* combine = nullptr;
  // Tables of this rank's tokens, by the send half:
  std::int64_t* ids = nullptr;  ///< [T, K]
  float* weights = nullptr;     ///< [T, K], null if the dispatch was given none
  /// [T, K] home_of the entry (call/routing_tables.hpp), -1: no expert, or lost_home.
  std::int32_t* homes = nullptr;
  /// [T, K] row in the slab of the entry's rank, -1: none. Rows are written by the receive half
  std::int32_t* slots = nullptr;
  // Tables of the rows here, by the receive half:
  std::int32_t* rows_per_expert = nullptr;  ///< [L]
  std::int64_t* row_offsets = nullptr;      ///< [L + 1] multiples of C
  std::int32_t* source_ranges = nullptr;    ///< [L, R, 2] number of rows, first row
  std::int32_t* source = nullptr;           ///< [L * C, 2]
  std::int32_t* tokens_of_rank = nullptr;   ///< [R] T of each
  std::int32_t* most_tokens = nullptr;      ///< the largest T
  // What combine sends back, by the receive half. Entries of one token for one expert have the same row.
  std::int32_t* items = nullptr;          ///< [R, M, K] row in this rank's slab; -1: the entry is none of this rank's
  float* item_weights = nullptr;          ///< [R, M, K], null if the dispatch was given none; valid where items is >= 0
  std::int32_t* rank_ordinals = nullptr;  ///< [R, M] how many ranks below this one the token goes to; -1: not here
  // Only in groups of several nodes, by the far kernels:
  FarReturns rows_back;  ///< kExact: a row for each distinct expert of a token
  FarReturns sums_back;  ///< kRankSums: a row for each token
  std::size_t size_bytes = 0;

  static constexpr LatencyTables at(std::byte* base, const Shape& shape) {
    const std::size_t num_entries = shape.num_tokens * shape.num_topk;
    const std::size_t num_items = shape.num_ranks * shape.max_tokens * shape.num_topk;
    plan::Carver carver(base);
    LatencyTables tables;
    tables.summary = carver.take<RouteSummary>(1);
    tables.dispatch = carver.take<SentCall>(1);
    tables.combine = carver.take<SentCall>(1);
    tables.ids = carver.take<std::int64_t>(num_entries);
    if (shape.weights) tables.weights = carver.take<float>(num_entries);
    tables.homes = carver.take<std::int32_t>(num_entries);
    tables.slots = carver.take<std::int32_t>(num_entries);
    tables.rows_per_expert = carver.take<std::int32_t>(shape.num_local_experts);
    tables.row_offsets = carver.take<std::int64_t>(shape.num_local_experts + 1);
    tables.source_ranges = carver.take<std::int32_t>(shape.num_local_experts * shape.num_ranks * 2);
    tables.source = carver.take<std::int32_t>(shape.num_slab_rows * 2);
    tables.tokens_of_rank = carver.take<std::int32_t>(shape.num_ranks);
    tables.most_tokens = carver.take<std::int32_t>(1);
    tables.items = carver.take<std::int32_t>(num_items);
    if (shape.weights) tables.item_weights = carver.take<float>(num_items);
    tables.rank_ordinals = carver.take<std::int32_t>(shape.num_ranks * shape.max_tokens);
    if (shape.far) {
      tables.rows_back = FarReturns::take(carver, num_entries, shape.num_ranks, shape.max_tokens);
      tables.sums_back = FarReturns::take(carver, num_entries, shape.num_ranks, shape.max_tokens);
    }
    tables.size_bytes = carver.used_bytes();
    return tables;
  }

  FERRY_HOST_DEVICE constexpr const FarReturns& far_returns(CombineOrder order) const {
    return order == CombineOrder::kRankSums ? sums_back : rows_back;
  }
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_TABLES_HPP
