/// Tables of hops (hop/hop_table.hpp) come from other nodes and say where this one writes: what is accepted must keep
/// to the limits, and mean the same when it is sent on.
///
/// Input: items (u8), places (u8), tokens (u8), K (u8), then rows of each of three ranks (3 x u8), then the table.

#include <array>
#include <tuple>
#include <vector>

#include "fuzz_target.hpp"
#include "hop/hop_table.hpp"
#include "input_reader.hpp"

namespace ferry::test {
namespace {

using hop::HopPlace;
using hop::HopTable;

void check_accepted(const HopTable& table, const hop::HopTableLimits& limits) {
  std::int32_t previous_token = -1;
  std::size_t num_places = 0;
  for (std::int64_t item = 0; item < table.num_items(); ++item) {
    const std::int32_t token = table.tokens[static_cast<std::size_t>(item)];
    require(token > previous_token && token < limits.num_tokens, "tokens ascend and exist");
    previous_token = token;
    const std::span<const HopPlace> places = table.places_of(item);
    require(!places.empty(), "an item goes somewhere");
    num_places += places.size();
    const HopPlace* previous = nullptr;
    for (const HopPlace& place : places) {
      const auto mate = static_cast<std::size_t>(place.mate);
      require(place.mate >= 0 && mate < limits.num_rows.size(), "a place's rank is of the node");
      require(place.row >= 0 && place.row < limits.num_rows[mate], "a place's row exists");
      require(place.topk < limits.num_topk, "a place's entry exists");
      const bool same_row = previous != nullptr && previous->mate == place.mate && previous->row == place.row;
      require((place.first != 0) != same_row, "first says whether the row is new");
      require(previous == nullptr || std::tuple(previous->mate, previous->row, previous->topk) <
                                         std::tuple(place.mate, place.row, place.topk),
              "places ascend");
      previous = &place;
    }
  }
  require(num_places == table.places.size(), "every place belongs to an item");
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  InputReader reader(input);
  const hop::HopTableSize size{reader.take<std::uint8_t>(), reader.take<std::uint8_t>()};
  const std::int64_t num_tokens = reader.take<std::uint8_t>();
  const std::int64_t num_topk = reader.take<std::uint8_t>();
  std::array<std::int64_t, 3> num_rows{};
  for (std::int64_t& rows : num_rows) rows = reader.take<std::uint8_t>();
  const hop::HopTableLimits limits{num_tokens, num_topk, num_rows};

  // Any length is refused but the right one, which the rest is cut or filled to.
  const std::span<const std::byte> given = reader.take_at_most(input.size());
  std::vector<std::byte> bytes(given.begin(), given.end());
  const std::size_t wire_bytes = size.wire_bytes();
  if (bytes.size() != wire_bytes) {
    require_refusal(hop::parse_hop_table(bytes, size, limits).status(), ErrorCode::kTransport);
    bytes.resize(wire_bytes);
  }
  const Result<HopTable> table = hop::parse_hop_table(bytes, size, limits);
  if (!table.ok()) {
    require_refusal(table.status(), ErrorCode::kTransport);
    return;
  }
  check_accepted(*table, limits);
  require(table->size().num_items == size.num_items && table->size().num_places == size.num_places, "sizes are kept");
  std::vector<std::byte> again(wire_bytes);
  hop::encode(*table, again.data());
  const Result<HopTable> second = hop::parse_hop_table(again, size, limits);
  require(second.ok() && second->tokens == table->tokens && second->first_place == table->first_place,
          "what is encoded means the same");
  std::vector<std::byte> third(wire_bytes);
  hop::encode(*second, third.data());
  require(same_bytes(again, third), "a table that was parsed has one spelling");
}

}  // namespace ferry::test
