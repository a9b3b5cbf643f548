#include "core/placement_digest.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "plan/slots.hpp"

namespace ferry {
namespace {

/// FNV-1a (Fowler, Noll, Vo; 64-bit offset basis and prime).
std::uint64_t hash_owners(std::span<const std::int32_t> owners) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (std::int32_t owner : owners) {
    hash ^= static_cast<std::uint64_t>(static_cast<std::uint32_t>(owner));
    hash *= 1099511628211ULL;
  }
  return hash;
}

/// Number of experts in a range; the last range may have fewer.
std::int64_t range_size(std::int64_t num_experts) { return (num_experts + kNumDigestRanges - 1) / kNumDigestRanges; }

template <typename T>
void store(std::span<char> digest, std::size_t* length, T value) {
  std::memcpy(digest.subspan(*length, sizeof(value)).data(), &value, sizeof(value));
  *length += sizeof(value);
}

template <typename T>
T load(std::span<const char> digest, std::int64_t idx) {
  T value;
  std::memcpy(&value, digest.subspan(static_cast<std::size_t>(idx) * sizeof(value), sizeof(value)).data(),
              sizeof(value));
  return value;
}

/// The first entry that differs; -1 if there is none, or a digest does not have `count` entries.
template <typename T>
std::int64_t first_difference(std::span<const char> a, std::span<const char> b, std::int64_t count) {
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
  if (a.size() != bytes || b.size() != bytes) return -1;
  for (std::int64_t i = 0; i < count; ++i) {
    if (load<T>(a, i) != load<T>(b, i)) return i;
  }
  return -1;
}

}  // namespace

std::int64_t hash_placement(const std::vector<std::int32_t>& expert_to_rank) {
  return static_cast<std::int64_t>(hash_owners(expert_to_rank));
}

std::size_t write_placement_digest(const std::vector<std::int32_t>& expert_to_rank,
                                   std::span<char, kPlacementDigestBytes> digest) {
  std::size_t length = 0;
  const auto num_experts = static_cast<std::int64_t>(expert_to_rank.size());
  if (num_experts <= kMaxListedExperts) {
    for (std::int32_t owner : expert_to_rank) store(digest, &length, static_cast<std::int16_t>(owner));
    return length;
  }
  const auto size = static_cast<std::size_t>(range_size(num_experts));
  const std::span<const std::int32_t> all(expert_to_rank);
  for (std::size_t begin = 0; begin < all.size(); begin += size) {
    const std::uint64_t hash = hash_owners(all.subspan(begin, std::min(size, all.size() - begin)));
    store(digest, &length, static_cast<std::uint32_t>(hash ^ (hash >> 32)));
  }
  return length;
}

std::string describe_placement_difference(std::span<const char> first, std::span<const char> other,
                                          std::size_t other_rank, std::int64_t num_experts) {
  if (num_experts >= 1 && num_experts <= kMaxListedExperts) {
    const std::int64_t expert = first_difference<std::int16_t>(first, other, num_experts);
    if (expert >= 0) {
      return fmt::format("expert_to_rank[{}]: rank 0 has {}, rank {} has {}", expert, load<std::int16_t>(first, expert),
                         other_rank, load<std::int16_t>(other, expert));
    }
  } else if (num_experts > kMaxListedExperts && num_experts <= std::numeric_limits<std::int32_t>::max()) {
    const std::int64_t size = range_size(num_experts);
    const std::int64_t num_ranges = (num_experts + size - 1) / size;
    const std::int64_t range = first_difference<std::uint32_t>(first, other, num_ranges);
    if (range >= 0) {
      return fmt::format("expert_to_rank: the maps of rank 0 and rank {} first differ at an expert from {} to {}",
                         other_rank, range * size, std::min(num_experts, (range + 1) * size) - 1);
    }
  }
  return fmt::format("expert_to_rank: rank 0 and rank {} have different maps", other_rank);
}

namespace {

/// Contents of the digest of a `Placement` behind its header.
enum class HomesForm : std::int16_t {
  kLogical = 0,  ///< physical_to_logical; the ranks are the default ranks
  kBoth = 1,     ///< physical_to_logical, then physical_to_rank
  kHashes = 2,   ///< a hash of both for each of kNumHomeRanges equal ranges
};
struct HomesHeader {
  HomesForm form;
  std::int16_t num_ranks;
};
constexpr std::int64_t kHomesBytes = kPlacementDigestBytes - sizeof(HomesHeader);
constexpr std::int64_t kMaxListedHomes = kHomesBytes / sizeof(std::int16_t);
constexpr std::int64_t kNumHomeRanges = kHomesBytes / sizeof(std::uint32_t);

std::int64_t home_range_size(std::int64_t num_physical) { return (num_physical + kNumHomeRanges - 1) / kNumHomeRanges; }

/// Hash of `count` physical experts from `begin` on.
std::uint64_t hash_range(const HomeMaps& maps, std::size_t begin, std::size_t count) {
  const std::size_t from_logical = std::min(begin, maps.physical_to_logical.size());
  const std::size_t num_logical = std::min(count, maps.physical_to_logical.size() - from_logical);
  // A hash of each map, so that neither can hide a difference in the other.
  return hash_owners(maps.physical_to_logical.subspan(from_logical, num_logical)) * 3 +
         hash_owners(maps.physical_to_rank.subspan(begin, count));
}

/// A digest, decoded. It may be any bytes.
struct Homes {
  HomesHeader header{};
  std::span<const char> content{};

