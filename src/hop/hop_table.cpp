#include "hop/hop_table.hpp"

#include <fmt/format.h>

#include <cstring>
#include <tuple>

#include "plan/to_size.hpp"

namespace ferry::hop {
namespace {

constexpr std::size_t kGranuleBytes = 16;

/// Parts of a table on its way, one after the other without gaps.
struct Parts {
  std::size_t first_place_offset;
  std::size_t places_offset;
  std::size_t end;

  explicit Parts(const HopTableSize& size)
      : first_place_offset(to_size(size.num_items) * sizeof(std::int32_t)),
        places_offset(first_place_offset + (to_size(size.num_items) + 1) * sizeof(std::int32_t)),
        end(places_offset + to_size(size.num_places) * sizeof(HopPlace)) {}
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

Status wrong(std::string what) { return Status(ErrorCode::kTransport, "a table of hops is wrong: " + std::move(what)); }

Status check_items(const HopTable& table, const HopTableLimits& limits) {
  std::int64_t previous = -1;
  for (std::size_t item = 0; item < table.tokens.size(); ++item) {
    const std::int32_t token = table.tokens[item];
    if (token <= previous || token >= limits.num_tokens) {
      return wrong(fmt::format("item {} is token {} after token {}, expected ascending tokens below {}", item, token,
                               previous, limits.num_tokens));
    }
    previous = token;
    if (table.first_place[item + 1] <= table.first_place[item]) {
      return wrong(fmt::format("item {} has its places from {} to {}, expected at least one", item,
                               table.first_place[item], table.first_place[item + 1]));
    }
  }
  const auto num_places = static_cast<std::int32_t>(table.places.size());
  if (table.first_place.front() != 0 || table.first_place.back() != num_places) {
    return wrong(fmt::format("its items' places go from {} to {}, expected 0 to {}", table.first_place.front(),
                             table.first_place.back(), num_places));
  }
  return {};
}

Status check_places(HopTable& table, const HopTableLimits& limits) {
  for (std::size_t item = 0; item < table.tokens.size(); ++item) {
    const HopPlace* previous = nullptr;
    for (std::int32_t i = table.first_place[item]; i < table.first_place[item + 1]; ++i) {
      HopPlace& place = table.places[to_size(i)];
      const auto mate = static_cast<std::size_t>(place.mate);
      if (place.mate < 0 || mate >= limits.num_rows.size() || place.row < 0 || place.row >= limits.num_rows[mate] ||
          place.topk >= limits.num_topk) {
        return wrong(
            fmt::format("place {} is row {} of rank {} of the node for entry {}, expected one of {} ranks, a "
                        "row that it has, and an entry below {}",
                        i, place.row, place.mate, place.topk, limits.num_rows.size(), limits.num_topk));
      }
      const auto key = [](const HopPlace& p) { return std::tuple(p.mate, p.row, p.topk); };
      if (previous != nullptr && !(key(*previous) < key(place))) {
        return wrong(fmt::format("place {} is not in order", i));
      }
      place.first = previous == nullptr || previous->mate != place.mate || previous->row != place.row ? 1 : 0;
      previous = &place;
    }
  }
  return {};
}

}  // namespace

std::size_t HopTableSize::wire_bytes() const {
  return (Parts(*this).end + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes;
}

void encode(const HopTable& table, std::byte* to) {
  const Parts parts(table.size());
  copy_to(to, table.tokens);
  copy_to(to + parts.first_place_offset, table.first_place);
  copy_to(to + parts.places_offset, table.places);
  std::memset(to + parts.end, 0, table.size().wire_bytes() - parts.end);
}

Result<HopTable> parse_hop_table(std::span<const std::byte> bytes, const HopTableSize& size,
                                 const HopTableLimits& limits) {
  if (size.num_items < 0 || size.num_places < 0 || bytes.size() != size.wire_bytes()) {
    return wrong(fmt::format("{} bytes for {} items and {} places", bytes.size(), size.num_items, size.num_places));
  }
  const Parts parts(size);
  HopTable table;
  table.tokens = copy_from<std::int32_t>(bytes.data(), to_size(size.num_items));
  table.first_place = copy_from<std::int32_t>(bytes.data() + parts.first_place_offset, to_size(size.num_items) + 1);
  table.places = copy_from<HopPlace>(bytes.data() + parts.places_offset, to_size(size.num_places));
  if (Status status = check_items(table, limits); !status.ok()) return status;
  if (Status status = check_places(table, limits); !status.ok()) return status;
  return table;
}

}  // namespace ferry::hop
