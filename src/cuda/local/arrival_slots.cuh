#ifndef FERRY_CUDA_LOCAL_ARRIVAL_SLOTS_CUH
#define FERRY_CUDA_LOCAL_ARRIVAL_SLOTS_CUH

/// The slots of rows that are expanded. A block takes an expert and looks through the rows until it has found all of
/// that expert's: a row's place is the number of those before it, which nobody else has to tell.

#include <cstdint>

#include "cuda/sync/flags.cuh"
#include "plan/arrival_tables.hpp"

namespace ferry::cuda::device {

template <int kNumWarps>
class SlotWriter {
  /// Rows that a block looks at together, a bit of a word for each.
  static constexpr int kWordsPerWarp = 8;
  static constexpr int kWords = kNumWarps * kWordsPerWarp;
  static_assert(kWords == 2 * kWarpLanes, "a lane counts two words");

 public:
  struct Shared {
    std::uint32_t words[kWords];
    std::int32_t sums[kNumWarps];
  };

  __device__ SlotWriter(const plan::ArrivalParams& params, Shared& shared)
      : params_(params),
        shared_(shared),
        reads_pairs_(params.wide_ids && params.num_topk % 2 == 0 &&
                     reinterpret_cast<std::uintptr_t>(params.ids) % sizeof(longlong2) == 0) {}

  /// All threads of the block.
  __device__ void write(std::int64_t expert) {
    const std::int32_t start = rows_before(expert);
    const std::int32_t count = params_.rows_per_expert[expert];
    if (threadIdx.x == 0) {
      if (params_.expert_ends != nullptr) params_.expert_ends[expert] = start + count;
      if (params_.rows_of_expert != nullptr) params_.rows_of_expert[expert] = count;
    }
    if (params_.origin == nullptr) return;
    constexpr std::int64_t kRows = kWords * kWarpLanes;
    std::int32_t found = 0;
    for (std::int64_t first = 0; first < params_.num_rows && found < count; first += kRows) {
      look(expert, first);
      __syncthreads();
      found += place(expert, first, start + found);
      __syncthreads();  // the words are written again
    }
  }

 private:
  __device__ std::int32_t rows_before(std::int64_t expert) {
    std::int32_t sum = 0;
    for (std::int64_t before = threadIdx.x; before < expert; before += kNumWarps * kWarpLanes) {
      sum += params_.aligned_rows(before);
    }
    for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    __syncthreads();  // an expert before this one may still be adding
    if (lane_idx() == 0) shared_.sums[warp_idx()] = sum;
    __syncthreads();
    sum = 0;
    for (const std::int32_t of_warp : shared_.sums) sum += of_warp;
    return sum;
  }

  /// The last choice of a row that has the expert; -1: none.
  __device__ int find(std::int64_t row, std::int64_t expert) const {
    if (row >= params_.num_rows || params_.is_spare(row)) return -1;
    int last = -1;
    for (int k = 0; !reads_pairs_ && k < params_.num_topk; ++k) {
      if (params_.id(row * params_.num_topk + k) == expert) last = k;
    }
    for (int k = 0; reads_pairs_ && k < params_.num_topk; k += 2) {  // what takes the time are the loads
      const longlong2 ids = static_cast<const longlong2*>(params_.ids)[(row * params_.num_topk + k) / 2];
      if (ids.x == expert) last = k;
      if (ids.y == expert) last = k + 1;
    }
    return last;
  }

  __device__ void look(std::int64_t expert, std::int64_t first) {
    unsigned mine = 0;  // a bit for each word, so that no load waits for a vote
#pragma unroll
    for (int i = 0; i < kWordsPerWarp; ++i) {
      if (find(row_of(first, i), expert) >= 0) mine |= 1U << i;
    }
#pragma unroll
    for (int i = 0; i < kWordsPerWarp; ++i) {
      const unsigned word = __ballot_sync(kAllLanes, (mine >> i & 1U) != 0);
      if (lane_idx() == i) shared_.words[warp_idx() * kWordsPerWarp + i] = word;
    }
  }

  /// Writes the slots from `next` on. -> how many there are
  __device__ std::int32_t place(std::int64_t expert, std::int64_t first, std::int32_t next) {
    const int low = __popc(shared_.words[2 * lane_idx()]);
    std::int32_t through = low + __popc(shared_.words[2 * lane_idx() + 1]);
    const std::int32_t own = through;
    for (int distance = 1; distance < kWarpLanes; distance *= 2) {
      const std::int32_t lower = __shfl_up_sync(kAllLanes, through, static_cast<unsigned>(distance));
      if (lane_idx() >= distance) through += lower;
    }
    const std::int32_t before_low = through - own;
    for (int i = 0; i < kWordsPerWarp; ++i) {
      const int at = warp_idx() * kWordsPerWarp + i;
      const std::uint32_t word = shared_.words[at];
      std::int32_t before = __shfl_sync(kAllLanes, before_low, at / 2);
      if (at % 2 == 1) before += __shfl_sync(kAllLanes, low, at / 2);
      if ((word >> lane_idx() & 1U) == 0) continue;
      before += __popc(word & ((1U << lane_idx()) - 1));
      const std::int64_t row = row_of(first, i);
      params_.origin[row * (2 + params_.num_topk) + 2 + find(row, expert)] = next + before;
    }
    return __shfl_sync(kAllLanes, through, kWarpLanes - 1);
  }

  __device__ static std::int64_t row_of(std::int64_t first, int word) {
    return first + (warp_idx() * kWordsPerWarp + word) * kWarpLanes + lane_idx();
  }

  const plan::ArrivalParams& params_;
  Shared& shared_;
  bool reads_pairs_;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LOCAL_ARRIVAL_SLOTS_CUH
