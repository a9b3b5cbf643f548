#ifndef FERRY_CUDA_LATENCY_NODE_SUM_CUH
#define FERRY_CUDA_LATENCY_NODE_SUM_CUH

/// Sums of a token's rows over several nodes (docs/nodes.md, "The order of sums"), at the source: those of each node,
/// then the nodes, each sum rounded. Rows that ranks have summed up (kRankSums) are rows like others.

#include <cstddef>
#include <cstdint>

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

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_NODE_SUM_CUH
