#ifndef FERRY_CPU_NODES_PEER_TABLES_HPP
#define FERRY_CPU_NODES_PEER_TABLES_HPP

/// What route over several nodes is told by other ranks, and what of it can be true: counts first, then tables of hops,
/// which must say of each row what the counts have promised. Nothing here waits or knows where the bytes come from.

#include <cstddef>
#include <cstdint>
#include <span>

#include "ferry/group.hpp"
#include "ferry/status.hpp"
#include "hop/hop_table.hpp"

namespace ferry::cpu::nodes {

/// One rank's counts, as they travel: a whole number of granules.
struct Counts {
  std::int32_t* rank_counts = nullptr;    ///< [R]
  std::int32_t* expert_counts = nullptr;  ///< [E]
  hop::HopTableSize* tables = nullptr;    ///< [nodes]
  std::size_t wire_bytes = 0;

  /// Pointers into `base`, which is aligned to a granule; with a null base only the size.
  static Counts at(std::byte* base, const Topology& topology, std::int64_t num_experts);
};

/// Are a rank's counts such as its `num_entries` = T * K entries can have? Then no sum over them leaves i32.
/// @errors kTransport, in words that follow "rank 3 …", here and below
Status check_counts(const Counts& counts, const Topology& topology, std::int64_t num_experts, std::int64_t num_topk,
                    std::int64_t num_entries);

/// Does a table give each rank of the node, by its index there, as many rows as were counted?
Status check_num_rows(const hop::HopTable& table, std::span<const std::int64_t> num_rows);

/// Rows of one rank of the node, and who is to fill them.
struct RowSources {
  /// [rows, 2] source rank, which counts have told, and source token, -1 until a table tells it; both -1 in rows
  /// without a token.
  std::span<std::int32_t> source_table;
  std::span<std::int32_t> item_of_row;  ///< [rows]
};

/// Enters what a rank's table says of the rows of `mate`. The table keeps to limits by which those rows exist. All
/// `num_rows` rows that are the rank's have a token afterwards, and no others were touched.
Status enter_table(const hop::HopTable& table, int source_rank, int mate, std::int64_t num_rows,
                   const RowSources& rows);

}  // namespace ferry::cpu::nodes

#endif  // FERRY_CPU_NODES_PEER_TABLES_HPP
