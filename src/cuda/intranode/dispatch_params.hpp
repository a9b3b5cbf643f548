#ifndef FERRY_CUDA_INTRANODE_DISPATCH_PARAMS_HPP
#define FERRY_CUDA_INTRANODE_DISPATCH_PARAMS_HPP

/// Dispatch: sending blocks push this rank's rows and records to their receivers; receiving blocks unpack what arrives
/// as it arrives. One kernel, then one that fills rows without tokens if the caller asked for that.

#include <cuda_runtime_api.h>

#include "cuda/call/routing_tables.hpp"
#include "cuda/call/tensors.hpp"
#include "cuda/intranode/chunk_borders.hpp"
#include "cuda/sync/rank_params.hpp"
#include "plan/host_device.hpp"
#include "plan/token_record.hpp"

namespace ferry::cuda {

struct DispatchParams {
  RankParams ranks;
  EntryMessage entry;  ///< agreement 0: this rank refuses; then nothing below is read
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
  bool unpacks = false;  ///< scales, ids or weights come in records; else peers write them straight into `out`

  // How.
  bool bulk = true;
  bool overlaps = false;  ///< LaunchShape::overlaps
  int num_send_blocks = 1;
  int num_own_blocks = 0;  ///< of these, that send nothing to peers; 0: all blocks send to all
  int num_receive_blocks = 0;
  /// Warps of a sending block that send in runs: kRunWarps of dispatch_units.cuh, or so few, each with longer stages.
  static constexpr int kFewRunWarps = 4;
  bool few_run_warps = false;
  ChunkBorders chunks;       ///< of tokens
  int run_chunk_blocks = 1;  ///< kBorderRows rows each, of a chunk of what goes to one rank
};

cudaError_t launch_dispatch(const DispatchParams& params, cudaStream_t stream);
/// `has_bulk`: whether they were compiled for an architecture with the bulk copy engine (older code also runs on newer
/// GPUs) and the stages fit `shared_limit` bytes of shared memory per block.
cudaError_t load_dispatch_kernels(std::size_t shared_limit, bool& has_bulk);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_DISPATCH_PARAMS_HPP
