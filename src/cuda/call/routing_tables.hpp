#ifndef FERRY_CUDA_CALL_ROUTING_TABLES_HPP
#define FERRY_CUDA_CALL_ROUTING_TABLES_HPP

/// A Routing's tables in device memory: sizes and pointers.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/sync/report.hpp"
#include "plan/carver.hpp"
#include "plan/count_columns.hpp"
#include "plan/host_device.hpp"

namespace ferry::cuda {

/// Destination of one entry of a token. A token's destinations ascend by (rank, row, topk) and fill the first of its K
/// places.
struct alignas(16) Destination {
  std::int32_t row;           ///< in the receiver's output
  std::int32_t token_row;     ///< index among the receiver's distinct (source, token) pairs, in that order
  std::int16_t rank;          ///< -1: no destination, here and in the following places
  std::uint8_t topk;          ///< valid also without a destination
  std::uint8_t flags;         ///< kFirstOfRow, kFirstOfRank
  std::int32_t local_expert;  ///< index among the rank's experts
};
static_assert(sizeof(Destination) == 16, "one 16-byte load");
inline constexpr std::uint8_t kFirstOfRow = 1;   ///< the destination before this one is another row
inline constexpr std::uint8_t kFirstOfRank = 2;  ///< the destination before this one is on another rank

/// Destination of one entry, packed into one word: -1, or rank << kHomeExpertBits | index among the rank's experts.
inline constexpr int kHomeExpertBits = 16;
FERRY_HOST_DEVICE constexpr std::int32_t home_of(int rank, int local_expert) {
  return rank << kHomeExpertBits | local_expert;
}
FERRY_HOST_DEVICE constexpr int home_rank(std::int32_t home) { return home >> kHomeExpertBits; }
FERRY_HOST_DEVICE constexpr int home_expert(std::int32_t home) { return home & ((1 << kHomeExpertBits) - 1); }

/// Result of a counting block's check of its ids.
struct alignas(16) BlockMarks {
  std::uint64_t bad_entry;     ///< first index in [T, K] whose id is no expert; kNoEntry: all ids are valid
  std::uint32_t repeats;       ///< 1: some token names an expert twice
  std::uint32_t num_homeless;  ///< entries whose expert has no home
};
inline constexpr std::uint64_t kNoEntry = UINT64_MAX;

/// Parts of the tokens that route counts separately, one thread block for each.
struct RouteBlocks {
  int tokens_per_block = 0;
  int num_blocks = 0;

  static constexpr RouteBlocks of(std::int64_t num_tokens) {
    // Enough blocks to hide latencies for T = 4096, and an upper bound for large T, so that the one block that adds
    // them up stays fast. A multiple of the number of warps in a block.
    constexpr std::int64_t kTokensUnit = 64;
    constexpr std::int64_t kMaxBlocks = 128;
    const std::int64_t least = (num_tokens + kMaxBlocks - 1) / kMaxBlocks;
    const std::int64_t per_block =
        least <= kTokensUnit ? kTokensUnit : (least + kTokensUnit - 1) / kTokensUnit * kTokensUnit;
    const std::int64_t num_blocks = num_tokens == 0 ? 1 : (num_tokens + per_block - 1) / per_block;
    return {static_cast<int>(per_block), static_cast<int>(num_blocks)};
  }
};

/// Bytes of a Routing's source table of `num_rows` rows; at least 1, since the table always exists.
constexpr std::size_t source_bytes(std::int64_t num_rows) {
  return num_rows == 0 ? 1 : static_cast<std::size_t>(num_rows) * 2 * sizeof(std::int32_t);
}

/// Size of an exact route's source table, which is allocated before the route's rows are known, so that peers can write
/// there as soon as their own rows are known. Rows are cheap here (8 bytes, thousands in an output); too few rows cost
/// one more exchange.
struct SourceGuess {
  std::int64_t num_ranks = 1;
  std::int64_t num_tokens = 0;
  std::int64_t num_topk = 0;
  std::int64_t num_local_experts = 0;
  std::int64_t expert_alignment = 1;
  bool by_token = true;
  std::int64_t known_rows = 0;  ///< rows of a previous exact route

