#include "plan/forward_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "plan/to_size.hpp"

namespace ferry::plan {
namespace {

/// Alignment of an encoded table's size, like that of rows.
constexpr std::size_t kAlignmentBytes = 16;

/// Offsets of the parts of an encoded table, which follow each other without gaps.
struct Parts {
  std::size_t first_destination_offset;
  std::size_t destinations_offset;
  std::size_t end;

  explicit Parts(const ForwardTableSize& size)
      : first_destination_offset(to_size(size.num_items) * sizeof(std::int32_t)),
        destinations_offset(first_destination_offset + (to_size(size.num_items) + 1) * sizeof(std::int32_t)),
        end(destinations_offset + to_size(size.num_destinations) * sizeof(Destination)) {}
};

template <typename T>
void copy_to(std::byte* to, const std::vector<T>& from) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size() * sizeof(T));
}

template <typename T>
std::vector<T> copy_from(const std::byte* from, std::size_t count) {
  std::vector<T> values(count);
  if (count > 0) std::memcpy(values.data(), from, count * sizeof(T));
  return values;
}

Status wrong(std::string what) { return Status(ErrorCode::kTransport, std::move(what)); }

Status check_items(const ForwardTable& table, const ForwardTableLimits& limits) {
  std::int64_t previous = -1;
  for (std::size_t item = 0; item < table.tokens.size(); ++item) {
    const std::int32_t token = table.tokens[item];
    if (token <= previous || token >= limits.num_tokens) {
      return wrong(fmt::format("item {} is token {} after token {}, expected ascending tokens below {}", item, token,
                               previous, limits.num_tokens));
    }
    previous = token;
    if (table.first_destination[item + 1] <= table.first_destination[item]) {
      return wrong(fmt::format("item {} has destinations {} to {}, expected at least one", item,
                               table.first_destination[item], table.first_destination[item + 1]));
    }
  }
  const auto num_destinations = static_cast<std::int32_t>(table.destinations.size());
  if (table.first_destination.front() != 0 || table.first_destination.back() != num_destinations) {
    return wrong(fmt::format("the items' destinations go from {} to {}, expected 0 to {}",
                             table.first_destination.front(), table.first_destination.back(), num_destinations));
  }
  return {};
}

Status check_destinations(ForwardTable& table, const ForwardTableLimits& limits) {
  for (std::size_t item = 0; item < table.tokens.size(); ++item) {
    const Destination* previous = nullptr;
    for (std::int32_t i = table.first_destination[item]; i < table.first_destination[item + 1]; ++i) {
      Destination& destination = table.destinations[to_size(i)];
      const auto rank = static_cast<std::size_t>(destination.rank);
      if (destination.rank < 0 || rank >= limits.num_rows.size() || destination.row < 0 ||
          destination.row >= limits.num_rows[rank] || destination.topk >= limits.num_topk) {
        return wrong(fmt::format(
            "destination {} is row {} of rank {} of the node for entry {}, expected one of {} ranks, a "
            "row that it has, and an entry below {}",
            i, destination.row, destination.rank, destination.topk, limits.num_rows.size(), limits.num_topk));
      }
      const auto key = [](const Destination& d) { return std::tuple(d.rank, d.row, d.topk); };
      if (previous != nullptr && !(key(*previous) < key(destination))) {
        return wrong(fmt::format("destination {} is out of order, expected ascending (rank, row, entry)", i));
      }
      const bool first = previous == nullptr || previous->rank != destination.rank || previous->row != destination.row;
      destination.first = first ? 1 : 0;
      previous = &destination;
    }
  }
  return {};
}

}  // namespace

