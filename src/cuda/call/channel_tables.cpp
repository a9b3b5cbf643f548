#include "cuda/call/channel_tables.hpp"

#include "cuda/call/routing.hpp"

namespace ferry::cuda {

ChannelTablesParams channel_tables_params(const RankParams& ranks, const CudaRouting& routing,
                                          const ChannelTablesCall& call) {
  ChannelTablesParams params;
  params.out = call;
  params.tables = routing.tables;
  params.source = routing.source_rows();
  params.local = ranks.control.local;
  params.rank = ranks.rank;
  params.num_ranks = ranks.num_ranks;
  params.num_tokens = routing.num_tokens;
  params.num_topk = routing.num_topk;
  return params;
}

}  // namespace ferry::cuda
