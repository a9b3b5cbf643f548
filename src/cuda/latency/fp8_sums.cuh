#ifndef FERRY_CUDA_LATENCY_FP8_SUMS_CUH
#define FERRY_CUDA_LATENCY_FP8_SUMS_CUH

/// Sums of ranks that travel as FP8 (fp8_row.hpp): each rank quantises its f32 sums with the bits of quantize_fp8, and
/// the source adds code * scale, rounded to f32. Lanes of a warp exchange scales, so every function here is for all
/// lanes of a converged warp.

#include <cstdint>

#include "cuda/latency/node_sum.cuh"
#include "cuda/latency/row_words.cuh"
#include "cuda/latency/term_order.cuh"
#include "cuda/numeric/quantize.cuh"

namespace ferry::cuda::device {

using Fp8Sums = LaneSums<false, kFp8StepVectors>;
using Fp8Words = LaneWords<kFp8CodeVectors, true>;

static_assert(kFp8CodeVectors == kFarStepVectors, "await_step() waits for their words");

/// A lane's part of a step: eight channels in each line, of a block that half the warp shares.
class Fp8Step {
 public:
  __device__ static Fp8Step of(const Fp8Sums& sums) {
    Fp8Step step;
    std::uint32_t own_amax = 0;
#pragma unroll
    for (int line = 0; line < kFp8StepVectors; ++line) {
      const std::uint32_t amax = amax_of_block<false>(channels_of(sums, line));
      if (own_line() == line) own_amax = amax;
    }
    const numeric::BlockScale own = numeric::make_scale(own_amax, Quantization::kFp8);
    step.own_scale_ = own.stored;
#pragma unroll
    for (int line = 0; line < kFp8StepVectors; ++line) {
      numeric::BlockScale scale{};
      scale.multiplier = of_line(own.multiplier, line);
      step.codes_[line] = quantize_channels<false>(channels_of(sums, line), scale);
    }
    return step;
  }

  __device__ static Fp8Step of(const Fp8Words& words) {
    Fp8Step step;
#pragma unroll
    for (int vector = 0; vector < kFp8CodeVectors; ++vector) {
      const uint4 codes = words.value(vector);
      step.codes_[2 * vector] = {codes.x, codes.y};
      step.codes_[2 * vector + 1] = {codes.z, codes.w};
    }
    step.own_scale_ = __uint_as_float(words.last_quarter());
    return step;
  }
  __device__ Fp8Words words(std::uint64_t number) const {
    uint4 values[kFp8CodeVectors];
#pragma unroll
    for (int vector = 0; vector < kFp8CodeVectors; ++vector) {
      const uint2 first = codes_[2 * vector];
      const uint2 second = codes_[2 * vector + 1];
      values[vector] = {first.x, first.y, second.x, second.y};
    }
    return {values, number, __float_as_uint(own_scale_)};
  }

  /// Loads the step at `begin` bytes of a bf16 row of `row_bytes`. `row`: where the quantised row begins.
  __device__ static Fp8Step load(const std::byte* row, std::int64_t row_bytes, int begin) {
    Fp8Step step;
    const int num_vectors = count_vectors<kFp8StepVectors>(static_cast<int>(row_bytes) - begin);
#pragma unroll
    for (int line = 0; line < kFp8StepVectors; ++line) {
      step.codes_[line] = line < num_vectors ? load_row_pair(row + codes_at(begin, line)) : uint2{};
    }
    const std::int64_t scale_at = own_scale_at(row_bytes, begin);
    step.own_scale_ = scale_at < fp8_row_bytes(row_bytes) ? load_row_float(row + scale_at) : 0.0F;
    return step;
  }
  /// Stores a step that load() loads.
  __device__ void store(std::byte* row, std::int64_t row_bytes, int begin) const {
    const int num_vectors = count_vectors<kFp8StepVectors>(static_cast<int>(row_bytes) - begin);
#pragma unroll
    for (int line = 0; line < kFp8StepVectors; ++line) {
      if (line < num_vectors) *reinterpret_cast<uint2*>(row + codes_at(begin, line)) = codes_[line];
    }
    const std::int64_t scale_at = own_scale_at(row_bytes, begin);
    const bool stores_scale = lane_idx() % kBlockLanes < kFp8StepVectors && scale_at < fp8_row_bytes(row_bytes);
    if (stores_scale) *reinterpret_cast<float*>(row + scale_at) = own_scale_;
  }

  __device__ void add_to(Fp8Sums& sums) const {
#pragma unroll
    for (int line = 0; line < kFp8StepVectors; ++line) {
      const float scale = of_line(own_scale_, line);
      float* const channels = sums.vectors[line].values;
#pragma unroll
      for (int pair = 0; pair < kLaneChannels / 2; ++pair) {
        const std::uint32_t codes = pair < 2 ? codes_[line].x : codes_[line].y;
        const float2 values = values_of_e4m3_pair(codes >> (pair % 2 * 16) & 0xFFFFU);
        channels[2 * pair] = __fadd_rn(channels[2 * pair], __fmul_rn(values.x, scale));
        channels[2 * pair + 1] = __fadd_rn(channels[2 * pair + 1], __fmul_rn(values.y, scale));
      }
    }
  }