std::size_t ForwardTableSize::wire_bytes() const {
  return (Parts(*this).end + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
}

std::size_t forward_tables_bytes(std::size_t num_tables, const ForwardTableSum& sum) {
  // Two numbers per item and one more per table, then destinations, then padding.
  return to_size(sum.num_items) * 2 * sizeof(std::int32_t) + to_size(sum.num_destinations) * sizeof(Destination) +
         num_tables * (sizeof(std::int32_t) + kAlignmentBytes - 1);
}

void count_forward_tables(const RouteShape& shape, const Topology& topology, std::span<const std::int64_t> ids,
                          ForwardTableSize* sizes) {
  std::fill_n(sizes, topology.num_nodes(), ForwardTableSize());
  std::vector<std::int64_t> last_token(to_size(topology.num_nodes()), -1);
  for (std::size_t entry = 0; entry < ids.size(); ++entry) {
    if (ids[entry] < 0) continue;
    const auto node = to_size(topology.node_of(static_cast<int>(shape.owner(to_size(ids[entry])))));
    const auto token = static_cast<std::int64_t>(entry / shape.num_topk);
    sizes[node].num_items += last_token[node] != token ? 1 : 0;
    sizes[node].num_destinations += 1;
    last_token[node] = token;
  }
}

std::vector<ForwardTable> build_forward_tables(const TokenPlan& tokens, const Topology& topology) {
  std::vector<ForwardTable> tables(to_size(topology.num_nodes()));
  const auto num_tokens = static_cast<std::int32_t>(tokens.first_destination.size() - 1);
  for (std::int32_t token = 0; token < num_tokens; ++token) {
    const auto begin = to_size(tokens.first_destination[to_size(token)]);
    const auto end = to_size(tokens.first_destination[to_size(token) + 1]);
    for (std::size_t i = begin; i < end; ++i) {
      Destination destination = tokens.destinations[i];
      ForwardTable& table = tables[to_size(topology.node_of(destination.rank))];
      if (table.tokens.empty() || table.tokens.back() != token) {
        table.tokens.push_back(token);
        table.first_destination.push_back(table.first_destination.back());
      }
      destination.rank = static_cast<std::int16_t>(topology.rail_of(destination.rank));
      table.destinations.push_back(destination);
      ++table.first_destination.back();
    }
  }
  return tables;
}

void encode(const ForwardTable& table, std::byte* to) {
  const Parts parts(table.size());
  copy_to(to, table.tokens);
  copy_to(to + parts.first_destination_offset, table.first_destination);
  copy_to(to + parts.destinations_offset, table.destinations);
  std::memset(to + parts.end, 0, table.size().wire_bytes() - parts.end);
}

Result<ForwardTable> parse_forward_table(std::span<const std::byte> bytes, const ForwardTableSize& size,
                                         const ForwardTableLimits& limits) {
  if (size.num_items < 0 || size.num_destinations < 0 || bytes.size() != size.wire_bytes()) {
    return wrong(fmt::format("it has {} bytes, which do not fit {} items and {} destinations", bytes.size(),
                             size.num_items, size.num_destinations));
  }
  const Parts parts(size);
  ForwardTable table;
  table.tokens = copy_from<std::int32_t>(bytes.data(), to_size(size.num_items));
  table.first_destination =
      copy_from<std::int32_t>(bytes.data() + parts.first_destination_offset, to_size(size.num_items) + 1);
  table.destinations = copy_from<Destination>(bytes.data() + parts.destinations_offset, to_size(size.num_destinations));
  if (Status status = check_items(table, limits); !status.ok()) return status;
  if (Status status = check_destinations(table, limits); !status.ok()) return status;
  return table;
}

Status check_num_rows(const ForwardTable& table, std::span<const std::int64_t> num_rows) {
  std::vector<std::int64_t> found(num_rows.size(), 0);
  for (const Destination& destination : table.destinations) {
    found[static_cast<std::size_t>(destination.rank)] += destination.first;
  }
  const auto differ = std::mismatch(found.begin(), found.end(), num_rows.begin());
  if (differ.first == found.end()) return {};
  return Status(ErrorCode::kTransport,
                fmt::format("sent a forward table with {} rows for rank {} of the node, but counted {}", *differ.first,
                            differ.first - found.begin(), *differ.second));
}

Status enter_table(const ForwardTable& table, int source_rank, int local_rank, std::int64_t num_rows,
                   const RowSources& rows) {
  std::int64_t num_entered = 0;
  for (std::int64_t item = 0; item < table.num_items(); ++item) {
    for (const Destination& destination : table.destinations_of(item)) {
      if (destination.first == 0 || destination.rank != local_rank) continue;
      const std::int32_t token = table.tokens[to_size(item)];
      std::int32_t* const source = rows.source_table.data() + std::ptrdiff_t{destination.row} * 2;
      if (source[0] != source_rank || source[1] != -1) {
        return Status(ErrorCode::kTransport,
                      fmt::format("sent a forward table that gives token {} row {}, expected a row that its counts "
                                  "include and that has no token yet",
                                  token, destination.row));
      }
      source[1] = token;
      rows.item_of_row[to_size(destination.row)] = static_cast<std::int32_t>(item);
      ++num_entered;
    }
  }
  if (num_entered == num_rows) return {};
  return Status(ErrorCode::kTransport,
                fmt::format("sent a forward table with {} rows, but counted {}", num_entered, num_rows));
}

}  // namespace ferry::plan
