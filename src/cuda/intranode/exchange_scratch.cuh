#ifndef FERRY_CUDA_INTRANODE_EXCHANGE_SCRATCH_CUH
#define FERRY_CUDA_INTRANODE_EXCHANGE_SCRATCH_CUH

/// Shared memory of the blocks that count and exchange.

#include <cstdint>

#include "cuda/intranode/route_params.hpp"
#include "cuda/sync/memory_order.cuh"
#include "plan/count_columns.hpp"

namespace ferry::cuda::device {

inline constexpr int kExchangeThreads = 1024;
inline constexpr int kExchangeWarps = kExchangeThreads / kWarpLanes;

/// What the counts of all ranks mean.
struct Verdict {
  bool go;     ///< all ranks made this call, with good ids
  bool valid;  ///< and all have room for their rows
  bool repeats;
  Fault fault;      ///< unless valid
  std::int64_t at;  ///< rank or expert at fault
};

/// What has the same size in every call.
struct Shared {
  std::byte* bases[kMaxRanks];
  CountsHeader header;           ///< this rank's own
  unsigned long long bad_entry;  ///< as BlockMarks, of the block and then of all
  std::uint32_t repeats;
  bool is_last;
  bool here;
  Verdict verdict;
  unsigned long long first_full_expert;  ///< kNoExpert: none
  std::int32_t num_token_rows;           ///< of this rank
  std::int64_t warp_sums[kExchangeWarps];
  std::int64_t carry;
};
inline constexpr unsigned long long kNoExpert = UINT64_MAX;

/// What depends on the call. Where ranks do not agree the contents mean nothing.
struct Scratch {
  int4* part_sums;              ///< [SumShares::num_items]
  int4* totals;                 ///< [CountColumns] counts of a block, then of this rank
  std::int32_t* by_owner;       ///< [E] of the placement, as are the next two
  std::int32_t* owner;          ///< [E]
  std::int32_t* first_of_rank;  ///< [R + 1]
  std::int32_t* rows_before;    ///< [E] rows of sources before this rank, in the order of `by_owner`
  std::int64_t* group_first;    ///< [E + 1] first row of each group, counted over all ranks, in that order
  std::int64_t* rank_rows;      ///< [R] rows of each rank
  std::int32_t* from_rank;      ///< [R] rows that come here from each
  std::int32_t* to_rank;        ///< [R] rows of this rank's tokens on each
  CountsHeader* headers;        ///< [R]
  std::size_t size_bytes;

  FERRY_HOST_DEVICE static Scratch at(std::byte* base, int num_ranks, int num_experts) {
    const auto columns = plan::CountColumns::of(num_ranks, num_experts);
    const int most_items = columns.num_quads() < kExchangeThreads ? kExchangeThreads : columns.num_quads();
    const auto ranks = static_cast<std::size_t>(num_ranks);
    const auto experts = static_cast<std::size_t>(num_experts);
    plan::Carver carver(base);
    Scratch scratch{};
    scratch.part_sums = carver.take<int4>(static_cast<std::size_t>(most_items));
    scratch.totals = carver.take<int4>(static_cast<std::size_t>(columns.num_quads()));
    scratch.by_owner = carver.take<std::int32_t>(experts);
    scratch.owner = carver.take<std::int32_t>(experts);
    scratch.first_of_rank = carver.take<std::int32_t>(ranks + 1);
    scratch.rows_before = carver.take<std::int32_t>(experts);
    scratch.group_first = carver.take<std::int64_t>(experts + 1);
    scratch.rank_rows = carver.take<std::int64_t>(ranks);
    scratch.from_rank = carver.take<std::int32_t>(ranks);
    scratch.to_rank = carver.take<std::int32_t>(ranks);
    scratch.headers = carver.take<CountsHeader>(ranks);
    scratch.size_bytes = carver.used_bytes();
    return scratch;
  }
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_EXCHANGE_SCRATCH_CUH
