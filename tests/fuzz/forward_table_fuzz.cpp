/// Forward tables (plan/forward_table.hpp) from other nodes, which determine the rows that this node writes: an
/// accepted table is within the limits, and keeps its meaning when it is sent on.
///
/// Input: items (u8), destinations (u8), tokens (u8), K (u8), then rows of each of three ranks (3 x u8), then the
/// table.

#include <array>
#include <tuple>
#include <vector>

#include "fuzz_target.hpp"
#include "input_reader.hpp"
#include "plan/forward_table.hpp"

namespace ferry::test {
namespace {

using plan::Destination;
using plan::ForwardTable;

void check_accepted(const ForwardTable& table, const plan::ForwardTableLimits& limits) {
  std::int32_t previous_token = -1;
  std::size_t num_destinations = 0;
  for (std::int64_t item = 0; item < table.num_items(); ++item) {
    const std::int32_t token = table.tokens[static_cast<std::size_t>(item)];
    require(token > previous_token && token < limits.num_tokens, "tokens ascend and exist");
    previous_token = token;
    const std::span<const Destination> destinations = table.destinations_of(item);
    require(!destinations.empty(), "an item has a destination");
    num_destinations += destinations.size();
    const Destination* previous = nullptr;
    for (const Destination& destination : destinations) {
      const auto rank = static_cast<std::size_t>(destination.rank);
      require(destination.rank >= 0 && rank < limits.num_rows.size(), "a destination's rank belongs to the node");
      require(destination.row >= 0 && destination.row < limits.num_rows[rank], "a destination's row exists");
      require(destination.topk < limits.num_topk, "a destination's entry exists");
      const bool same_row =
          previous != nullptr && previous->rank == destination.rank && previous->row == destination.row;
      require((destination.first != 0) != same_row, "first says whether the row is new");
      require(previous == nullptr || std::tuple(previous->rank, previous->row, previous->topk) <
                                         std::tuple(destination.rank, destination.row, destination.topk),
              "destinations ascend");
      previous = &destination;
    }
  }
  require(num_destinations == table.destinations.size(), "every destination belongs to an item");
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  InputReader reader(input);
  const plan::ForwardTableSize size{reader.take<std::uint8_t>(), reader.take<std::uint8_t>()};
  const std::int64_t num_tokens = reader.take<std::uint8_t>();
  const std::int64_t num_topk = reader.take<std::uint8_t>();
  std::array<std::int64_t, 3> num_rows{};
  for (std::int64_t& rows : num_rows) rows = reader.take<std::uint8_t>();
  const plan::ForwardTableLimits limits{num_tokens, num_topk, num_rows};

  // Any other length than the right one is refused; the remaining input is then cut or filled to that length.
  const std::span<const std::byte> given = reader.take_at_most(input.size());
  std::vector<std::byte> bytes(given.begin(), given.end());
  const std::size_t wire_bytes = size.wire_bytes();
  if (bytes.size() != wire_bytes) {
    require_refusal(plan::parse_forward_table(bytes, size, limits).status(), ErrorCode::kTransport);
    bytes.resize(wire_bytes);
  }
  const Result<ForwardTable> table = plan::parse_forward_table(bytes, size, limits);
  if (!table.ok()) {
    require_refusal(table.status(), ErrorCode::kTransport);
    return;
  }
  check_accepted(*table, limits);
  require(table->size().num_items == size.num_items && table->size().num_destinations == size.num_destinations,
          "sizes are kept");
  std::vector<std::byte> again(wire_bytes);
  plan::encode(*table, again.data());
  const Result<ForwardTable> second = plan::parse_forward_table(again, size, limits);
  require(second.ok() && second->tokens == table->tokens && second->first_destination == table->first_destination,
          "an encoded table keeps its meaning");
  std::vector<std::byte> third(wire_bytes);
  plan::encode(*second, third.data());
  require(same_bytes(again, third), "a parsed table has one encoding");
}

}  // namespace ferry::test
