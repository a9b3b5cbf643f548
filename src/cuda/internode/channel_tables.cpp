#include "cuda/call/channel_tables.hpp"

#include "cuda/internode/calls.hpp"
#include "cuda/internode/routing.hpp"

namespace ferry::cuda {

Status internode::channel_tables(Context& context, const ChannelTablesCall& call) {
  const auto& routing = static_cast<const NodesRouting&>(*call.routing);
  const NodeTables& tables = routing.routed.tables;
  const Topology& topology = context.parts().sync->topology();
  ChannelTablesParams params;
  params.out = call;
  params.tables.summary = tables.summary;
  params.tables.destinations = tables.token_destinations;
  params.tables.rank_base = tables.rank_base;
  params.tables.source_base = tables.source_base;
  params.tables.rank_counts = tables.rank_counts;
  params.tables.tokens_of_rank = tables.tokens_of_rank;
  params.source = tables.source;
  params.local = context.parts().ranks.control.local;
  params.rank = topology.rank;
  params.num_ranks = topology.num_ranks;
  params.num_tokens = routing.num_tokens;
  params.num_topk = routing.num_topk;
  return write_channel_tables(context, params);
}

}  // namespace ferry::cuda
