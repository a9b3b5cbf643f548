#ifndef FERRY_CUDA_LATENCY_FAR_ROWS_CUH
#define FERRY_CUDA_LATENCY_FAR_ROWS_CUH

/// Copies to the slab of rows from other nodes that travel as words (far_message.hpp), as the words arrive.

#include <cstddef>
#include <cstdint>

#include "cuda/latency/copy_rows.cuh"
#include "cuda/latency/far_message.hpp"
#include "cuda/latency/row_words.cuh"

namespace ferry::cuda::device {

/// Waits for words of a far row; false when the group broke. `numbers`: halves of the words that hold numbers, lane's
/// number i of `count` at numbers[i * step].
__device__ __noinline__ inline bool await_row_words(const LatencyParams& call, const SentCall& sent, int source,
                                                    const std::uint64_t* numbers, int step, int count) {
  bool came = true;
#pragma unroll 1
  for (int i = 0; came && i < count; ++i) {
    came = wait_payload(call, {Awaited::kRow, source, sent.number}, numbers + i * step).came;
  }
  return came;
}

/// Copies the x of a warp's share of a row that travels as words, as they arrive; false when the group broke. `words`:
/// its first. Also waits for words without x: none may come when its place has been granted again.
__device__ inline bool copy_row_words(const LatencyParams& call, const DispatchReceiveRows& params,
                                      const SentCall& sent, const Arrival& arrival, const std::byte* words,
                                      const Share& share) {
  constexpr int kVectors = kFarStepVectors;
  const auto x_bytes = static_cast<int>(params.row.x_bytes);
  const auto row_bytes = static_cast<int>(params.row.stride());
  bool came = true;
#pragma unroll 1
  for (int begin = share.part * kVectors * kLineBytes; begin < row_bytes && came;
       begin += share.parts * kVectors * kLineBytes) {
    const int num_vectors = count_line_vectors<kVectors>(row_bytes - begin);
    const std::byte* const step = words + word_offset(begin, kVectors);
    int looks = call.counts_waits ? kWordLooks : 0;  // looks are not counted as waits
    LaneWords<kVectors> lane = LaneWords<kVectors>::load(step, num_vectors);
#pragma unroll 1
    for (; came && !lane.are_of(sent.number, num_vectors); ++looks) {
      if (looks >= kWordLooks) {
        constexpr int kStep = kLineBytes / static_cast<int>(sizeof(std::uint64_t));
        came = await_row_words(call, sent, arrival.source, LaneWords<kVectors>::number_of(step, 0), kStep,
                               LaneWords<kVectors>::count(num_vectors));
      }
      lane = LaneWords<kVectors>::load(step, num_vectors);
    }
    came = __all_sync(kAllLanes, static_cast<int>(came)) != 0;
    if (!came) break;
#pragma unroll 1
    for (unsigned left = arrival.here; left != 0; left &= left - 1) {
      const std::int64_t slot = __shfl_sync(kAllLanes, arrival.slot, __ffs(static_cast<int>(left)) - 1);
      std::byte* const to = params.x + slot * params.x_stride + begin;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (begin + vector_offset(i) < x_bytes) *reinterpret_cast<uint4*>(to + vector_offset(i)) = lane.value(i);
      }
    }
  }
  return came;
}

/// Address of the 4 bytes at `offset` of a row, a multiple of 4, among its words.
__device__ inline const std::uint32_t* payload_in_row(const std::byte* words, int offset) {
  constexpr int kStepBytes = kFarStepVectors * kLineBytes;
  constexpr int kVectorBytes = sizeof(uint4);
  constexpr int kQuarter = sizeof(std::uint32_t);
  const int in_step = offset % kStepBytes;
  // A lane's quarters of vectors in turn, three to a word (LaneWords).
  const int quarter = in_step / kLineBytes * (kVectorBytes / kQuarter) + offset % kVectorBytes / kQuarter;
  const int lane = in_step % kLineBytes / kVectorBytes;
  const std::byte* const step = words + word_offset(offset - in_step, kFarStepVectors);
  const std::byte* const word = step + quarter / kFarWordPayloads * kLineBytes + lane * kVectorBytes;
  return reinterpret_cast<const std::uint32_t*>(word) + quarter % kFarWordPayloads;
}

/// copy_row_words() of the scales.
__device__ inline bool copy_scale_words(const LatencyParams& call, const DispatchReceiveRows& params,
                                        const SentCall& sent, const Arrival& arrival, const std::byte* words,
                                        const Share& share) {
  const LatencyRow& row_shape = params.row;
  constexpr int kQuarter = sizeof(std::uint32_t);
  const int part = share.parts - 1 - share.part;  // as in copy_arrival()
#pragma unroll 1
  for (int first = part * kWarpLanes; first < row_shape.num_scales; first += share.parts * kWarpLanes) {
    const int column = first + lane_idx();
    const bool mine = column < row_shape.num_scales;
    const int offset = static_cast<int>(row_shape.scales_offset()) + (mine ? column : first) * row_shape.scale_bytes;
    const std::uint32_t* const payload = payload_in_row(words, offset / kQuarter * kQuarter);
    const auto* const number = reinterpret_cast<const std::uint64_t*>(reinterpret_cast<std::uintptr_t>(payload) /
                                                                      kFarWordBytes * kFarWordBytes) +
                               1;
    bool came = is_word_of(look_for_word(call, sent.number, number), sent.number);
    if (!came) came = await_row_words(call, sent, arrival.source, number, 0, 1);
    if (__all_sync(kAllLanes, static_cast<int>(came)) == 0) return false;
    fence_device();  // the word is loaded in two parts
    const std::uint32_t value = *static_cast<const volatile std::uint32_t*>(payload) >> (offset % kQuarter * 8);
    store_scale(params, arrival, column, mine, value);
  }
  return true;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_FAR_ROWS_CUH