 private:
  /// Line whose scale this lane has.
  __device__ static int own_line() { return lane_idx() % kFp8StepVectors; }
  /// A value that a lane of this half of the warp has for the line.
  __device__ static float of_line(float own, int line) {
    return __shfl_sync(kAllLanes, own, lane_idx() / kBlockLanes * kBlockLanes + line);
  }
  __device__ static LaneChannels channels_of(const Fp8Sums& sums, int line) {
    LaneChannels channels;
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) channels.bits[i] = __float_as_uint(sums.vectors[line].values[i]);
    return channels;
  }
  __device__ static std::int64_t codes_at(int begin, int line) {
    return (begin + vector_offset(line)) / kBfloat16Bytes;
  }
  __device__ static std::int64_t own_scale_at(std::int64_t row_bytes, int begin) {
    const std::int64_t block = codes_at(begin, own_line()) / kQuantBlockSize;
    return row_bytes / kBfloat16Bytes + block * static_cast<std::int64_t>(sizeof(float));
  }

  uint2 codes_[kFp8StepVectors];
  float own_scale_;
};

/// See sum_terms().
__device__ inline void store_sums(const Fp8Place& out, int begin, const Fp8Sums& sums, int /*num_vectors*/) {
  Fp8Step::of(sums).store(out.row, out.row_bytes, out.begin + begin);
}

/// Sum of a token's rows: those of each node are added and rounded, and then the nodes.
class Fp8NodeSums {
 public:
  __device__ Fp8NodeSums() {
    total_.clear();
    node_.clear();
  }
  __device__ void add(const Fp8Step& row, bool ends_node) {
    row.add_to(node_);
    if (!ends_node) return;
#pragma unroll
    for (int i = 0; i < kFp8StepVectors; ++i) total_.vectors[i].add(node_.vectors[i].round(), 1.0F);
    node_.clear();
  }
  __device__ const Fp8Sums& total() const { return total_; }

 private:
  Fp8Sums total_;
  Fp8Sums node_;
};

/// Bytes [part.begin, part.begin + part.bytes) of the sum of the terms' rows, which are FP8 and count once.
/// `terms.rows`: where each row begins. `node_terms`: null if all rows are of one node. `out`: the part's place. One
/// copy of the code, as in sum_terms.
__device__ __noinline__ inline void sum_fp8_rows(const Terms& terms, const NodeTerms* node_terms, int num_rows,
                                                 const Fp8Place& part, std::byte* out, int bytes) {
#pragma unroll 1
  for (int begin = 0; begin < bytes; begin += kFp8StepBytes) {
    Fp8NodeSums sums;
#pragma unroll 1
    for (int first = 0; first < num_rows; first += kSumRows) {
      Fp8Step steps[kSumRows];
#pragma unroll
      for (int i = 0; i < kSumRows; ++i) {
        if (first + i < num_rows) {
          steps[i] = Fp8Step::load(terms.rows[first + i], part.row_bytes, part.begin + begin);
        }
      }
#pragma unroll
      for (int i = 0; i < kSumRows; ++i) {
        const int row = first + i;
        if (row >= num_rows) continue;
        sums.add(steps[i], node_terms == nullptr ? row + 1 == num_rows : node_terms->ends[row] != 0);
      }
    }
    sums.total().store(out + begin, count_vectors<kFp8StepVectors>(bytes - begin));
  }
  __syncwarp();
}

/// out[begin, end) = the sum of a token's rows in the order of docs/nodes.md, added as they arrive. `begin` is the
/// start of a step. False when the group broke.
__device__ inline bool sum_fp8_words(const LatencyParams& call, const SentCall& sent, const RankSums& rows,
                                     std::byte* out, int begin, int end) {
  const int most_looks = call.counts_waits ? 0 : kWordLooks;  // looks are not counted as waits
#pragma unroll 1
  for (int step = begin; step < end; step += kFp8StepBytes) {
    Fp8NodeSums sums;
    Fp8Words next;
    if (rows.ranks != 0) next = Fp8Words::load(rows.rows[0] + fp8_word_offset(step), kFp8CodeVectors);
    int row = 0;
#pragma unroll 1
    for (unsigned left = rows.ranks; left != 0; ++row) {
      const int rank = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      Fp8Words words = next;
      if (left != 0) next = Fp8Words::load(rows.rows[row + 1] + fp8_word_offset(step), kFp8CodeVectors);
      const std::byte* const at = rows.rows[row] + fp8_word_offset(step);
#pragma unroll 1
      for (int looks = 0; __all_sync(kAllLanes, static_cast<int>(words.are_of(sent.number, kFp8CodeVectors))) == 0;
           ++looks) {
        bool came = true;
        if (looks >= most_looks) came = await_step(call, {Awaited::kRow, rank, sent.number}, at, kFp8CodeVectors);
        if (__all_sync(kAllLanes, static_cast<int>(came)) == 0) return false;
        words = Fp8Words::load(at, kFp8CodeVectors);
      }
      sums.add(Fp8Step::of(words), (rows.ends >> rank & 1U) != 0);
    }
    sums.total().store(out + step, count_vectors<kFp8StepVectors>(end - step));
  }
  return true;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_FP8_SUMS_CUH
