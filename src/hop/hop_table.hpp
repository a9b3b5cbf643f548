#ifndef FERRY_HOP_HOP_TABLE_HPP
#define FERRY_HOP_HOP_TABLE_HPP

/// Which tokens of one source rank go to one node, and which rows they take there. The source makes a table for every
/// node at route and sends it to its rail peer there; both keep it in their Routing. Dispatch and combine then carry
/// payload only: item i of a table is the i-th row on its way, out or back.
///
///     tokens       num_items x i32        source tokens, ascending
///     first_place  (num_items + 1) x i32  an item's places are [first_place[i], first_place[i + 1]), at least one
///     places       num_places x 8 bytes   ascending by (mate, row, topk) inside an item

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ferry/status.hpp"

namespace ferry::hop {

/// Entry `topk` of a token takes row `row` on the rank with index `mate` in the node.
struct HopPlace {
  std::int32_t row = 0;
  std::int16_t mate = 0;
  std::uint8_t topk = 0;
  std::uint8_t first = 0;  ///< 0: the place before this one in its item is the same row
};
static_assert(sizeof(HopPlace) == 8);

/// Known to every rank before the table itself.
struct HopTableSize {
  std::int32_t num_items = 0;
  std::int32_t num_places = 0;

  /// Bytes of the table on its way, a multiple of 16.
  std::size_t wire_bytes() const;
};

struct HopTable {
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> first_place = {0};
  std::vector<HopPlace> places;

  std::int64_t num_items() const { return static_cast<std::int64_t>(tokens.size()); }
  HopTableSize size() const {
    return {static_cast<std::int32_t>(tokens.size()), static_cast<std::int32_t>(places.size())};
  }
  /// Places of an item.
  std::span<const HopPlace> places_of(std::int64_t item) const {
    const auto begin = static_cast<std::size_t>(first_place[static_cast<std::size_t>(item)]);
    const auto end = static_cast<std::size_t>(first_place[static_cast<std::size_t>(item) + 1]);
    return {places.data() + begin, end - begin};
  }
};

/// Writes size().wire_bytes() bytes.
void encode(const HopTable& table, std::byte* to);

/// What a table may speak of.
struct HopTableLimits {
  std::int64_t num_tokens = 0;             ///< of the source
  std::int64_t num_topk = 0;               ///< K
  std::span<const std::int64_t> num_rows;  ///< used rows of each rank of the node
};

/// Takes any bytes. What it accepts keeps to the limits, so that nothing that follows the table leaves its bounds.
/// `bytes` are size.wire_bytes() of them.
/// @errors kTransport: says what is wrong where
Result<HopTable> parse_hop_table(std::span<const std::byte> bytes, const HopTableSize& size,
                                 const HopTableLimits& limits);

}  // namespace ferry::hop

#endif  // FERRY_HOP_HOP_TABLE_HPP
