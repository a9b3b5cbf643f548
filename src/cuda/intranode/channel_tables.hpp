#ifndef FERRY_CUDA_INTRANODE_CHANNEL_TABLES_HPP
#define FERRY_CUDA_INTRANODE_CHANNEL_TABLES_HPP

/// A Routing's tables by channel, in one kernel of this rank alone.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/backend.hpp"
#include "cuda/intranode/routing_tables.hpp"

namespace ferry::cuda {

struct ChannelTablesParams {
  ChannelTablesCall out;
  RoutingTables tables;
  const std::int32_t* source = nullptr;  ///< [num_recv_rows, 2]
  int rank = 0;
  int num_ranks = 1;
  std::int64_t num_tokens = 0;
  int num_topk = 1;
  std::int64_t num_recv_rows = 0;
};

cudaError_t launch_channel_tables(const ChannelTablesParams& params, cudaStream_t stream);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_CHANNEL_TABLES_HPP
