#ifndef FERRY_CUDA_CALL_CHANNEL_TABLES_HPP
#define FERRY_CUDA_CALL_CHANNEL_TABLES_HPP

/// Writes a Routing's tables by channel, with one kernel that involves this rank alone.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/backend.hpp"
#include "cuda/call/routing_tables.hpp"
#include "cuda/sync/rank_params.hpp"

namespace ferry::cuda {

class Context;
struct CudaRouting;

struct ChannelTablesParams {
  ChannelTablesCall out;
  RoutingTables tables;
  const std::int32_t* source = nullptr;  ///< [rows in use, 2]
  const LocalState* local = nullptr;
  int rank = 0;
  int num_ranks = 1;
  std::int64_t num_tokens = 0;
  int num_topk = 1;
  /// The host has not yet seen whether it must launch the route's last step again. If it must, it launches this kernel
  /// again too, and this kernel writes nothing until then.
  bool early = false;
};

ChannelTablesParams channel_tables_params(const RankParams& ranks, const CudaRouting& routing,
                                          const ChannelTablesCall& call);

/// Backend::channel_tables of a Routing whose params these are.
Status write_channel_tables(Context& context, const ChannelTablesParams& params);

cudaError_t launch_channel_tables(const ChannelTablesParams& params, cudaStream_t stream);
cudaError_t load_channel_tables_kernel();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CALL_CHANNEL_TABLES_HPP