  constexpr std::int64_t num_rows() const {
    // Room for twice the rows of evenly spread ids, and for slightly more than the previous rows.
    constexpr std::int64_t kTimesEven = 2;
    constexpr std::int64_t kSpareShare = 8;
    const std::int64_t rows_of_token = by_token ? 1 : std::min(num_topk, num_local_experts);
    const std::int64_t most = num_ranks * num_tokens * rows_of_token;
    const std::int64_t even = std::min(most, kTimesEven * num_tokens * num_topk);
    const std::int64_t gaps = by_token ? 0 : num_local_experts * (expert_alignment - 1);
    return std::max(even + gaps, known_rows + known_rows / kSpareShare);
  }
};

/// Value in RoutingTables::source_offsets: the rank's rows did not fit its table, and its entry names another one.
inline constexpr std::int64_t kAnnouncedLater = -1;

struct RoutingTables {
  struct Shape {
    std::size_t num_ranks = 0;
    std::size_t num_tokens = 0;
    std::size_t num_topk = 0;
    std::size_t num_experts = 0;
    std::size_t num_local_experts = 0;
    std::size_t num_blocks = 0;  ///< parts of the tokens that route counts separately
    bool weights = false;
  };

  RouteSummary* summary = nullptr;
  Destination* destinations = nullptr;      ///< [T, K]
  std::int32_t* slots = nullptr;            ///< [T, K]
  std::int32_t* homes = nullptr;            ///< [T, K] home_of each entry
  std::int32_t* sent_tokens = nullptr;      ///< [R, T] tokens for each rank, ascending
  std::int64_t* ids = nullptr;              ///< [T, K]
  float* weights = nullptr;                 ///< [T, K]
  std::int32_t* block_ranks = nullptr;      ///< [blocks + 1, R] this rank's token rows for each rank before a block
  std::int32_t* block_counts = nullptr;     ///< [blocks, CountColumns] counts of each block, then of the blocks before
                                            ///< it
  std::int32_t* rank_base = nullptr;        ///< [R] first token row of this rank on each rank
  std::int64_t* expert_rows = nullptr;      ///< [E] rows of all ranks
  std::int32_t* expert_base = nullptr;      ///< [E] first row of this rank's entries in each expert's group
  std::int32_t* source_base = nullptr;      ///< [R + 1] first token row here of each source
  std::int32_t* rank_counts = nullptr;      ///< [R, R] token rows from each rank to each rank
  std::int64_t* tokens_of_rank = nullptr;   ///< [R] T of each rank
  std::int32_t* rows_per_expert = nullptr;  ///< [L]
  std::int64_t* row_offsets = nullptr;      ///< [L + 1]
  BlockMarks* block_marks = nullptr;        ///< [blocks]
  std::int64_t* source_offsets = nullptr;   ///< [R] offset of each rank's source table in its arena, or kAnnouncedLater
  std::size_t size_bytes = 0;

  static constexpr RoutingTables at(std::byte* base, const Shape& shape) {
    const std::size_t num_entries = shape.num_tokens * shape.num_topk;
    plan::Carver carver(base);
    RoutingTables tables;
    tables.summary = carver.take<RouteSummary>(1);
    tables.destinations = carver.take<Destination>(num_entries);
    tables.slots = carver.take<std::int32_t>(num_entries);
    tables.homes = carver.take<std::int32_t>(num_entries);
    tables.sent_tokens = carver.take<std::int32_t>(shape.num_ranks * shape.num_tokens);
    tables.ids = carver.take<std::int64_t>(num_entries);
    tables.weights = carver.take<float>(shape.weights ? num_entries : 0);
    tables.block_ranks = carver.take<std::int32_t>((shape.num_blocks + 1) * shape.num_ranks);
    const auto columns = plan::CountColumns::of(static_cast<int>(shape.num_ranks), static_cast<int>(shape.num_experts));
    tables.block_counts = carver.take<std::int32_t>(shape.num_blocks * static_cast<std::size_t>(columns.size));
    tables.rank_base = carver.take<std::int32_t>(shape.num_ranks);
    tables.expert_rows = carver.take<std::int64_t>(shape.num_experts);
    tables.expert_base = carver.take<std::int32_t>(shape.num_experts);
    tables.source_base = carver.take<std::int32_t>(shape.num_ranks + 1);
    tables.rank_counts = carver.take<std::int32_t>(shape.num_ranks * shape.num_ranks);
    tables.tokens_of_rank = carver.take<std::int64_t>(shape.num_ranks);
    tables.rows_per_expert = carver.take<std::int32_t>(shape.num_local_experts);
    tables.row_offsets = carver.take<std::int64_t>(shape.num_local_experts + 1);
    tables.block_marks = carver.take<BlockMarks>(shape.num_blocks);
    tables.source_offsets = carver.take<std::int64_t>(shape.num_ranks);
    tables.size_bytes = carver.used_bytes();
    return tables;
  }
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CALL_ROUTING_TABLES_HPP
