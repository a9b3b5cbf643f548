#ifndef FERRY_CUDA_LATENCY_NODE_SUM_CUH
#define FERRY_CUDA_LATENCY_NODE_SUM_CUH

/// Sums of a token's rows over several nodes (docs/nodes.md, "The order of sums"), at the source: those of each node,
/// then the nodes, each sum rounded. Rows that ranks have summed up (kRankSums) are rows like others.

#include <cstddef>
#include <cstdint>

#include "cuda/latency/row_words.cuh"
#include "cuda/latency/term_order.cuh"

namespace ferry::cuda::device {

/// For each of a token's rows: first the rank that it comes from, then whether it ends the sum of its node.
struct NodeTerms {
  std::uint8_t ends[kMaxTerms];
};

/// Fills `ends` after order_terms. `rank`: that of this lane's entry, `counts`: it has a row. All lanes of a warp.
__device__ inline void find_ends(const Terms& terms, const TermPlace& place, bool counts, int rank, int ranks_per_node,
                                 NodeTerms& node_terms) {
  int row = 0;
#pragma unroll 1
  while (counts && row + 1 < place.num_rows && terms.first_weight[row + 1] <= place.position) ++row;
  // Keys ascend by rank, so the next row of another node ends this one's sum. Lanes of one row store the same.
  if (counts) node_terms.ends[row] = static_cast<std::uint8_t>(rank);
  __syncwarp();
  bool ends = false;
  if (lane_idx() < place.num_rows) {
    const int own = node_terms.ends[lane_idx()];
    const bool last = lane_idx() + 1 == place.num_rows;
    ends = last || node_terms.ends[lane_idx() + 1] / ranks_per_node != own / ranks_per_node;
  }
  __syncwarp();
  if (lane_idx() < place.num_rows) node_terms.ends[lane_idx()] = ends ? 1 : 0;
  __syncwarp();
}

/// out[0, bytes) = the sum of the terms. All lanes of a warp; afterwards `terms` may be filled again.
template <bool kFloat32>
__device__ __noinline__ inline void sum_over_nodes(const Terms& terms, const NodeTerms& node_terms, int num_rows,
                                                   std::byte* out, int bytes) {
  constexpr int kUnitBytes = sizeof(uint4);
  constexpr int kStepBytes = kWarpLanes * kUnitBytes;
#pragma unroll 1
  for (int offset = lane_idx() * kUnitBytes; offset < bytes; offset += kStepBytes) {
    Vector<kFloat32> total;
    Vector<kFloat32> node;
    total.clear();
    node.clear();
#pragma unroll 1
    for (int first = 0; first < num_rows; first += kSumRows) {
      uint4 values[kSumRows];
#pragma unroll
      for (int i = 0; i < kSumRows; ++i) {
        if (first + i < num_rows) values[i] = load_row(terms.rows[first + i] + offset);
      }
#pragma unroll
      for (int i = 0; i < kSumRows; ++i) {
        const int row = first + i;
        if (row >= num_rows) continue;
#pragma unroll 1
        for (int weight = terms.first_weight[row]; weight < terms.first_weight[row + 1]; ++weight) {
          node.add(values[i], terms.weights[weight]);
        }
        if (node_terms.ends[row] == 0) continue;
        total.add(node.round(), 1.0F);
        node.clear();
      }
    }
    *reinterpret_cast<uint4*>(out + offset) = total.round();
  }
  __syncwarp();
}

/// Rows of far ranks in an inbox, if they are words.
struct FarRowWords {
  std::int64_t stride = 0;  ///< 0: they are not
  const std::byte* first = nullptr;
  const std::byte* end = nullptr;
  const FarLayout* layout = nullptr;
  const std::int32_t* firsts = nullptr;  ///< FarReturns::own_firsts