  explicit Homes(std::span<const char> digest) {
    if (digest.size() < sizeof(header)) return;
    std::memcpy(&header, digest.data(), sizeof(header));
    content = digest.subspan(sizeof(header));
  }
  bool lists(std::int64_t num_physical) const {
    if (num_physical < 1 || num_physical > kMaxListedHomes || header.num_ranks < 1) return false;
    const std::int64_t num_maps = header.form == HomesForm::kBoth ? 2 : header.form == HomesForm::kLogical ? 1 : 0;
    return num_maps > 0 && content.size() == static_cast<std::size_t>(num_maps * num_physical) * sizeof(std::int16_t);
  }
  std::int64_t logical(std::int64_t physical) const { return load<std::int16_t>(content, physical); }
  std::int64_t owner(std::int64_t physical, std::int64_t num_physical) const {
    return header.form == HomesForm::kBoth ? load<std::int16_t>(content, num_physical + physical)
                                           : plan::default_owner(physical, num_physical, header.num_ranks);
  }
};

}  // namespace

std::int64_t hash_homes(const HomeMaps& maps) {
  return static_cast<std::int64_t>(hash_range(maps, 0, maps.physical_to_rank.size()));
}

std::size_t write_homes_digest(const HomeMaps& maps, std::span<char, kPlacementDigestBytes> digest) {
  const auto num_physical = static_cast<std::int64_t>(maps.physical_to_rank.size());
  bool by_default = true;
  for (std::int64_t physical = 0; physical < num_physical; ++physical) {
    by_default = by_default && maps.physical_to_rank[static_cast<std::size_t>(physical)] ==
                                   plan::default_owner(physical, num_physical, maps.num_ranks);
  }
  const HomesForm listed = by_default ? HomesForm::kLogical : HomesForm::kBoth;
  const bool fits = num_physical * (by_default ? 1 : 2) <= kMaxListedHomes;
  std::size_t length = 0;
  store(digest, &length, HomesHeader{fits ? listed : HomesForm::kHashes, static_cast<std::int16_t>(maps.num_ranks)});
  if (!fits) {
    const auto size = static_cast<std::size_t>(home_range_size(num_physical));
    for (std::size_t begin = 0; begin < maps.physical_to_rank.size(); begin += size) {
      const std::uint64_t hash = hash_range(maps, begin, std::min(size, maps.physical_to_rank.size() - begin));
      store(digest, &length, static_cast<std::uint32_t>(hash ^ (hash >> 32)));
    }
    return length;
  }
  for (std::size_t physical = 0; physical < maps.physical_to_rank.size(); ++physical) {
    const std::int32_t logical = maps.physical_to_logical.empty() ? -1 : maps.physical_to_logical[physical];
    store(digest, &length, static_cast<std::int16_t>(logical));
  }
  if (by_default) return length;
  for (const std::int32_t rank : maps.physical_to_rank) store(digest, &length, static_cast<std::int16_t>(rank));
  return length;
}

std::string describe_homes_difference(std::span<const char> first, std::span<const char> other, std::size_t other_rank,
                                      std::int64_t num_physical) {
  const Homes one(first);
  const Homes two(other);
  const auto name = [other_rank](std::string_view map, std::int64_t at, std::int64_t mine, std::int64_t theirs) {
    return fmt::format("{}[{}]: rank 0 has {}, rank {} has {}", map, at, mine, other_rank, theirs);
  };
  if (one.lists(num_physical) && two.lists(num_physical)) {
    for (std::int64_t at = 0; at < num_physical; ++at) {
      if (one.logical(at) != two.logical(at)) {
        return name("physical_to_logical", at, one.logical(at), two.logical(at));
      }
      const std::int64_t mine = one.owner(at, num_physical);
      const std::int64_t theirs = two.owner(at, num_physical);
      if (mine != theirs) return name("physical_to_rank", at, mine, theirs);
    }
  } else if (one.header.form == HomesForm::kHashes && two.header.form == HomesForm::kHashes && num_physical > 0 &&
             num_physical <= std::numeric_limits<std::int32_t>::max()) {
    const std::int64_t size = home_range_size(num_physical);
    const std::int64_t range =
        first_difference<std::uint32_t>(one.content, two.content, (num_physical + size - 1) / size);
    if (range >= 0) {
      return fmt::format(
          "placement: the placements of rank 0 and rank {} first differ at a physical expert from {} to {}", other_rank,
          range * size, std::min(num_physical, (range + 1) * size) - 1);
    }
  }
  return fmt::format("placement: rank 0 and rank {} have different placements", other_rank);
}

}  // namespace ferry
