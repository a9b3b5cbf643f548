#ifndef FERRY_CUDA_PLACEMENT_PLACEMENT_TABLES_HPP
#define FERRY_CUDA_PLACEMENT_PLACEMENT_TABLES_HPP

/// Tables of an expert placement in device memory, as kernels see them.

#include <cstddef>
#include <cstdint>

#include "plan/carver.hpp"
#include "plan/replicas.hpp"

namespace ferry::cuda {

/// Result of a kernel's check of a placement in GPU memory.
struct HomesCheck {
  std::uint64_t hash;      ///< hash of the table; equal tables have equal hashes
  std::int64_t bad_entry;  ///< stands in headers for a bad id, see below; -1: the table is good
  std::int64_t bad_value;  ///< the wrong entry, or the expert without a home
};
/// Numbers above all entries of [T, K], which have 32 bits. The first stands for physical expert 0.
inline constexpr std::int64_t kFirstBadHome = std::int64_t{1} << 40;
inline constexpr std::int64_t kFirstMissingHome = std::int64_t{1} << 41;

/// Homes that this rank's tokens pick (plan/replicas.hpp), in device memory. Null: ids name the experts themselves.
struct HomeTables {
  const plan::HomeRange* ranges = nullptr;   ///< [E]
  const std::int32_t* homes = nullptr;       ///< [at most P]
  const std::int32_t* logical_of = nullptr;  ///< [P] logical expert of each physical expert; negative: none
  int num_logical = 0;                       ///< E
  const HomesCheck* check = nullptr;         ///< null: hosts have checked and compared the placement
};

/// The owner of each expert, in device memory.
struct PlacementTables {
  const std::int32_t* owner = nullptr;          ///< [E]
  const std::int32_t* local_expert = nullptr;   ///< [E] index among its owner's experts
  const std::int32_t* by_owner = nullptr;       ///< [E] experts in order of (owner, id)
  const std::int32_t* first_of_rank = nullptr;  ///< [R + 1] where a rank's experts begin in `by_owner`
  HomeTables homes;
};

/// An expert placement in device memory.
struct PlacementParts {
  std::int32_t* owner = nullptr;          ///< [E]
  std::int32_t* local_expert = nullptr;   ///< [E] index among its owner's experts
  std::int32_t* by_owner = nullptr;       ///< [E] experts in order of (owner, id)
  std::int32_t* first_of_rank = nullptr;  ///< [R + 1] where a rank's experts begin in `by_owner`
  plan::HomeRange* ranges = nullptr;      ///< [logical experts] table of a placement with replicas, as are the next two
  std::int32_t* homes = nullptr;          ///< [E] at most
  std::int32_t* logical_of = nullptr;     ///< [E]
  std::size_t size_bytes = 0;

  /// `num_logical` is 0 if each expert is its only home.
  static constexpr PlacementParts at(std::byte* base, std::size_t num_experts, std::size_t num_ranks,
                                     std::size_t num_logical = 0) {
    plan::Carver carver(base);
    PlacementParts parts;
    parts.owner = carver.take<std::int32_t>(num_experts);
    parts.local_expert = carver.take<std::int32_t>(num_experts);
    parts.by_owner = carver.take<std::int32_t>(num_experts);
    parts.first_of_rank = carver.take<std::int32_t>(num_ranks + 1);
    if (num_logical > 0) {
      parts.ranges = carver.take<plan::HomeRange>(num_logical);
      parts.homes = carver.take<std::int32_t>(num_experts);
      parts.logical_of = carver.take<std::int32_t>(num_experts);
    }
    parts.size_bytes = carver.used_bytes();
    return parts;
  }
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_PLACEMENT_PLACEMENT_TABLES_HPP
