#ifndef FERRY_CUDA_INTRANODE_EXCHANGE_SCRATCH_CUH
#define FERRY_CUDA_INTRANODE_EXCHANGE_SCRATCH_CUH

/// Shared memory of the blocks that count and exchange.

#include <cstdint>

#include "cuda/intranode/route_params.hpp"
#include "cuda/sync/flags.cuh"
#include "cuda/sync/shared_memory.cuh"
#include "plan/count_columns.hpp"

namespace ferry::cuda::device {

inline constexpr int kExchangeThreads = 1024;
inline constexpr int kExchangeWarps = kExchangeThreads / kWarpLanes;

/// Verdict on the counts of all ranks.
struct Verdict {
  bool go;     ///< all ranks made this call, with valid ids
  bool valid;  ///< and all ranks have room for their rows
  bool repeats;
  bool known_to_some;  ///< if not valid: hosts of other ranks may have known at once
  Fault fault;         ///< if not valid
  std::int64_t at;     ///< rank or expert at fault
};

/// Part of the shared memory whose size is the same in every call.
struct alignas(kSharedAlignment) Shared {
  std::byte* bases[kMaxRanks];
  CountsHeader header;           ///< this rank's own
  unsigned long long bad_entry;  ///< as in BlockMarks: first of the block, then of all blocks
  std::uint32_t repeats;
  std::uint32_t num_homeless;  ///< as in BlockMarks: of the part being counted, then of all
  bool is_last;
  bool here;    ///< all ranks have arrived, with all their words; else the group is broken
  bool others;  ///< words of some rank may not arrive: it makes another call, or the group is broken
  unsigned long long first_full_expert;  ///< kNoExpert: none
  std::int32_t num_token_rows;           ///< of this rank
  std::int64_t warp_sums[kExchangeWarps];
  std::int64_t carry;
};
inline constexpr unsigned long long kNoExpert = UINT64_MAX;

/// Most experts of a placement that every counting block copies to its shared memory, beside its loads of ids. In
/// global memory the placement's tables would cost loads that depend on each other.
inline constexpr int kNearExperts = 2048;

/// Offsets of the parts of a Scratch. Computed on the host: on the GPU this took a tenth of the kernel's instructions.
struct ScratchOffsets {
  std::uint32_t part_sums = 0;
  std::uint32_t totals = 0;
  std::uint32_t by_owner = 0;
  std::uint32_t owner = 0;
  std::uint32_t first_of_rank = 0;
  std::uint32_t rows_before = 0;
  std::uint32_t group_first = 0;
  std::uint32_t rank_rows = 0;
  std::uint32_t from_rank = 0;
  std::uint32_t to_rank = 0;
  std::uint32_t headers = 0;
  std::uint32_t ranges = 0;
  std::uint32_t homes = 0;
  std::uint32_t size_bytes = 0;

  /// `num_logical`: experts whose homes are in tables; 0 if each expert is its only home.
  static constexpr ScratchOffsets of(int num_ranks, int num_experts, int num_logical) {
    const auto columns = plan::CountColumns::of(num_ranks, num_experts);
    const int most_items = columns.num_quads() < kExchangeThreads ? kExchangeThreads : columns.num_quads();
    const auto ranks = static_cast<std::size_t>(num_ranks);
    const auto experts = static_cast<std::size_t>(num_experts);
    const bool near = num_logical > 0 && num_logical <= kNearExperts && num_experts <= kNearExperts;
    plan::Carver carver(nullptr);
    const auto take = [&carver]<typename T>(T, std::size_t count) {
      const auto offset = static_cast<std::uint32_t>(carver.used_bytes());
      carver.take<T>(count);
      return offset;
    };
    ScratchOffsets offsets;
    offsets.part_sums = take(int4{}, static_cast<std::size_t>(most_items));
    offsets.totals = take(int4{}, static_cast<std::size_t>(columns.num_quads()));
    offsets.by_owner = take(std::int32_t{}, experts);
    offsets.owner = take(std::int32_t{}, experts);
    offsets.first_of_rank = take(std::int32_t{}, ranks + 1);
    offsets.rows_before = take(std::int32_t{}, experts);
    offsets.group_first = take(std::int64_t{}, experts + 1);
    offsets.rank_rows = take(std::int64_t{}, ranks);
    offsets.from_rank = take(std::int32_t{}, ranks);
    offsets.to_rank = take(std::int32_t{}, ranks);
    offsets.headers = take(CountsHeader{}, ranks);
    offsets.ranges = take(plan::HomeRange{}, near ? static_cast<std::size_t>(num_logical) : 0);
    offsets.homes = take(std::int32_t{}, near ? experts : 0);
    offsets.size_bytes = static_cast<std::uint32_t>(carver.used_bytes());
    return offsets;
  }
};

/// Part of the shared memory whose size depends on the call. If ranks do not agree, its contents are meaningless.
struct Scratch {
  int4* part_sums;              ///< [SumShares::num_items]
  int4* totals;                 ///< [CountColumns] counts of a block, then of this rank
  std::int32_t* by_owner;       ///< [E] table of the placement, as are the next two
  std::int32_t* owner;          ///< [E]
  std::int32_t* first_of_rank;  ///< [R + 1]
  std::int32_t* rows_before;    ///< [E] rows of sources before this rank, in the order of `by_owner`
  std::int64_t* group_first;    ///< [E + 1] first row of each group, counted over all ranks, in the order of `by_owner`
  std::int64_t* rank_rows;      ///< [R] rows of each rank
  std::int32_t* from_rank;      ///< [R] rows that this rank receives from each rank
  std::int32_t* to_rank;        ///< [R] rows of this rank's tokens on each rank
  CountsHeader* headers;        ///< [R]
  plan::HomeRange* ranges;      ///< [logical experts] of the placement, if it is near
  std::int32_t* homes;          ///< [E]

  __device__ Scratch(std::byte* base, const ScratchOffsets& offsets)
      : part_sums(reinterpret_cast<int4*>(base + offsets.part_sums)),
        totals(reinterpret_cast<int4*>(base + offsets.totals)),
        by_owner(reinterpret_cast<std::int32_t*>(base + offsets.by_owner)),
        owner(reinterpret_cast<std::int32_t*>(base + offsets.owner)),
        first_of_rank(reinterpret_cast<std::int32_t*>(base + offsets.first_of_rank)),
        rows_before(reinterpret_cast<std::int32_t*>(base + offsets.rows_before)),
        group_first(reinterpret_cast<std::int64_t*>(base + offsets.group_first)),
        rank_rows(reinterpret_cast<std::int64_t*>(base + offsets.rank_rows)),
        from_rank(reinterpret_cast<std::int32_t*>(base + offsets.from_rank)),
        to_rank(reinterpret_cast<std::int32_t*>(base + offsets.to_rank)),
        headers(reinterpret_cast<CountsHeader*>(base + offsets.headers)),
        ranges(reinterpret_cast<plan::HomeRange*>(base + offsets.ranges)),
        homes(reinterpret_cast<std::int32_t*>(base + offsets.homes)) {}
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_EXCHANGE_SCRATCH_CUH
