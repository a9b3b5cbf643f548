#include "cuda/intranode/channel_tables.hpp"

#include "cuda/driver/device_guard.hpp"
#include "cuda/intranode/calls.hpp"
#include "cuda/intranode/routing.hpp"
#include "cuda/memory/memory_checks.hpp"

namespace ferry::cuda {

Status intranode::channel_tables(Context& context, const ChannelTablesCall& call) {
  const DeviceGuard guard(context.parts().device);
  if (!guard.status().ok()) return guard.status();
  if (Status status = check_channel_tables_memory(call, *context.parts().arena); !status.ok()) return status;
  const auto& routing = static_cast<const CudaRouting&>(*call.routing);
  ChannelTablesParams params;
  params.out = call;
  params.tables = routing.tables;
  params.source = routing.source_rows();
  params.rank = context.parts().ranks.rank;
  params.num_ranks = context.parts().ranks.num_ranks;
  params.num_tokens = routing.num_tokens;
  params.num_topk = routing.num_topk;
  params.num_recv_rows = routing.num_recv_rows;
  return context.launch_local("channel_tables", call.stream,
                              [&params](cudaStream_t stream) { return launch_channel_tables(params, stream); });
}

}  // namespace ferry::cuda
