#include "core/placement_digest.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>

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

/// Experts of a range; the last range may have fewer.
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

/// The first entry that differs; -1 if there is none, or the digests are not of `count` entries.
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

}  // namespace ferry
