#ifndef FERRY_CUDA_LATENCY_NODE_SUM_CUH
#define FERRY_CUDA_LATENCY_NODE_SUM_CUH

/// Sums of a token's rows over several nodes (docs/nodes.md, "The order of sums"), at the source: the rows of each rank
/// (kRankSums), then those of each node, then the nodes, each sum rounded. Rows that the node's ranks have summed up
/// are rows like others.

#include <cstddef>
#include <cstdint>

#include "cuda/latency/term_order.cuh"

namespace ferry::cuda::device {

/// Ends of the sums of a token's rows: for each row the bits of the sums that end with it.
struct NodeTerms {
  static constexpr std::uint8_t kEndOfRank = 1;
  static constexpr std::uint8_t kEndOfNode = 2;
  std::uint8_t ends[kMaxTerms];
};

/// Fills `ends` after order_terms. `rank`: that of this lane's entry, `counts`: it has a row. All lanes of a warp.
__device__ inline void find_ends(const Terms& terms, const TermPlace& place, bool counts, int rank, int ranks_per_node,
                                 NodeTerms& node_terms) {
  int row = 0;
#pragma unroll 1
  while (counts && row + 1 < place.num_rows && terms.first_weight[row + 1] <= place.position) ++row;
  // Keys ascend by rank, so the next row of another rank ends this one's sum. Lanes of one row store the same.
  if (counts) node_terms.ends[row] = static_cast<std::uint8_t>(rank);
  __syncwarp();
  std::uint8_t ends = 0;
  if (lane_idx() < place.num_rows) {
    const int own = node_terms.ends[lane_idx()];
    const bool last = lane_idx() + 1 == place.num_rows;
    const int next = last ? -1 : node_terms.ends[lane_idx() + 1];
    if (next != own) ends |= NodeTerms::kEndOfRank;
    if (last || next / ranks_per_node != own / ranks_per_node) ends |= NodeTerms::kEndOfNode;
  }
  __syncwarp();
  if (lane_idx() < place.num_rows) node_terms.ends[lane_idx()] = ends;
  __syncwarp();
}

/// out[0, bytes) = the sum of the terms. `rank_sums`: each rank's rows are summed up first. All lanes of a warp;
/// afterwards `terms` may be filled again.
template <bool kFloat32>
__device__ __noinline__ inline void sum_over_nodes(const Terms& terms, const NodeTerms& node_terms, int num_rows,
                                                   bool rank_sums, std::byte* out, int bytes) {
  constexpr int kUnitBytes = sizeof(uint4);
  constexpr int kStepBytes = kWarpLanes * kUnitBytes;
#pragma unroll 1
  for (int offset = lane_idx() * kUnitBytes; offset < bytes; offset += kStepBytes) {
    Vector<kFloat32> total;
    Vector<kFloat32> node;  // of sums of ranks
    Vector<kFloat32> sum;   // of rows
    total.clear();
    node.clear();
    sum.clear();
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
          sum.add(values[i], terms.weights[weight]);
        }
        const std::uint8_t ends = node_terms.ends[row];
        if (rank_sums && (ends & NodeTerms::kEndOfRank) != 0) {
          node.add(sum.round(), 1.0F);
          sum.clear();
        }
        if ((ends & NodeTerms::kEndOfNode) != 0) {
          total.add(rank_sums ? node.round() : sum.round(), 1.0F);
          node.clear();
          sum.clear();
        }
      }
    }
    store_sum(out, offset, total.round());
  }
  __syncwarp();
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_NODE_SUM_CUH
