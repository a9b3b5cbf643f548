#include "cuda/call/channel_tables.hpp"

#include "cuda/driver/device_guard.hpp"
#include "cuda/internode/calls.hpp"
#include "cuda/internode/routing.hpp"
#include "cuda/memory/memory_checks.hpp"

namespace ferry::cuda {

Status internode::channel_tables(Context& context, const ChannelTablesCall& call) {
  const DeviceGuard guard(context.parts().device);
  if (!guard.status().ok()) return guard.status();
  const auto& routing = static_cast<const NodesRouting&>(*call.routing);
  Status status = check_channel_tables_memory(call, routing.num_tokens, *context.parts().arena);
  if (!status.ok()) return status;
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
  return context.launch_local("channel_tables", call.stream,
                              [&params](cudaStream_t stream) { return launch_channel_tables(params, stream); });
}

}  // namespace ferry::cuda
