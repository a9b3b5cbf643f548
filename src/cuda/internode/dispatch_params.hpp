#ifndef FERRY_CUDA_INTERNODE_DISPATCH_PARAMS_HPP
#define FERRY_CUDA_INTERNODE_DISPATCH_PARAMS_HPP

/// Dispatch over several nodes. The exchange brings all tokens of the rail that go to this node, this rank's own
/// included, into staging, each with a record that the sending blocks make. In the pull, every rank takes its rows from
/// the staging of its node: in the exchange's kernel as they arrive, or in a later kernel. A rank alone in its node has
/// no pull where the exchange can write its outputs.

#include <cuda_runtime_api.h>

#include "cuda/call/tensors.hpp"
#include "cuda/sync/rail_params.hpp"
#include "cuda/sync/rank_params.hpp"
#include "plan/token_record.hpp"

namespace ferry::cuda {

/// Contents of the records of this rank's tokens (plan/token_record.hpp), with ids of the group.
struct RecordParams {
  int num_topk = 0;
  plan::TokenRecord format;
  ScaleTable scales;
  const std::int64_t* ids = nullptr;  ///< [T, K]
  const float* weights = nullptr;     ///< [T, K]
};

/// Location of a row's token: position `item` in the staging of rank `forwarder` of this node. -1: no token.
struct RowItem {
  std::int32_t forwarder;
  std::int32_t item;
};

struct PullParams {
  RankParams ranks;
  EntryMessage entry;  ///< offsets of this rank's staging: rows and records
  const RouteSummary* gate = nullptr;
  std::int64_t num_rows = 0;
  const RowItem* row_items = nullptr;          ///< [rows]
  const std::int32_t* row_experts = nullptr;   ///< [rows] the row's expert; null in kTokens
  const std::int32_t* owner = nullptr;         ///< [E]
  const std::int32_t* local_expert = nullptr;  ///< [E]
  int num_experts = 0;
  int num_topk = 0;
  int group_rank = 0;  ///< this rank's number in the group
  std::int64_t row_bytes = 0;
  plan::TokenRecord format;
  DispatchOutputs out;
  int num_blocks = 1;   ///< blocks of a separate pull kernel
  int num_sources = 1;  ///< ranks whose rows arrive at the same time
};

cudaError_t launch_pull(const PullParams& params, cudaStream_t stream);
cudaError_t load_node_dispatch_kernels();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTERNODE_DISPATCH_PARAMS_HPP
