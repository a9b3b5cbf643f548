#ifndef FERRY_PLAN_FORWARD_TABLE_HPP
#define FERRY_PLAN_FORWARD_TABLE_HPP

/// Forward table: the tokens of one source rank that go to one node, and their rows there. At route the source makes a
/// table for every node and sends it to its rail peer there; both keep it in their Routing. Dispatch and combine then
/// send only payload: item i of a table is the i-th row sent in either direction.
///
///     tokens             num_items x i32               source tokens, ascending
///     first_destination  (num_items + 1) x i32         item i has destinations [first_destination[i],
///                                                      first_destination[i + 1]), at least one
///     destinations       num_destinations x 8 bytes    ascending by (rank in the node, row, topk) inside an item

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ferry/group.hpp"
#include "ferry/status.hpp"
#include "plan/destination.hpp"
#include "plan/route_plan.hpp"

namespace ferry::plan {

/// Size of a table, known to every rank before the table itself.
struct ForwardTableSize {
  std::int32_t num_items = 0;
  std::int32_t num_destinations = 0;

  /// Bytes of the encoded table, a multiple of 16.
  std::size_t wire_bytes() const;
};

/// Sizes of several tables.
struct ForwardTableSum {
  std::int64_t num_items = 0;
  std::int64_t num_destinations = 0;
};

/// Room for the encoded tables of `num_tables` sources next to each other, with sizes that add up to `sum`. Slightly
/// more than they take, since the padding of each depends on its own size.
std::size_t forward_tables_bytes(std::size_t num_tables, const ForwardTableSum& sum);

struct ForwardTable {
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> first_destination = {0};
  std::vector<Destination> destinations;

  std::int64_t num_items() const { return static_cast<std::int64_t>(tokens.size()); }
  ForwardTableSize size() const {
    return {static_cast<std::int32_t>(tokens.size()), static_cast<std::int32_t>(destinations.size())};
  }
  /// Destinations of an item.
  std::span<const Destination> destinations_of(std::int64_t item) const {
    const auto begin = static_cast<std::size_t>(first_destination[static_cast<std::size_t>(item)]);
    const auto end = static_cast<std::size_t>(first_destination[static_cast<std::size_t>(item) + 1]);
    return {destinations.data() + begin, end - begin};
  }
};

/// Sizes of the tables of one rank's tokens, by node: `sizes` [nodes]. Needs no rows, only which ranks own the experts.
void count_forward_tables(const RouteShape& shape, const Topology& topology, std::span<const std::int64_t> ids,
                          ForwardTableSize* sizes);

/// Tables of one rank's tokens, by node.
std::vector<ForwardTable> build_forward_tables(const TokenPlan& tokens, const Topology& topology);

/// Writes size().wire_bytes() bytes.
void encode(const ForwardTable& table, std::byte* to);

/// Bounds on the contents of a table.
struct ForwardTableLimits {
  std::int64_t num_tokens = 0;             ///< tokens of the source
  std::int64_t num_topk = 0;               ///< K
  std::span<const std::int64_t> num_rows;  ///< used rows of each rank of the node
};

/// Accepts any bytes, `size.wire_bytes()` of them. A returned table is within the limits, so code that uses it stays in
/// bounds.
/// @errors kTransport; the message completes "rank 3 sent an invalid forward table: …", in the functions below
///         "rank 3 …"
Result<ForwardTable> parse_forward_table(std::span<const std::byte> bytes, const ForwardTableSize& size,
                                         const ForwardTableLimits& limits);

/// Checks that the table's number of rows for each rank of the node, by its index there, equals `num_rows`.
Status check_num_rows(const ForwardTable& table, std::span<const std::int64_t> num_rows);

/// Rows of one rank of the node, and the items that fill them.
struct RowSources {
  /// [rows, 2] source rank, known from the counts, and source token, -1 until a table names it; both -1 in rows without
  /// a token.
  std::span<std::int32_t> source_table;
  std::span<std::int32_t> item_of_row;  ///< [rows]
};

/// Enters the rows that a source's table gives to `local_rank`. The table was checked against limits within which those
/// rows exist. On success all `num_rows` rows of that source have a token, and no other row was changed.
Status enter_table(const ForwardTable& table, int source_rank, int local_rank, std::int64_t num_rows,
                   const RowSources& rows);

}  // namespace ferry::plan

#endif  // FERRY_PLAN_FORWARD_TABLE_HPP
