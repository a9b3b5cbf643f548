#ifndef FERRY_CUDA_INTRANODE_DISPATCH_PARAMS_HPP
#define FERRY_CUDA_INTRANODE_DISPATCH_PARAMS_HPP

/// Dispatch: sending blocks write this rank's rows and records to their receivers; receiving blocks unpack rows as they
/// arrive. One kernel, followed by one that fills rows without tokens if the caller asked for that.

#include <cuda_runtime_api.h>

#include "cuda/intranode/chunk_borders.hpp"
#include "cuda/intranode/routing_tables.hpp"
#include "cuda/sync/rank_params.hpp"
#include "plan/host_device.hpp"
#include "plan/token_record.hpp"

namespace ferry::cuda {

/// [rows, S] elements of 1 or 4 bytes, strides in elements.
struct ScaleTable {
  std::byte* data = nullptr;
  int num_scales = 0;
  int element_bytes = 0;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;
  /// Rows in slabs [L, C, S] whose experts are not spaced evenly like their rows: C and the stride of experts;
  /// otherwise 0.
  std::int64_t slab_rows = 0;
  std::int64_t slab_stride = 0;

  FERRY_HOST_DEVICE std::byte* row(std::int64_t idx) const {
    const std::int64_t slab = slab_rows > 0 ? idx / slab_rows : 0;
    return data + ((idx - slab * slab_rows) * row_stride + slab * slab_stride) * element_bytes;
  }
};

/// This rank's output tensors.
struct DispatchOutputs {
  std::byte* x = nullptr;
  std::int64_t x_stride = 0;
  ScaleTable scales;
  void* ids = nullptr;
  bool wide_ids = false;
  float* weights = nullptr;
};

struct DispatchParams {
  RankParams ranks;
  EntryMessage entry;  ///< agreement 0: this rank refuses the call; the fields below are then not read
  const RouteSummary* summary = nullptr;

  // Sending.
  const Destination* destinations = nullptr;  ///< [T, K]
  const std::int32_t* block_ranks = nullptr;  ///< [blocks + 1, R]
  const std::int32_t* rank_base = nullptr;    ///< [R]
  const std::int32_t* sent_tokens = nullptr;  ///< [R, T]
  const std::int32_t* homes = nullptr;        ///< [T, K]
  const float* weights = nullptr;             ///< [T, K]
  ScaleTable scales;
  const std::byte* x = nullptr;
  std::int64_t x_stride = 0;
  std::int64_t row_bytes = 0;
  std::int64_t num_tokens = 0;
  int num_topk = 0;
  int tokens_per_block = 0;
  int num_blocks = 0;
  plan::TokenRecord record;

  // Receiving.
  DispatchOutputs out;
  const std::byte* staged_rows = nullptr;  ///< null: peers write into out.x themselves
  const std::byte* records = nullptr;
  const std::int32_t* source_base = nullptr;  ///< [R + 1]
  bool one_row_per_token = true;              ///< kTokens
  bool unpacks = false;  ///< records carry scales, ids or weights; else peers write them straight into `out`

  // Shape of the launch.
  bool bulk = true;
  bool overlaps = false;  ///< LaunchShape::overlaps
  int num_send_blocks = 1;
  int num_own_blocks = 0;  ///< blocks among these that send nothing to peers; 0: all blocks send to all ranks
  int num_receive_blocks = 0;
  /// Warps of a sending block that send in runs: kRunWarps (dispatch_units.cuh), or this few, each with longer stages.
  static constexpr int kFewRunWarps = 4;
  bool few_run_warps = false;
  ChunkBorders chunks;       ///< chunks of tokens
  int run_chunk_blocks = 1;  ///< blocks of kBorderRows rows in a chunk of the rows for one rank
};

struct PaddingParams {
  RankParams ranks;
  const RouteSummary* summary = nullptr;
  const std::int32_t* source = nullptr;  ///< [rows, 2]
  std::int64_t num_rows = 0;
  std::int32_t* out_source = nullptr;
  DispatchOutputs out;
  std::int64_t row_bytes = 0;
  int num_topk = 0;
  int weights_per_row = 0;
  bool zero = false;
  bool clears_refused = false;  ///< DispatchOptions::clear_if_refused
  int max_blocks = 1;
};

cudaError_t launch_dispatch(const DispatchParams& params, cudaStream_t stream);
/// Fills rows that hold no token, and the source table. Called after launch_dispatch.
cudaError_t launch_padding(const PaddingParams& params, cudaStream_t stream);
/// `has_bulk`: whether the kernels were compiled for an architecture with the bulk copy engine (older code also runs on
/// newer GPUs) and the stages fit `shared_limit` bytes of shared memory per block.
cudaError_t load_dispatch_kernels(std::size_t shared_limit, bool& has_bulk);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_DISPATCH_PARAMS_HPP
