#ifndef FERRY_CUDA_INTRANODE_COMBINE_PARAMS_HPP
#define FERRY_CUDA_INTRANODE_COMBINE_PARAMS_HPP

/// Combine, in one kernel: summing blocks read the rows of this rank's tokens from the peers' memory and sum them. If
/// this rank's own rows are in memory that peers cannot reach, staging blocks copy them to reachable memory while the
/// peers sum the rows already staged.

#include <cuda_runtime_api.h>

#include <array>

#include "cuda/call/routing_tables.hpp"
#include "cuda/call/tensors.hpp"
#include "cuda/sync/rank_params.hpp"

namespace ferry::cuda {

struct CombineParams {
  RankParams ranks;
  EntryMessage entry;  ///< agreement 0: this rank refuses the call; the fields below are then not read
  const RouteSummary* summary = nullptr;

  // Summing.
  const Destination* destinations = nullptr;  ///< [T, K]
  const std::int32_t* rank_base = nullptr;    ///< [R]
  std::int64_t num_tokens = 0;
  int num_topk = 0;
  bool one_row_per_token = true;  ///< kTokens
  bool float32 = false;           ///< payload type is float32, else bf16
  bool weighted = false;
  const float* topk_weights = nullptr;  ///< [T, K]
  BiasRows bias[2];
  std::byte* out_x = nullptr;
  std::int64_t out_stride = 0;
  std::int64_t row_bytes = 0;
  float* out_weights = nullptr;  ///< [T, K], null: no weights are returned

  // This rank's own rows.
  const std::byte* x = nullptr;
  std::int64_t x_stride = 0;
  std::byte* staging = nullptr;               ///< null: peers reach x
  const std::int32_t* source = nullptr;       ///< [rows, 2]
  const std::int32_t* source_base = nullptr;  ///< [R + 1]

  // Shape of the launch.
  bool bulk = true;
  bool overlaps = false;  ///< LaunchShape::overlaps
  int num_sum_blocks = 1;
  int num_stage_blocks = 0;        ///< 0 if and only if nothing is staged
  int rounds_between_reports = 1;  ///< least number of rounds between two reports of a staging block; a round is one
                                   ///< row for each peer

  /// WireFormat::kFp8: all rows are quantised into staging (numeric/wire_row.hpp), from which this rank reads its own
  /// too; rows_stride of `entry` is their distance there. `bias` is then empty, as biases are no rows.
  bool fp8 = false;
  BiasRows wire_bias[2];
};

cudaError_t launch_combine(const CombineParams& params, cudaStream_t stream);
/// Called after load_dispatch_kernels. Clears `has_bulk` also if the sets do not fit `shared_limit`.
cudaError_t load_combine_kernels(std::size_t shared_limit, bool& has_bulk);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_COMBINE_PARAMS_HPP