  __device__ bool contain(const std::byte* row) const { return row >= first && row < end; }
  /// The rank that returns a row.
  __device__ int source_of(const std::byte* row) const {
    const auto idx = static_cast<std::int32_t>((row - first) / stride);
    int source = 0;
#pragma unroll 1
    for (int i = 0; i < layout->num_far(); ++i) {
      const int rank = layout->far_rank(i);
      if (firsts[rank] <= idx) source = rank;  // firsts ascend
    }
    return source;
  }
};

/// Waits for this lane's words of a step; false when the group broke. `step`: address of the step. `num_vectors`: of
/// every lane. Not inlined, like poll_word.
__device__ __noinline__ inline bool await_far_row(const LatencyParams& call, const SentCall& sent,
                                                  const FarRowWords& far, const std::byte* step, int num_vectors) {
  return await_step(call, {Awaited::kRow, far.source_of(step), sent.number}, step, num_vectors);
}

/// A step of a row, from this node or as words from another.
class NodeRowStep {
 public:
  /// `row`: address of its `bytes` bytes. `begin`: offset of the step.
  __device__ void load(const FarRowWords& far, const std::byte* row, int begin, int bytes) {
    are_words_ = far.contain(row);
    row_ = row + (are_words_ ? word_offset(begin, kFarStepVectors) : begin);
    if (are_words_) {
      num_line_vectors_ = count_line_vectors<kFarStepVectors>(bytes - begin);
      words_ = Words::load(row_, num_line_vectors_);
      return;
    }
    const int num_vectors = count_vectors<kFarStepVectors>(bytes - begin);
#pragma unroll
    for (int i = 0; i < kFarStepVectors; ++i) {
      if (i < num_vectors) values_[i] = load_row(row_ + vector_offset(i));
    }
  }
  /// Waits for words that have not come; false when the group broke.
  __device__ bool await(const LatencyParams& call, const SentCall& sent, const FarRowWords& far) {
    int looks = call.counts_waits ? kWordLooks : 0;  // looks are not counted as waits
#pragma unroll 1
    for (; are_words_ && !words_.are_of(sent.number, num_line_vectors_); ++looks) {
      if (looks >= kWordLooks && !await_far_row(call, sent, far, row_, num_line_vectors_)) return false;
      words_ = Words::load(row_, num_line_vectors_);
    }
    return true;
  }
  /// `vector` is known to the compiler.
  __device__ uint4 value(int vector) const { return are_words_ ? words_.value(vector) : values_[vector]; }

 private:
  using Words = LaneWords<kFarStepVectors>;
  const std::byte* row_ = nullptr;
  bool are_words_ = false;
  int num_line_vectors_ = 0;
  Words words_;
  uint4 values_[kFarStepVectors] = {};
};

/// sum_over_nodes() where the rows of far ranks are words, added as they arrive. False when the group broke.
template <bool kFloat32>
__device__ __noinline__ inline bool sum_words_over_nodes(const LatencyParams& call, const SentCall& sent,
                                                         const Terms& terms, const NodeTerms& node_terms, int num_rows,
                                                         const FarRowWords& far, std::byte* out, int bytes) {
  constexpr int kVectors = kFarStepVectors;
  bool came = true;
#pragma unroll 1
  for (int begin = 0; begin < bytes && came; begin += kVectors * kLineBytes) {
    const int num_vectors = count_vectors<kVectors>(bytes - begin);
    LaneSums<kFloat32, kVectors> total;
    LaneSums<kFloat32, kVectors> node;
    total.clear();
    node.clear();
    NodeRowStep next;
    if (num_rows > 0) next.load(far, terms.rows[0], begin, bytes);
#pragma unroll 1
    for (int row = 0; row < num_rows && came; ++row) {
      NodeRowStep step = next;
      if (row + 1 < num_rows) next.load(far, terms.rows[row + 1], begin, bytes);
      came = step.await(call, sent, far);
#pragma unroll 1
      for (int weight = terms.first_weight[row]; weight < terms.first_weight[row + 1]; ++weight) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) node.vectors[i].add(step.value(i), terms.weights[weight]);
      }
      if (node_terms.ends[row] == 0) continue;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) total.vectors[i].add(node.vectors[i].round(), 1.0F);
      node.clear();
    }
    if (came) total.store(out + begin, num_vectors);
  }
  came = __all_sync(kAllLanes, static_cast<int>(came)) != 0;
  return came;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_NODE_SUM_CUH
