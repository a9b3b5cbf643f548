#include "cuda/call/channel_tables.hpp"

#include "cuda/call/routing.hpp"
#include "cuda/context/context.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/memory/memory_checks.hpp"

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

Status write_channel_tables(Context& context, const ChannelTablesParams& params) {
  const DeviceGuard guard(context.parts().device);
  if (!guard.status().ok()) return guard.status();
  Status status = check_channel_tables_memory(params.out, params.num_tokens, *context.parts().arena);
  if (!status.ok()) return status;
  return context.launch_local("channel_tables", params.out.stream,
                              [&params](cudaStream_t stream) { return launch_channel_tables(params, stream); });
}

}  // namespace ferry::cuda
